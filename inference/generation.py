"""Continue prompts, token by token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from inference.decoder import Decoder
from inference.sampling import Sampler, Sampling
from model.transformer import Transformer

DEFAULT = Sampling()


@dataclass
class Generation:
    """Prompts that grow together. Iterating gives, for each step, {index of the prompt: its next
    token}, of the prompts that still grow.

    Raises ValueError: an empty prompt, one that is too long for the context (with `slide` it is cut
    to its last half context), or ids that the model does not have.
    """

    model: Decoder | Transformer  # a decoder, or a model to make one of
    prompts: list[list[int]]  # token ids, at least one each
    max_new_tokens: int  # at most so many for each prompt
    sampling: Sampling = DEFAULT  # prompt i draws with seed + i
    _: KW_ONLY
    next_ids: Sequence[list[int]] = ()  # tokens that may follow prompt i at once; [] for all
    stop_ids: tuple[int, ...] = ()  # tokens that end a continuation and are not part of it
    # What happens at the end of the context. True: the later half of the sequence is read anew and
    # the text goes on from there. False: it ends, and `cut` has its index.
    slide: bool = False

    def __post_init__(self):
        model, prompts = self.model, self.prompts
        self.decoder = model if isinstance(model, Decoder) else Decoder(model)
        config = self.decoder.config
        self.context = config.max_seq_len
        for prompt in prompts:
            if not prompt:
                raise ValueError("an empty prompt: begin with the begin-of-document token")
            if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
                raise ValueError(f"token ids must be below the vocabulary of {config.vocab_size}")
            if len(prompt) > self.context and not self.slide:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens, but the context has {self.context}"
                )
        self.texts = [list(prompt) for prompt in prompts]  # with all that has been generated
        self.starts = [0] * len(prompts)  # where the part of it begins that the model sees
        self.live = list(range(len(prompts)))  # row of the decoder → index of the prompt
        self.ended: set[int] = set()
        self.cut: set[int] = set()
        device = self.decoder.device
        self.sampler = Sampler(self.sampling, self.texts, config.vocab_size, device)

    def end(self, index: int) -> None:
        """Let this prompt grow no further."""
        self.ended.add(index)

    def __iter__(self) -> Iterator[dict[int, int]]:
        if not self.max_new_tokens or not self.live:
            return
        logits = restrict(self._read(), self.next_ids)
        for _ in range(self.max_new_tokens - 1):
            tokens = self.sampler(logits)
            yield self._append(tokens)
            self._end_at_the_context()
            rows = [row for row, index in enumerate(self.live) if index not in self.ended]
            if not rows:
                return
            if len(rows) < len(self.live):
                self.live = [self.live[row] for row in rows]
                self.decoder.keep(rows)
                self.sampler.keep(rows)
                tokens = tokens[rows]
            full = max(self.decoder.lengths) == self.context
            logits = self._read() if full else self.decoder.step(tokens)
        yield self._append(self.sampler(logits))

    def _append(self, tokens: Tensor) -> dict[int, int]:
        new = dict(zip(self.live, tokens.tolist(), strict=True))
        self.ended |= {index for index, token in new.items() if token in self.stop_ids}
        new = {index: token for index, token in new.items() if index not in self.ended}
        for index, token in new.items():
            self.texts[index].append(token)
        return new

    def _end_at_the_context(self) -> None:
        """Without `slide`: end what has filled the context."""
        for index, length in zip(self.live, self.decoder.lengths, strict=True):
            if length == self.context and not self.slide and index not in self.ended:
                self.end(index)
                self.cut.add(index)

    def _read(self) -> Tensor:
        """Logits after what the living prompts have become; what is too long loses its past."""
        for index in self.live:
            if len(self.texts[index]) - self.starts[index] > self.context:
                self.starts[index] = len(self.texts[index]) - max(1, self.context // 2)
        seen = [self.texts[index][self.starts[index] :] for index in self.live]
        room = max(map(len, seen)) + self.max_new_tokens
        return self.decoder.read(seen, min(self.context, room))


def restrict(logits: Tensor, next_ids: Sequence[Sequence[int]]) -> Tensor:
    """The first logits of all prompts, (B, vocab_size): -inf where `next_ids` forbids."""
    logits = logits.clone()
    for row, ids in enumerate(next_ids):
        if ids:
            allowed = logits[row, ids]
            logits[row] = -math.inf
            logits[row, ids] = allowed
    return logits


def generate(
    model: Decoder | Transformer,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    *,
    next_ids: Sequence[list[int]] = (),
    stop_ids: tuple[int, ...] = (),
    slide: bool = True,
) -> list[list[int]]:
    """The ids that follow each prompt; see `Generation`."""
    generation = Generation(
        model,
        prompts,
        max_new_tokens,
        sampling,
        next_ids=next_ids,
        stop_ids=stop_ids,
        slide=slide,
    )
    for _ in generation:
        pass
    return [text[len(prompt) :] for text, prompt in zip(generation.texts, prompts, strict=True)]
