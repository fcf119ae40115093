"""Continue prompts: the one decoding loop of terminal, server and samples in training.

Texts join and leave a batch at any token, and one pass over the weights serves all of them.
Source: Yu et al., Orca, https://www.usenix.org/conference/osdi22/presentation/yu (there called
iteration-level scheduling, elsewhere continuous batching).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inference.decoder import Decoder
from inference.sampling import Sampling, choose, penalise
from model.transformer import Transformer

STRETCH = 64  # tokens that a text has room for at first; a long context takes gigabytes


@dataclass(kw_only=True, eq=False)
class Continuation:
    """The tokens that follow one prompt.

    A text that fills the context goes on from its later half, which is read anew. To end it there
    instead, limit `max_new_tokens`.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: at least 1.
        next_ids: tokens that may follow the prompt at once; [] for all.
        stop_ids: tokens that end the text and are no part of it.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    next_ids: Sequence[int] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        self.ids: list[int] = []  # the tokens so far
        self.n_tokens = 0  # their number, with that of `stop_ids`
        self.finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
        self.generator = torch.Generator().manual_seed(self.sampling.seed)
        self.settings = replace(self.sampling, seed=0)  # texts with the same are drawn together
        self._start = 0  # the model sees what stands from here on

    def take(self, token: int) -> None:
        """Append the next token, or end the text. A text that has ended takes nothing."""
        if self.finish_reason:
            return
        self.n_tokens += 1
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return
        self.ids.append(token)
        if self.n_tokens == self.max_new_tokens:
            self.finish_reason = "length"

    def cancel(self) -> None:
        """Write no more of it. May be called from any thread."""
        self.finish_reason = self.finish_reason or "cancelled"

    def seen(self, context: int) -> list[int]:
        """Return the tokens that the model has to read, at most `context`."""
        ids = self.prompt + self.ids
        if len(ids) - self._start > context:
            self._start = len(ids) - max(1, context // 2)
        return ids[self._start :]


class Batch:
    """Texts that grow together; row i of the decoder belongs to `texts[i]`.

    Each text draws with random numbers of its own. It becomes what it would be alone, but for
    rounding.
    """

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.texts: list[Continuation] = []
        self._logits = torch.empty(0, decoder.config.vocab_size, device=decoder.device)
        decoder.keep([])  # forget what another batch may have left

    def add(self, texts: list[Continuation]) -> None:
        """Read the prompts of these texts, which join at the next token."""
        logits = self._read(texts, self.decoder.join).clone()
        for row, text in zip(logits, texts, strict=True):
            if text.next_ids:
                allowed = row[text.next_ids]
                row.fill_(-math.inf)
                row[text.next_ids] = allowed
        self._logits = torch.cat([self._logits, logits])  # (B, vocab_size)
        self.texts += texts

    def step(self) -> None:
        """Give each text its next token. Texts that have ended leave."""
        decoder, context = self.decoder, self.decoder.config.max_seq_len
        tokens = self._draw()
        for text, token in zip(self.texts, tokens.tolist(), strict=True):
            text.take(token)
        rows = [row for row, text in enumerate(self.texts) if not text.finish_reason]
        if len(rows) < len(self.texts):
            self.texts = [self.texts[row] for row in rows]
            decoder.keep(rows)
        if not rows:
            self._logits = self._logits[:0]
        elif max(decoder.lengths) == context:
            self._logits = self._read(self.texts, decoder.read)
        else:
            if max(decoder.lengths) == decoder.room:
                decoder.make_room(min(2 * decoder.room, context))
            self._logits = decoder.step(tokens[rows])

    def _read(self, texts: list[Continuation], read: Callable) -> Tensor:
        """Read these texts with `join` or `read` of the decoder; return the next logits."""
        context = self.decoder.config.max_seq_len
        seen = [text.seen(context) for text in texts]
        return read(seen, min(context, max(map(len, seen)) + STRETCH))

    def _draw(self) -> Tensor:
        """Draw the next token of each text, (B,) int64."""
        drawn = [torch.rand((), generator=t.generator, dtype=torch.float64) for t in self.texts]
        numbers = torch.stack(drawn).to(self.decoder.device)
        groups: dict[Sampling, list[int]] = {}
        for row, text in enumerate(self.texts):
            groups.setdefault(text.settings, []).append(row)
        tokens = torch.empty(len(numbers), dtype=torch.int64, device=numbers.device)
        for sampling, group in groups.items():
            rows = slice(None) if len(groups) == 1 else group  # all of them, without a copy
            logits = self._logits[rows]
            if sampling.repetition_penalty != 1:
                texts = [self.texts[row].prompt + self.texts[row].ids for row in group]
                logits = penalise(logits, texts, sampling.repetition_penalty)
            tokens[rows] = choose(logits, sampling, numbers[rows])
        return tokens


def write(decoder: Decoder, texts: list[Continuation]) -> None:
    """Write these texts to their ends."""
    batch = Batch(decoder)
    batch.add(texts)
    while batch.texts:
        batch.step()


def generate(
    model: Decoder | Transformer,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    next_ids: Sequence[list[int]] = (),
    stop_ids: tuple[int, ...] = (),
) -> list[list[int]]:
    """Return the ids that follow each prompt.

    Args:
        model: a decoder, or a model to make one of.
        prompts: token ids, at least one each.
        sampling: prompt i draws with seed + i.
        next_ids, stop_ids: see `Continuation`; `next_ids` has one list for each prompt, or none.
    """
    texts = [
        Continuation(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=(sampling or Sampling()).numbered(i),
            next_ids=next_ids[i] if next_ids else (),
            stop_ids=stop_ids,
        )
        for i, prompt in enumerate(prompts)
    ]
    if max_new_tokens:
        write(model if isinstance(model, Decoder) else Decoder(model), texts)
    return [text.ids for text in texts]
