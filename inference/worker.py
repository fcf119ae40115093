"""One thread that writes for everybody who asks."""

import sys
import threading
import traceback

from inference.batch import Batch
from inference.continuation import Continuation
from inference.decoder import Decoder


class BusyError(RuntimeError):
    """Nobody else may wait."""


class Worker:
    """Continues texts in a thread of its own. A text that comes while others are being written
    joins them at their next token.

    Args:
        together: texts written at a time, at most; further ones wait for one of them to end.
        waiting: how many may wait besides.
    """

    def __init__(self, decoder: Decoder, *, together: int, waiting: int):
        self._batch, self._together, self._most_waiting = Batch(decoder), together, waiting
        self._waiting: list[Continuation] = []
        self._joining: list[Continuation] = []  # perhaps in the batch already
        self._closing = False
        self._changed = threading.Condition()  # guards the three above
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, text: Continuation) -> None:
        """Have it written; its `deliver` is called in the worker's thread. Raises BusyError: too
        many wait already, or the worker is being closed."""
        with self._changed:
            if self._closing:
                raise BusyError("the server is being stopped")
            if len(self._queue()) >= self._room() + self._most_waiting:
                raise BusyError("too many requests are waiting already: try again later")
            self._waiting.append(text)
            self._changed.notify()

    def close(self) -> None:
        """End the thread, at the next token; what is not written by then fails."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def load(self) -> dict[str, int]:
        """How many texts are being written, and how many wait."""
        with self._changed:
            return {"running": len(self._running()), "waiting": len(self._queue())}

    def _work(self) -> None:
        while not self._closing:
            new = self._next()
            try:
                if new:
                    self._batch.add(new)
                if self._batch.texts:
                    self._batch.step()
            except Exception:  # such as memory: those who ask next shall have an answer
                traceback.print_exc(file=sys.stderr)
                for text in self._running():
                    text.fail()
                self._batch = Batch(self._batch.decoder)
        for text in [*self._batch.texts, *self._waiting]:
            text.fail()

    def _next(self) -> list[Continuation]:
        """Those whose turn has come. While there is nothing else to do, it waits for one."""
        with self._changed:
            self._joining = []  # they have joined, or failed
            while not (self._queue() or self._batch.texts or self._closing):
                self._changed.wait()
            waiting, room = self._queue(), self._room()
            self._waiting, self._joining = waiting[room:], waiting[:room]
        return self._joining

    def _running(self) -> set[Continuation]:
        """Those whose turn has come: the batch has them only when it has read their prompts."""
        return {*self._batch.texts, *self._joining}

    def _room(self) -> int:
        return self._together - len(self._running())

    def _queue(self) -> list[Continuation]:
        """Those who wait and have not left meanwhile."""
        return [text for text in self._waiting if not text.finish_reason]
