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
        self._batch, self._together, self._most_waiting = Batch(decoder), together, waiting
        self._joining: list[StreamedText] = []  # their prompts are being read
        self._waiting: list[StreamedText] = []
        self._closing = False
        self._changed = threading.Condition()  # guards the three above
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, text: StreamedText) -> None:
        """Have a text written; its `deliver` is called in the worker's thread.

        Raises BusyError: too many texts wait already, or the worker is being closed.
        """
        with self._changed:
            if self._closing:
                raise BusyError("the server is being stopped")
            if sum(self._load().values()) >= self._together + self._most_waiting:
                raise BusyError("too many requests are waiting already: try again later")
            self._waiting.append(text)
            self._changed.notify()

    def close(self) -> None:
        """End the thread at the next token. Texts that are not finished by then fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def load(self) -> dict[str, int]:
        """How many texts are being written, and how many wait."""
        with self._changed:
            return self._load()

    def _load(self) -> dict[str, int]:
        self._waiting = [text for text in self._waiting if not text.finish_reason]
        return {"running": len(self._running()), "waiting": len(self._waiting)}

    def _running(self) -> set[StreamedText]:
        return {*self._batch.texts, *self._joining}

    def _work(self) -> None:
        while not self._closing:
            new = self._next()
            try:
                if new:
                    self._batch.add(new)
                if self._batch.texts:
                    self._batch.step()
            except Exception:  # such as too little memory; the next requests may be smaller
                traceback.print_exc(file=sys.stderr)
                for text in self._running():
                    text.fail()
                self._batch = Batch(self._batch.decoder)
        for text in [*self._batch.texts, *self._waiting]:
            text.fail()

    def _next(self) -> list[StreamedText]:
        """Return the texts whose turn has come. With nothing to write, wait for one."""
        with self._changed:
            self._joining = []  # they are in the batch now, or have failed
            while not (self._load()["waiting"] or self._batch.texts or self._closing):
                self._changed.wait()
            room = self._together - len(self._batch.texts)
            self._joining, self._waiting = self._waiting[:room], self._waiting[room:]
            return self._joining
