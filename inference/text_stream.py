"""Text as it comes: ids in, whole characters out, up to a stop string."""

from data.tokenizer import Tokenizer


class TextStream:
    """Turns the ids of one continuation into text, piece by piece.

    What is given out together is what `tokenizer.decode` makes of all ids, up to the first stop
    string, which is not given out; of overlapping ones, the first that is complete. Held back is
    only what the next id may change: the first bytes of a character, and an end that may be the
    beginning of a stop string.

    Args:
        stop: strings that end the text; an empty one is ignored.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(text for text in stop if text)
        # Some tokenizers drop a space at the beginning of what they decode: let something precede.
        self._before = tokenizer.encode("x")
        self._skip = len(tokenizer.decode(self._before))
        self._waiting: list[int] = []
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is now certain, often just that of the token."""
        self._waiting.append(token)
        if self.stopped or _unfinished(self._bytes_at_the_end()):
            return ""
        return self._give(self._decode())

    def end(self) -> str:
        """The rest; nothing comes after it."""
        text = "" if self.stopped else self._give(self._decode())
        rest, self._held = self._held, ""
        return text + rest

    def _decode(self) -> str:
        text = self._tokenizer.decode(self._before + self._waiting)[self._skip :]
        self._waiting = []
        return text

    def _give(self, text: str) -> str:
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        n = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def _bytes_at_the_end(self) -> bytes:
        """The last bytes, at most three, that were written as pieces for single bytes."""
        tail = []
        for token in reversed(self._waiting[-3:]):
            byte = self._tokenizer.byte_of(token)
            if byte is None:
                break
            tail.insert(0, byte)
        return bytes(tail)


def _unfinished(tail: bytes) -> bool:
    """Whether the bytes end within a UTF-8 character."""
    for n in range(1, min(3, len(tail)) + 1):
        byte = tail[-n]
        if byte >= 0xC0:  # begins a character of two, three or four bytes
            return n < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF8 else 1)
        if byte < 0x80:
            return False
    return False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
