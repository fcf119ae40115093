"""From text files to token shards: train the tokenizer, encode in several processes, pack, split.

Documents are written one after the other as BOS, text, EOS; training cuts the stream into
sequences, so that not one position is padding. A document goes to validation if the hash of its
text says so: the same text always falls on the same side, wherever it stands and however often.
"""

import hashlib
import json
import math
import multiprocessing
import os
import signal
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.atomic import whole_folder
from data.corpus import TEXT_COLUMN, Reading, Record, parse, read_records, text_size
from data.errors import DataError
from data.segmentation import Splitter
from data.shards import DESCRIPTION_FILE, FORMAT, ShardWriter, token_dtype
from data.sizes import suited_to
from data.tokenizer import TOKENIZER_FILE, Tokenizer, copy_tokenizer, open_tokenizer, tokenizer_hash
from data.tokenizer_training import train_tokenizer

BATCH_BYTES = 256 * 1024  # what one worker encodes at a time: large against the cost of sending it
SHARD_TOKENS = 100_000_000
SKIP_HINT = "--skip_bad_lines counts such documents and goes on"
# Three times as much would train in three times the time and save 1% of the tokens.
TOKENIZER_SAMPLE_BYTES = 4_000_000


@dataclass(frozen=True)
class PackingOptions:
    vocab_size: int | None  # None: what suits the text's size, or fewer if it holds no more
    val_fraction: float | None  # None: what suits the text's size
    workers: int
    skip_bad_lines: bool
    tokenizer: str | None = None  # path of an existing one, instead of training
    text_column: str = TEXT_COLUMN  # see `Reading`
    segmentations: int | None = 1  # see `ways`; None: what suits the text's size

    def share(self, files: list[str]) -> float:
        """Of the documents of these files, for validation."""
        suited = suited_to(text_size(files)).val_fraction
        return suited if self.val_fraction is None else self.val_fraction

    def ways(self, files: list[str]) -> int:
        """In how many ways each training document is cut into pieces."""
        return self.segmentations or suited_to(text_size(files)).segmentations

    def reading(self, files: list[str]) -> Reading:
        """How these files become documents."""
        return Reading(self.text_column, suited_to(text_size(files)).section_bytes)


class Document(NamedTuple):
    tokens: list[np.ndarray]  # of each segmentation, with BOS and EOS
    n_bytes: int
    where: float  # hash of the text in [0, 1)


class Encoded(NamedTuple):
    documents: list[Document]
    bad: list[str]  # one message per document that could not be read
    raw_bytes: int


def prepare(
    files: list[str], out: Path, options: PackingOptions, progress: Callable[[int], None]
) -> dict:
    """Write tokenizer, shards and description of a corpus into the folder out.

    It is there when all of it is on the disk, and only then replaces what was there before.

    Args:
        files: from `corpus.find_files`.
        out: the folder to make.
        options: see PackingOptions.
        progress: called with the number of bytes just read and encoded.

    Returns:
        The contents of dataset.json.

    Raises DataError: about the text; without skip_bad_lines, at the first document that cannot be
    read. OSError: about the disk. In either case nothing is left behind.
    """
    fingerprint = describe_sources(
        files, options
    )  # before reading: a file that changes meanwhile counts as changed
    with whole_folder(out) as partial:
        # They start while the tokenizer is trained.
        with _encoders(options.workers, text_size(files)) as pool:
            tokenizer = _make_tokenizer(files, options, partial)
            written = _write_shards(files, partial, tokenizer, pool, options, progress)
        description = {
            "format": FORMAT,
            "dtype": token_dtype(tokenizer.vocab_size).str,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "tokenizer_sha256": tokenizer_hash(tokenizer.path),
            **written,
            "prepared_from": fingerprint,
        }
        (partial / DESCRIPTION_FILE).write_text(
            json.dumps(description, indent=2, ensure_ascii=False), encoding="utf-8"
        )
    return description


def _make_tokenizer(files: list[str], options: PackingOptions, folder: Path) -> Tokenizer:
    may_shrink = options.vocab_size is None
    if options.tokenizer is None:
        train_tokenizer(
            _sample(files, options),
            suited_to(text_size(files)).vocab_size if may_shrink else options.vocab_size,
            folder / TOKENIZER_FILE,
            may_shrink=may_shrink,
        )
    else:
        copy_tokenizer(options.tokenizer, folder)
    return open_tokenizer(folder)


def describe_sources(files: list[str], options: PackingOptions) -> dict:
    """What a prepared folder was made from; equal descriptions make equal shards."""
    stats = [(os.path.abspath(path), os.stat(path)) for path in files]
    if options.tokenizer is not None:
        open_tokenizer(options.tokenizer)  # a wrong file is refused before the work
    listing = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return {
        "source": os.path.commonpath([path for path, _ in stats]),
        "files": len(files),
        "bytes_on_disk": sum(stat.st_size for _, stat in stats),
        "files_sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
        "vocab_size": options.vocab_size if options.tokenizer is None else None,
        "tokenizer": options.tokenizer and tokenizer_hash(options.tokenizer),
        "val_fraction": options.share(files),
        "skip_bad_lines": options.skip_bad_lines,
        "text_column": options.text_column,
        "segmentations": options.ways(files),
    }


def _sample(files: list[str], options: PackingOptions) -> Iterator[str]:
    """About TOKENIZER_SAMPLE_BYTES of documents from all over the corpus, chosen by a checksum."""
    threshold = 2**32 * TOKENIZER_SAMPLE_BYTES / max(text_size(files), 1)
    reading = options.reading(files)
    taken = 0
    for record in read_records(files, reading):
        if zlib.crc32(record.raw) >= threshold:
            continue
        try:
            text = parse(record)
        except DataError as error:
            if options.skip_bad_lines:
                continue
            raise DataError(f"{error}; {SKIP_HINT}") from error
        taken += len(record.raw)
        yield text
        if taken > 2 * TOKENIZER_SAMPLE_BYTES:  # the estimate was off, or documents repeat
            return
    if not taken:  # a few very long documents, of which none was chosen
        for record in read_records(files, reading):
            if taken > TOKENIZER_SAMPLE_BYTES:
                return
            try:
                text = parse(record)
            except DataError:  # seen by the encoding processes, too
                continue
            taken += len(record.raw)
            yield text


def _write_shards(
    files: list[str],
    folder: Path,
    tokenizer: Tokenizer,
    pool: Executor,
    options: PackingOptions,
    progress: Callable[[int], None],
) -> dict:
    threshold = options.share(files)
    written, least, greatest = _write_splits(
        files, folder, tokenizer, pool, options, threshold, progress
    )
    if threshold > 0 and not written["splits"]["val"]["documents"] and least < greatest:
        # The corpus is so small that the hash sends none to validation: again, with the nearest.
        for shard in written["splits"]["train"]["shards"]:
            (folder / shard["file"]).unlink()
        threshold = math.nextafter(least, 1)
        written, *_ = _write_splits(
            files, folder, tokenizer, pool, options, threshold, lambda n_bytes: None
        )
    return written


def _write_splits(
    files: list[str],
    folder: Path,
    tokenizer: Tokenizer,
    pool: Executor,
    options: PackingOptions,
    threshold: float,
    progress: Callable[[int], None],
) -> tuple[dict, float, float]:
    """One pass: what was written, and the least and the greatest hash of a document."""
    dtype = token_dtype(tokenizer.vocab_size)
    train = ShardWriter(folder, "train", dtype, SHARD_TOKENS)
    val = ShardWriter(folder, "val", dtype, SHARD_TOKENS)
    bad_documents = 0
    first_bad = None
    least, greatest = 2.0, -1.0
    records = read_records(files, options.reading(files))
    encode = partial(_encode_batch, tokenizer.path, options.ways(files))
    for encoded in _encode(records, encode, pool, options.workers):
        if encoded.bad and not options.skip_bad_lines:
            raise DataError(f"{encoded.bad[0]}; {SKIP_HINT}")
        bad_documents += len(encoded.bad)
        first_bad = first_bad or next(iter(encoded.bad), None)
        for document in encoded.documents:
            least, greatest = min(least, document.where), max(greatest, document.where)
            if document.where < threshold:
                val.write(document.tokens[0], document.n_bytes)
                continue
            for tokens in document.tokens:
                train.write(tokens, document.n_bytes)
        progress(encoded.raw_bytes)
    if not train.documents:
        raise DataError("no text for training in these files")
    written = {
        "splits": {"train": train.close(), "val": val.close()},
        "bad_documents": bad_documents,
        "first_bad_document": first_bad,
    }
    return written, least, greatest


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
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
        _tokenizer.cache_clear()  # the next one may have the same path


@contextmanager
def _encoders(workers: int, n_bytes: int) -> Iterator[Executor]:
    """Processes that encode so many bytes of text."""
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
        with _deaf_to_interrupts():  # as the processes are while they start, before initializer
            for _ in range(workers):  # each starts a process
                pool.submit(os.getpid)
        yield pool
    except BrokenProcessPool as error:
        raise DataError(
            "an encoding process was killed, perhaps for want of memory: try fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode(
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


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> tuple[Tokenizer, Splitter]:
    """One per process: loading it again for every batch would cost more than encoding."""
    tokenizer = open_tokenizer(path)
    return tokenizer, Splitter(tokenizer)


def _encode_batch(path: str, segmentations: int, batch: list[Record]) -> Encoded:
    tokenizer, splitter = _tokenizer(path)
    texts = []
    bad = []
    for record in batch:
        try:
            text = parse(record)
        except DataError as error:
            bad.append(str(error))
            continue
        if text:
            texts.append(text)
    dtype = token_dtype(tokenizer.vocab_size)
    # One marker may do both: then the next document's beginning ends this one.
    end = [tokenizer.eos_id] if tokenizer.eos_id != tokenizer.bos_id else []
    documents = []
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        raw = text.encode()
        digest = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
        random = np.random.default_rng(digest)  # the same text is always cut in the same ways
        others = (splitter.split(ids, random) for _ in range(segmentations - 1))
        tokens = [np.array([tokenizer.bos_id, *way, *end], dtype) for way in (ids, *others)]
        documents.append(Document(tokens, len(raw), digest / 2**64))
    return Encoded(documents, bad, sum(len(record.raw) for record in batch))
