"""The decoding loop, shared by the terminal, the server and the samples in training.

Texts can join and leave the batch at each token. One forward pass serves all texts (continuous
batching). Source: Yu et al., Orca, https://www.usenix.org/conference/osdi22/presentation/yu.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.data.tokenizer import Tokenizer
from lm.inference.decoder import Decoder
from lm.inference.sampling import Sampling, choose, penalise
from model.cache import Cache
from model.transformer import Transformer


@dataclass(eq=False)
class Continuation:
    """One prompt and its new tokens. Whenever the context is full, the model goes on with the
    newest half of the context.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: at least 1.
        next_ids: ids that the first new token may have; empty: any id.
        stop_ids: tokens that end the text and do not become part of it."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    next_ids: Sequence[int] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        self.ids: list[int] = []  # generated so far
        self.finish_reason: str | None = None  # "stop", "length", "cancelled", "error" or "closed"
        self.generator = torch.Generator().manual_seed(self.sampling.seed)
        self._start = 0  # index of the first token that the model sees

    def take(self, token: int) -> None:
        """Append the next token, or end the text."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
        else:
            self.ids.append(token)
            if len(self.ids) == self.max_new_tokens:
                self.finish_reason = "length"

    def seen(self, context: int) -> list[int]:
        """Return the last tokens of prompt and text that the model sees, at most `context`."""
        ids = self.prompt + self.ids
        if len(ids) - self._start > context:
            self._start = len(ids) - max(1, context // 2)
        return ids[self._start :]


@dataclass(kw_only=True, eq=False)
class StreamedText(Continuation):
    """A continuation that delivers its text piece by piece, and ends at an end token.

    Text that the next token may change is held back: an incomplete character, or the possible
    beginning of a stop string.

    Args:
        deliver: called with each piece of text, which may be empty, and `finish_reason`.
        stop: strings that end the text and do not become part of it."""

    tokenizer: Tokenizer
    deliver: Callable[[str, str | None], None]
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        self.stop_ids = (self.tokenizer.eos_id, *self.tokenizer.more_end_ids)
        self.text = ""  # delivered so far
        # Some tokenizers drop a leading space when they decode, so put an "x" in front.
        self._before = self.tokenizer.encode("x")
        self._skipped = len(self.tokenizer.decode(self._before))  # characters to drop: the "x"
        self._skipped += bool(self.next_ids)  # the first piece repeats the prompt's space
        self._n_decoded = 0  # ids before this index are never decoded again
        self._held = ""  # decoded but not delivered

    def take(self, token: int) -> None:
        if self.finish_reason:  # another thread has ended the text
            return
        super().take(token)
        self._decode()
        starts = [self._held.find(stop) for stop in self.stop if stop and stop in self._held]
        if starts:
            self.finish_reason = "stop"
        end = min(starts, default=len(self._held) - self._n_uncertain())
        piece, self._held = self._held[:end], self._held[end:]
        self.text += piece
        self.deliver(piece, self.finish_reason)

    def end(self, reason: str = "cancelled") -> None:
        """End an unfinished text; any thread may call this. `reason` may also be "error", or
        "closed" when the server ends."""
        if not self.finish_reason:
            self.finish_reason = reason
            self.deliver("", reason)

    def _decode(self) -> None:
        """Decode the new ids, except an incomplete character at the end of an unfinished text."""
        text = self.tokenizer.decode(self._before + self.ids[self._n_decoded :])
        end, complete = len(text), len(text.rstrip("\ufffd"))
        if not self.finish_reason:
            end = max(complete, end - 3)  # a character has at most 4 bytes
        self._held += text[self._skipped : end]
        self._skipped = max(self._skipped, end)
        if complete == len(text):
            self._n_decoded = len(self.ids)
            self._skipped = len(self.tokenizer.decode(self._before))

    def _n_uncertain(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        if self.finish_reason:
            return 0
        starts = [stop[:n] for stop in self.stop for n in range(1, len(stop))]
        return max((len(start) for start in starts if self._held.endswith(start)), default=0)


class Batch:
    """Texts that are generated together. Each text is the same as if generated alone, except for
    rounding. Row i of the cache and of the logits belongs to `texts[i]`."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.texts: list[Continuation] = []
        self._cache: Cache | None = None  # None if there are no texts
        self._logits = torch.empty(0, decoder.config.vocab_size, device=decoder.device)

    def add(self, texts: list[Continuation]) -> None:
        """Read the prompts of new texts, which join the batch at the next token."""
        cache, logits = self._read(texts)
        logits = logits.clone()
        for row, text in zip(logits, texts, strict=True):
            if text.next_ids:  # make all other tokens impossible
                allowed = row[text.next_ids]
                row.fill_(-math.inf)
                row[text.next_ids] = allowed
        if self._cache:
            self._cache.append(cache)
        else:
            self._cache = cache
        self._logits = torch.cat([self._logits, logits])  # (B, vocab_size)
        self.texts += texts

    def step(self) -> None:
        """Append the next token to each text, then remove the texts that have ended."""
        tokens = self._draw()
        for text, token in zip(self.texts, tokens.tolist(), strict=True):
            text.take(token)
        rows = [row for row, text in enumerate(self.texts) if not text.finish_reason]
        if not rows:
            self.texts, self._cache, self._logits = [], None, self._logits[:0]
            return
        if len(rows) < len(self.texts):
            self.texts = [self.texts[row] for row in rows]
            self._cache.keep(rows)
            tokens = tokens[rows]
        if self._cache.longest == self._cache.context:
            self._cache = None  # free the memory for the next cache
            self._cache, self._logits = self._read(self.texts)
        else:
            self._logits = self.decoder.step(tokens[:, None], self._cache)

    def _read(self, texts: list[Continuation]) -> tuple[Cache, Tensor]:
        return self.decoder.read([text.seen(self.decoder.config.max_seq_len) for text in texts])

    def _draw(self) -> Tensor:
        """Draw the next token of each text, (B,) int64."""
        groups: dict[Sampling, list[int]] = {}  # texts whose settings differ only in the seed
        for row, text in enumerate(self.texts):
            groups.setdefault(text.sampling, []).append(row)
        tokens = torch.empty(len(self.texts), dtype=torch.int64, device=self._logits.device)
        for sampling, group in groups.items():
            rows = slice(None) if len(groups) == 1 else group  # a slice makes no copy
            texts = [self.texts[row] for row in group]
            logits = self._logits[rows]
            if sampling.repetition_penalty != 1:
                ids = [text.prompt + text.ids for text in texts]
                logits = penalise(logits, ids, sampling.repetition_penalty)
            drawn = [torch.rand((), generator=t.generator, dtype=torch.float64) for t in texts]
            numbers = torch.stack(drawn).to(tokens.device, non_blocking=True)  # do not wait
            tokens[rows] = choose(logits, sampling, numbers)
        return tokens


def generate_all(decoder: Decoder, texts: list[Continuation]) -> None:
    """Generate these texts together until all have ended."""
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
    next_ids: Sequence[int] = (),
    stop_ids: tuple[int, ...] = (),
) -> list[list[int]]:
    """Return the new token ids of each prompt, none if `max_new_tokens` is 0. The tokens of prompt
    i are drawn with seed + i. `Sampling` and `Continuation` describe the other arguments."""
    sampling = sampling or Sampling()
    texts = [
        Continuation(prompt, max_new_tokens, sampling.numbered(i), next_ids, stop_ids)
        for i, prompt in enumerate(prompts)
    ]
    if max_new_tokens:
        generate_all(model if isinstance(model, Decoder) else Decoder(model), texts)
    return [text.ids for text in texts]
