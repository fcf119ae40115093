"""Encode records in several processes."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from data.corpus import Record
from data.documents import Encoded, loaded
from data.errors import DataError

BATCH_BYTES = 256 * 1024  # one call of a worker: large against the cost of sending it

Encode = Callable[[list[Record]], Encoded]


@contextmanager
def encoders(
    workers: int, n_bytes: int
) -> Iterator[Callable[[Iterable[Record], Encode], Iterator[Encoded]]]:
    """Yield a function that encodes records in batches, in several processes where n_bytes are
    worth starting them, and returns the batches in order.

    Raises DataError: one of the processes was killed.
    """
    if n_bytes <= BATCH_BYTES:
        loaded.cache_clear()  # the tokenizer before may have had the same path
        yield lambda records, encode: map(encode, _batches(records))
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C is the parent's to handle, once
    )
    try:
        # Processes inherit this while they start, before the initializer runs.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _ in range(workers):  # each call starts a process
            pool.submit(os.getpid)
        signal.signal(signal.SIGINT, handler)

        def encode_all(records: Iterable[Record], encode: Encode) -> Iterator[Encoded]:
            window = deque()  # bounds the memory: pool.map would read the whole corpus ahead
            for batch in _batches(records):
                window.append(pool.submit(encode, batch))
                if len(window) == 3 * workers:
                    yield window.popleft().result()
            while window:
                yield window.popleft().result()

        yield encode_all
    except BrokenProcessPool as error:
        raise DataError(
            "an encoding process was killed, perhaps for want of memory: try fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch, size = [], 0
    for record in records:
        batch.append(record)
        size += len(record.raw)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
