"""One thread that writes for everybody who asks."""

import queue
import sys
import threading
import traceback
from contextlib import suppress

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
        waiting: how many may wait, at least 1.
    """

    def __init__(self, decoder: Decoder, *, together: int, waiting: int):
        self._batch, self._together = Batch(decoder), together
        self._waiting: queue.Queue[Continuation | None] = queue.Queue(waiting)
        self._closing = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, text: Continuation) -> None:
        """Have it written; its `deliver` is called in the worker's thread. Raises BusyError: too
        many wait already, or the worker is being closed."""
        if self._closing:
            raise BusyError("the server is being stopped")
        try:
            self._waiting.put_nowait(text)
        except queue.Full as error:
            raise BusyError("too many requests are waiting already: try again later") from error

    def close(self) -> None:
        """End the thread, at the next token; what is not written by then fails."""
        self._closing = True
        with suppress(queue.Full):
            self._waiting.put_nowait(None)  # it may be waiting for something to do
        self._thread.join()

    @property
    def load(self) -> dict[str, int]:
        """How many texts are being written, and how many wait."""
        return {"running": len(self._batch.texts), "waiting": self._waiting.qsize()}

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
                for text in {*new, *self._batch.texts}:
                    text.fail()
                self._batch = Batch(self._batch.decoder)
        for text in filter(None, [*self._batch.texts, *self._waiting.queue]):
            text.fail()

    def _next(self) -> list[Continuation]:
        """Those whose turn has come. While there is nothing else to do, it waits for one."""
        new, room = [], self._together - len(self._batch.texts)
        with suppress(queue.Empty):
            while len(new) < room:
                text = self._waiting.get(block=not new and not self._batch.texts)
                if text is None:
                    break
                if not text.finish_reason:  # it has not left meanwhile
                    new.append(text)
        return new
