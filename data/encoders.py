"""Several processes that turn documents into tokens."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from data.corpus import Record
from data.errors import DataError
from data.tokenizer import Tokenizer, open_tokenizer

BATCH_BYTES = 256 * 1024  # what one worker encodes at a time: large against the cost of sending it


class Document(NamedTuple):
    """A text, or a conversation."""

    tokens: list[np.ndarray]  # of each segmentation, with BOS and EOS
    n_bytes: int  # of the text, or of the answers in it
    where: float  # hash of the text in [0, 1)
    answers: np.ndarray | None = None  # of a conversation, see `ShardWriter.write`


class Encoded(NamedTuple):
    documents: list[Document]
    bad: list[str]  # one message per document that could not be read
    raw_bytes: int
    elsewhere: int = 0  # documents for other stages of training


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started in it inherit that Ctrl-C is nothing to them."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class _Here(Executor):
    """In place of other processes, which take longer to start than one batch takes to encode."""

    def submit(self, function: Callable, /, *args) -> Future:
        future = Future()
        future.set_result(function(*args))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        tokenizer_at.cache_clear()  # the next one may have the same path


@lru_cache(maxsize=1)
def tokenizer_at(path: str) -> Tokenizer:
    """One per process: loading it again for every batch would cost more than encoding."""
    return open_tokenizer(path)


@contextmanager
def encoders(workers: int, n_bytes: int) -> Iterator[Executor]:
    """Processes that encode so many bytes of text. Raises DataError: one of them was killed."""
    if n_bytes <= BATCH_BYTES:
        with _Here() as here:
            yield here
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C is the parent's to handle, once
    )
    try:
        with deaf_to_interrupts():  # as the processes are while they start, before initializer
            for _ in range(workers):  # each starts a process
                pool.submit(os.getpid)
        yield pool
    except BrokenProcessPool as error:
        raise DataError(
            "an encoding process was killed, perhaps for want of memory: try fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_all(
    records: Iterable[Record], encode: Callable, pool: Executor, workers: int
) -> Iterator[Encoded]:
    """Batches of documents, encoded by several processes, in the order of the corpus."""
    batches = _batches(records)

    def submit(count: int) -> list[Future]:
        return [pool.submit(encode, batch) for batch in islice(batches, count)]

    # A window of submitted batches bounds the memory: pool.map would read the whole corpus ahead.
    window = deque(submit(3 * workers))
    while window:
        yield window.popleft().result()
        window.extend(submit(1))


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
