"""Continue prompts: the one decoding loop of terminal, server and samples in training.

Texts join and leave a batch at any token, and one pass over the weights serves all of them
(continuous batching). Source: Yu et al., Orca,
https://www.usenix.org/conference/osdi22/presentation/yu.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from inference.decoder import Decoder
from inference.sampling import Sampling, choose, penalise
from model.cache import Cache
from model.transformer import Transformer


@dataclass(kw_only=True, eq=False)
class Continuation:
    """The tokens that follow one prompt. A text that fills the context goes on from its later half.

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
        self.finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
        self.generator = torch.Generator().manual_seed(self.sampling.seed)
        self.settings = replace(self.sampling, seed=0)  # texts with the same are drawn together
        self._start = 0  # the model sees what stands from here on

    def take(self, token: int) -> None:
        """Append the next token, or end the text. A text that has ended takes nothing."""
        if self.finish_reason:
            return
        if token in self.stop_ids:
            self.finish_reason = "stop"
        else:
            self.ids.append(token)
            if len(self.ids) == self.max_new_tokens:
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


@dataclass(kw_only=True, eq=False)
class StreamedText(Continuation):
    """A continuation that is delivered as text while it is written. It ends at the end piece.

    Text that the next id may change is held back: the first bytes of a character, and an end that
    may be the beginning of a stop string.

    Args:
        deliver: called with each piece of text, which may be empty, and `finish_reason`.
        stop: texts that end it and are no part of it.
    """

    tokenizer: Tokenizer
    deliver: Callable[[str, str | None], None]
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        self.stop_ids = (self.tokenizer.eos_id,)
        self.text = ""  # everything that was delivered
        # Some tokenizers drop a space at the beginning of what they decode: let something precede.
        self._before = self.tokenizer.encode("x")
        # Where `next_ids` are given, the prompt has the space with which the first token begins.
        self._skipped = len(self.tokenizer.decode(self._before)) + bool(self.next_ids)
        self._n_decoded = 0  # ids
        self._held = ""  # decoded, not delivered

    def take(self, token: int) -> None:
        if self.finish_reason:
            return
        super().take(token)
        self._decode()
        if starts := [at for stop in self.stop if stop and (at := self._held.find(stop)) >= 0]:
            self.finish_reason = "stop"
            piece = self._held[: min(starts)]
        else:
            piece = self._held[: len(self._held) - self._n_uncertain()]
        self._held = self._held[len(piece) :]
        self.text += piece
        self.deliver(piece, self.finish_reason)

    def fail(self) -> None:
        """End it where an error has stopped the writing."""
        if not self.finish_reason:
            self.finish_reason = "error"
            self.deliver("", "error")

    def _decode(self) -> None:
        """Decode the ids that are not decoded yet, once they end with a whole character."""
        text = self.tokenizer.decode(self._before + self.ids[self._n_decoded :])
        if self.finish_reason or not text.endswith("\ufffd"):
            self._held += text[self._skipped :]
            self._n_decoded = len(self.ids)
            self._skipped = len(self.tokenizer.decode(self._before))

    def _n_uncertain(self) -> int:
        starts = [stop[:n] for stop in self.stop for n in range(1, len(stop))]
        found = [len(start) for start in starts if self._held.endswith(start)]
        return 0 if self.finish_reason else max(found, default=0)


class Batch:
    """Texts that grow together, each as it would alone, but for rounding. Row i of the cache and
    the logits belongs to `texts[i]`."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.texts: list[Continuation] = []
        self._cache: Cache | None = None  # None without texts
        self._logits = torch.empty(0, decoder.config.vocab_size, device=decoder.device)

    def add(self, texts: list[Continuation]) -> None:
        """Read the prompts of these texts, which join at the next token."""
        cache, logits = self._read(texts)
        logits = logits.clone()
        for row, text in zip(logits, texts, strict=True):
            if text.next_ids:
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
        """Give each text its next token. Texts that have ended leave."""
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
            self._cache = None  # before another takes the same memory
            self._cache, self._logits = self._read(self.texts)
        else:
            self._logits = self.decoder.step(tokens[:, None], self._cache)

    def _read(self, texts: list[Continuation]) -> tuple[Cache, Tensor]:
        return self.decoder.read([text.seen(self.decoder.config.max_seq_len) for text in texts])

    def _draw(self) -> Tensor:
        """Draw the next token of each text, (B,) int64."""
        groups: dict[Sampling, list[int]] = {}
        for row, text in enumerate(self.texts):
            groups.setdefault(text.settings, []).append(row)
        tokens = torch.empty(len(self.texts), dtype=torch.int64, device=self._logits.device)
        for sampling, group in groups.items():
            rows = slice(None) if len(groups) == 1 else group  # all of them, without a copy
            texts = [self.texts[row] for row in group]
            logits = self._logits[rows]
            if sampling.repetition_penalty != 1:
                ids = [text.prompt + text.ids for text in texts]
                logits = penalise(logits, ids, sampling.repetition_penalty)
            drawn = [torch.rand((), generator=t.generator, dtype=torch.float64) for t in texts]
            tokens[rows] = choose(logits, sampling, torch.stack(drawn).to(tokens.device))
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
    """Return the ids that follow each prompt, which draws with seed + its index.

    See `Continuation`; `next_ids` has one list for each prompt, or none.
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
