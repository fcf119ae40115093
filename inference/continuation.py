"""One text as it is written: tokens in, pieces of text out, and why it ended."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from data.tokenizer import Tokenizer
from inference.sampling import Sampling
from inference.text_stream import TextStream


class TooLongError(ValueError):
    """A prompt that leaves no room for an answer."""


@dataclass(eq=False)
class Continuation:
    """What is to follow one prompt. Raises TooLongError: the prompt fills the context.

    Args:
        prompt: token ids, at least one.
        context: tokens that the model can see, prompt and answer together.
        max_new_tokens: at most so many; None for as many as the context has room for.
        next_ids: tokens that may follow the prompt at once; [] for all.
        stop: texts that end it and are not part of it.
        deliver: called with each piece of text, which may be empty, and `finish_reason` as it then
            is; not called again once that is set.
    """

    tokenizer: Tokenizer
    prompt: list[int]
    sampling: Sampling
    context: int
    _: KW_ONLY
    deliver: Callable[[str, str | None], None]
    max_new_tokens: int | None = None
    next_ids: list[int] | tuple[()] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        room = self.context - len(self.prompt)
        if room < 1:
            raise TooLongError(
                f"{len(self.prompt)} tokens leave no room for an answer: the context of this model "
                f"has {self.context}"
            )
        self.room = min(room, self.max_new_tokens or room)
        self.n_tokens = 0  # taken, that of the end included
        self.finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
        self._stream = TextStream(self.tokenizer, self.stop, " " if self.next_ids else "")

    def take(self, token: int) -> None:
        """The next token, unless it is cancelled."""
        if self.finish_reason:
            return
        self.n_tokens += 1
        ends = token == self.tokenizer.eos_id
        text = "" if ends else self._stream.add(token)
        if ends or self._stream.stopped:
            self.finish_reason = "stop"
        elif self.n_tokens == self.room:
            self.finish_reason = "length"
        if self.finish_reason:
            text += self._stream.end()
        self.deliver(text, self.finish_reason)

    def cancel(self) -> None:
        """Nobody wants the rest. May be called from any thread."""
        self.finish_reason = self.finish_reason or "cancelled"

    def fail(self) -> None:
        """It cannot be written to its end."""
        if not self.finish_reason:
            self.finish_reason = "error"
            self.deliver("", "error")
