"""Text as it comes: ids in, whole characters out, up to a stop string."""

import codecs
from collections.abc import Callable
from dataclasses import dataclass

from data.tokenizer import Tokenizer
from inference.generation import Continuation


class TextStream:
    """Turns the ids of one continuation into text, piece by piece.

    The pieces together are what `tokenizer.decode` gives for all ids, up to the first stop string,
    which is not given; of overlapping ones, the first that is complete. Only text that the next id
    may change is held back: the first bytes of a character, and an end that may be the beginning of
    a stop string. Empty stop strings are ignored.

    Args:
        shown: how the first token begins, which is no part of the text: the prompt has it already.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), shown: str = ""):
        self._tokenizer, self._stop = tokenizer, tuple(text for text in stop if text)
        # Some tokenizers drop a space at the beginning of what they decode: let something precede.
        self._before = tokenizer.encode("x")
        self._skip = len(tokenizer.decode(self._before))
        self._shown = len(shown)
        self._waiting: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # of bytes in a row
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Return the text that is now certain, often that of the token."""
        self._waiting.append(token)
        part = self._tokenizer.bytes_of(token)
        if part is None:
            self._utf8.reset()
        else:
            self._utf8.decode(part)
        unfinished = self._utf8.getstate()[0]  # the first bytes of a character
        return "" if self.stopped or unfinished else self._give(self._decode())

    def end(self) -> str:
        """Return the rest; nothing comes after it."""
        text = "" if self.stopped else self._give(self._decode())
        rest, self._held = self._held, ""
        return text + rest

    def _decode(self) -> str:
        text = self._tokenizer.decode(self._before + self._waiting)[self._skip + self._shown :]
        self._waiting, self._shown = [], 0
        return text

    def _give(self, text: str) -> str:
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        begun = [n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])]
        certain = len(text) - max(begun, default=0)
        self._held = text[certain:]
        return text[:certain]


@dataclass(kw_only=True, eq=False)
class StreamedText(Continuation):
    """A continuation that is delivered as text while it is written. It ends at the end piece.

    Args:
        deliver: called with each piece of text, which may be empty, and `finish_reason` as it then
            is. Nothing is delivered after that is set.
        stop: texts that end it and are no part of it.
    """

    tokenizer: Tokenizer
    deliver: Callable[[str, str | None], None]
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        self.stop_ids = (self.tokenizer.eos_id,)
        self._pieces: list[str] = []
        self._stream = TextStream(self.tokenizer, self.stop, " " if self.next_ids else "")

    @property
    def text(self) -> str:
        """Everything that was delivered."""
        return "".join(self._pieces)

    def take(self, token: int) -> None:
        if self.finish_reason:
            return
        super().take(token)
        text = "" if token in self.stop_ids else self._stream.add(token)
        if self._stream.stopped:
            self.finish_reason = "stop"
        if self.finish_reason:
            text += self._stream.end()
        self._pieces.append(text)
        self.deliver(text, self.finish_reason)

    def fail(self) -> None:
        """End it where an error has stopped the writing."""
        if not self.finish_reason:
            self.finish_reason = "error"
            self.deliver("", "error")
