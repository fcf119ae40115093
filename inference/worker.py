"""One thread that writes for everybody who asks."""

import sys
import threading
import traceback

from inference.decoder import Decoder
from inference.generation import Batch
from inference.text_stream import StreamedText


class BusyError(RuntimeError):
    """The worker takes no more texts now."""


class Worker:
    """Writes texts in a thread of its own. A new text joins the others at their next token.

    Args:
        together: texts that are written at a time, at most; others wait for one of them to end.
        waiting: how many may wait.
    """

    def __init__(self, decoder: Decoder, *, together: int, waiting: int):
        self._decoder, self._together, self._most_waiting = decoder, together, waiting
        self._running: list[StreamedText] = []
        self._waiting: list[StreamedText] = []
        self._closing = False
        self._changed = threading.Condition()  # guards the three above
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def load(self) -> dict[str, int]:
        """Count the texts that are being written and those that wait."""
        with self._changed:
            running, waiting = _unfinished(self._running), _unfinished(self._waiting)
        return {"running": len(running), "waiting": len(waiting)}

    def submit(self, text: StreamedText) -> None:
        """Have a text written; its `deliver` is called in the worker's thread.

        Raises BusyError: too many texts wait already, or the worker is being closed.
        """
        with self._changed:
            if self._closing:
                raise BusyError("the server is being stopped")
            if sum(self.load.values()) >= self._together + self._most_waiting:
                raise BusyError("too many requests are waiting already: try again later")
            self._waiting.append(text)
            self._changed.notify()

    def close(self) -> None:
        """End the thread at the next token. Texts that are not finished by then fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        batch = Batch(self._decoder)
        while not self._closing:
            try:
                if new := self._next(batch.texts):
                    batch.add(new)
                if batch.texts:
                    batch.step()
            except Exception:  # such as too little memory; the next requests may be smaller
                traceback.print_exc(file=sys.stderr)
                for text in self._running:
                    text.fail()
                batch = Batch(self._decoder)
        for text in self._running + self._waiting:
            text.fail()

    def _next(self, running: list[StreamedText]) -> list[StreamedText]:
        """Return the texts whose turn has come. With nothing to write, wait for one."""
        with self._changed:
            while not (running or _unfinished(self._waiting) or self._closing):
                self._changed.wait()
            room, waiting = self._together - len(running), _unfinished(self._waiting)
            self._running, self._waiting = running + waiting[:room], waiting[room:]
            return waiting[:room]


def _unfinished(texts: list[StreamedText]) -> list[StreamedText]:
    return [text for text in texts if not text.finish_reason]
