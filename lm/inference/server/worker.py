"""The server's worker: one thread that generates the texts of all requests."""

import threading
import traceback

from lm.inference.decoder import Decoder
from lm.inference.generation import Batch, StreamedText


class Worker:
    """Generate texts in a thread, at most `together` at a time. A new text joins the running batch
    at the next token."""

    def __init__(self, decoder: Decoder, together: int):
        self._decoder, self._together = decoder, together
        self._running: list[StreamedText] = []
        self._waiting: list[StreamedText] = []
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, text: StreamedText) -> None:
        """Queue a text. The worker's thread calls `text.deliver`. Only the finish reason "closed"
        is delivered by the thread that calls `close`, or `submit` after `close`."""
        with self._changed:
            self._waiting.append(text)
            self._changed.notify()
        if self._closing:
            text.end("closed")

    def close(self) -> None:
        """End the thread at the next token. All unfinished texts fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        for text in self._running + self._waiting:
            text.end("closed")

    def _work(self) -> None:
        batch = Batch(self._decoder)
        while True:
            with self._changed:
                while not (self._closing or self._waiting or batch.texts):
                    self._changed.wait()
                if self._closing:
                    return
                free = self._together - len(batch.texts)
                waiting = [text for text in self._waiting if not text.finish_reason]
                new, self._waiting = waiting[:free], waiting[free:]
            self._running = batch.texts + new
            try:
                if new:
                    batch.add(new)
                if batch.texts:
                    batch.step()
            except Exception:  # such as out of memory: a smaller request may succeed
                traceback.print_exc()
                for text in self._running:
                    text.end("error")
                batch = Batch(self._decoder)
