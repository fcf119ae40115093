"""Turn documents into tokens in several processes."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from data.corpus import Record
from data.errors import DataError

BATCH_BYTES = 256 * 1024  # one call of a worker: large against the cost of sending it


class Document(NamedTuple):
    """A text, or a conversation."""

    tokens: list[np.ndarray]  # of each segmentation, with BOS and EOS
    n_bytes: int  # of the text, or of the answers in it
    where: float  # hash of the text in [0, 1)
    answers: np.ndarray | None = None  # of a conversation, see `ShardWriter.write`


class Encoded(NamedTuple):
    """The documents of a batch of records."""

    documents: list[Document]
    bad: list[str]  # one message per document that could not be read
    raw_bytes: int
    elsewhere: int = 0  # documents for other stages of training


Encode = Callable[[list[Record]], Encoded]


@lru_cache(maxsize=1)
def loaded(load: Callable, path: str):
    """Return load(path), where `path` is that of a tokenizer. Each process loads it once, because
    loading takes longer than encoding a batch."""
    return load(path)


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
            batches = _batches(records)

            def submit(count: int) -> list[Future]:
                return [pool.submit(encode, batch) for batch in islice(batches, count)]

            # The window bounds the memory: pool.map would read the whole corpus ahead.
            window = deque(submit(3 * workers))
            while window:
                yield window.popleft().result()
                window.extend(submit(1))

        yield encode_all
    except BrokenProcessPool as error:
        raise DataError(
            "an encoding process was killed, perhaps for want of memory: try fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def readable(batch: list[Record], read: Callable[[Record], Any]) -> tuple[list, list[str]]:
    """Return what `read` makes of the records, and a message for each that cannot be read."""
    values, bad = [], []
    for record in batch:
        try:
            values.append(read(record))
        except DataError as error:
            bad.append(str(error))
    return values, bad


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
