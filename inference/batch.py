"""Texts that come and go while others are written: one pass over the weights serves all.

Source: Yu et al., Orca, https://www.usenix.org/conference/osdi22/presentation/yu (there called
iteration-level scheduling, elsewhere continuous batching).
"""

import torch

from inference.continuation import Continuation
from inference.decoder import Decoder
from inference.generation import restrict
from inference.sampling import Sampler

STRETCH = 64  # tokens of a text that there is room for at first; a long context takes gigabytes


class Batch:
    """Texts that grow together; row i of the decoder is that of `texts[i]`. Each draws with random
    numbers of its own and so becomes what it would be alone, but for rounding."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.texts: list[Continuation] = []
        self._samplers: list[Sampler] = []
        self._logits = torch.empty(0, decoder.config.vocab_size, device=decoder.device)
        decoder.keep([])  # what others may have left there

    def add(self, texts: list[Continuation]) -> None:
        """Read their prompts."""
        decoder, vocab_size = self.decoder, self.decoder.config.vocab_size
        capacity = max(len(text.prompt) + min(text.room, STRETCH) for text in texts)
        logits = decoder.join([text.prompt for text in texts], capacity)
        logits = restrict(logits, [text.next_ids for text in texts])
        self._logits = torch.cat([self._logits, logits])  # (B, vocab_size)
        self._samplers += [
            Sampler(text.sampling, [text.prompt], vocab_size, decoder.device) for text in texts
        ]
        self.texts += texts

    def step(self) -> None:
        """Give each text its next token. Those that have ended leave."""
        one_by_one = zip(self._samplers, self._logits.split(1), strict=True)
        tokens = torch.cat([sampler(logits) for sampler, logits in one_by_one])  # (B,)
        for text, token in zip(self.texts, tokens.tolist(), strict=True):
            text.take(token)
        rows = [row for row, text in enumerate(self.texts) if not text.finish_reason]
        if len(rows) < len(self.texts):
            self.texts = [self.texts[row] for row in rows]
            self._samplers = [self._samplers[row] for row in rows]
            self.decoder.keep(rows)
        if rows and max(self.decoder.lengths) == self.decoder.room:
            self.decoder.make_room(min(2 * self.decoder.room, self.decoder.config.max_seq_len))
        self._logits = self.decoder.step(tokens[rows]) if rows else self._logits[:0]
