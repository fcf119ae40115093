"""Text as it comes: ids in, whole characters out, up to a stop string."""

import codecs
from collections.abc import Callable
from dataclasses import dataclass

from data.tokenizer import Tokenizer
from inference.generation import Continuation


@dataclass(kw_only=True, eq=False)
class StreamedText(Continuation):
    """A continuation that is delivered as text while it is written. It ends at the end piece.

    The pieces together are what `tokenizer.decode` gives for all ids, up to the first stop string;
    of overlapping ones, the first that is complete. Only text that the next id may change is held
    back: the first bytes of a character, and an end that may be the beginning of a stop string.

    Args:
        deliver: called with each piece of text, which may be empty, and `finish_reason` as it then
            is. Nothing is delivered after that is set.
        stop: texts that end it and are no part of it. Empty ones are ignored.
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
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # of bytes in a row
        self._held = ""  # decoded, not delivered

    def take(self, token: int) -> None:
        if self.finish_reason:
            return
        super().take(token)
        if self.finish_reason or self._ends_a_character(token):
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

    def _ends_a_character(self, token: int) -> bool:
        """Return False where the bytes of the last tokens are the first ones of a character."""
        part = self.tokenizer.bytes_of(token)
        if part is None:
            self._utf8.reset()
        else:
            self._utf8.decode(part)
        return not self._utf8.getstate()[0]

    def _decode(self) -> None:
        """Decode the ids that are not decoded yet."""
        ids = self._before + self.ids[self._n_decoded :]
        self._held += self.tokenizer.decode(ids)[self._skipped :]
        self._n_decoded = len(self.ids)
        self._skipped = len(self.tokenizer.decode(self._before))

    def _n_uncertain(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        if self.finish_reason:
            return 0
        starts = [stop[:n] for stop in self.stop for n in range(1, len(stop))]
        return max((len(start) for start in starts if self._held.endswith(start)), default=0)
