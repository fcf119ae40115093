"""One thread that writes for everybody who asks."""

import queue
import sys
import threading
import traceback

from inference.decoder import Decoder
from inference.generation import Batch, StreamedText


class Worker:
    """Writes texts in a thread of its own. A new text joins the others at their next token.

    Args:
        together: texts that are written at a time, at most; others wait for one of them to end.
    """

    def __init__(self, decoder: Decoder, together: int):
        self._decoder, self._together = decoder, together
        self._running: list[StreamedText] = []
        self._waiting: queue.SimpleQueue[StreamedText | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, text: StreamedText) -> None:
        """Have a text written; its `deliver` is called in the worker's thread."""
        if self._closing:
            text.fail()
        else:
            self._waiting.put(text)

    def close(self) -> None:
        """End the thread at the next token. Texts that are not finished by then fail.

        Call it in the thread that calls `submit`.
        """
        self._closing = True
        self._waiting.put(None)  # wakes the thread
        self._thread.join()
        while not self._waiting.empty():
            if text := self._waiting.get():
                text.fail()

    def _work(self) -> None:
        batch = Batch(self._decoder)
        while not self._closing:
            try:
                new = self._next(len(batch.texts))
                self._running = batch.texts + new
                if new:
                    batch.add(new)
                if batch.texts:
                    batch.step()
            except Exception:  # such as too little memory; the next requests may be smaller
                traceback.print_exc(file=sys.stderr)
                for text in self._running:
                    text.fail()
                batch = Batch(self._decoder)
        for text in self._running:
            text.fail()

    def _next(self, n_running: int) -> list[StreamedText]:
        """Return the texts whose turn has come. With nothing to write, wait for one."""
        new = []
        while n_running + len(new) < self._together:
            if self._waiting.empty() and (n_running or new):
                break
            text = self._waiting.get()
            if text is None:  # the worker is being closed
                break
            if not text.finish_reason:
                new.append(text)
        return new
