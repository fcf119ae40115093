"""From text files to token shards: train the tokenizer, encode in several processes, pack, split.

Documents are written one after the other as BOS, text, EOS; training cuts the stream into
sequences, so that not one position is padding. A document goes to validation if the hash of its
text says so: the same text always falls on the same side, wherever it stands and however often.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from common.atomic import whole_folder
from data.corpus import TEXT_COLUMN, Reading, Record, parse, read_records, text_size
from data.encoders import Document, Encoded, encode_all, encoders, loaded
from data.errors import DataError
from data.segmentation import Splitter
from data.shards import DESCRIPTION_FILE, FORMAT, TEXT, ShardWriter, token_dtype
from data.sizes import suited_to
from data.tokenizer import TOKENIZER_FILE, Tokenizer, copy_tokenizer, open_tokenizer, tokenizer_hash
from data.tokenizer_training import train_tokenizer

SHARD_TOKENS = 100_000_000
SKIP_HINT = "--skip_bad_lines counts such documents and goes on"
# Three times as much would train in three times the time and save 1% of the tokens.
TOKENIZER_SAMPLE_BYTES = 4_000_000


@dataclass(frozen=True)
class PackingOptions:
    """How text is prepared; see ConversationOptions for conversations."""

    kind: ClassVar[str] = TEXT  # see `shards.KINDS`
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

    def records(self, files: list[str]) -> Iterator[Record]:
        """What there is to encode."""
        return read_records(files, self.reading(files))

    def encoder(self, files: list[str], tokenizer: str) -> Callable[[list[Record]], Encoded]:
        """What encodes a batch of these records, in any process."""
        return partial(_encode_batch, tokenizer, self.ways(files))

    def settings(self, files: list[str]) -> dict:
        """What the result depends on, besides the files."""
        if self.tokenizer is not None:
            open_tokenizer(self.tokenizer)  # a wrong file is refused before the work
        return {
            "vocab_size": self.vocab_size if self.tokenizer is None else None,
            "tokenizer": self.tokenizer and tokenizer_hash(self.tokenizer),
            "val_fraction": self.share(files),
            "skip_bad_lines": self.skip_bad_lines,
            "text_column": self.text_column,
            "segmentations": self.ways(files),
        }


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
        with encoders(options.workers, text_size(files)) as pool:
            tokenizer = _make_tokenizer(files, options, partial)
            written = _write_shards(files, partial, tokenizer, pool, options, progress)
        description = {
            "format": FORMAT,
            "kind": options.kind,
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
    listing = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return {
        "source": os.path.commonpath([path for path, _ in stats]),
        "files": len(files),
        "bytes_on_disk": sum(stat.st_size for _, stat in stats),
        "files_sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
        **options.settings(files),
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
        for path in folder.glob("train-*.bin"):
            path.unlink()
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
    bad_documents = elsewhere = 0
    first_bad = None
    least, greatest = 2.0, -1.0
    encode = options.encoder(files, tokenizer.path)
    for encoded in encode_all(options.records(files), encode, pool, options.workers):
        if encoded.bad and not options.skip_bad_lines:
            raise DataError(f"{encoded.bad[0]}; {SKIP_HINT}")
        bad_documents += len(encoded.bad)
        elsewhere += encoded.elsewhere
        first_bad = first_bad or next(iter(encoded.bad), None)
        for document in encoded.documents:
            least, greatest = min(least, document.where), max(greatest, document.where)
            if document.where < threshold:
                val.write(document.tokens[0], document.n_bytes, document.answers)
                continue
            for tokens in document.tokens:
                train.write(tokens, document.n_bytes, document.answers)
        progress(encoded.raw_bytes)
    if not train.documents:
        raise DataError(f"no {options.kind} for training in these files")
    written = {
        "splits": {"train": train.close(), "val": val.close()},
        "bad_documents": bad_documents,
        "first_bad_document": first_bad,
        "for_other_stages": elsewhere,
    }
    return written, least, greatest


def _with_splitter(path: str) -> tuple[Tokenizer, Splitter]:
    tokenizer = open_tokenizer(path)
    return tokenizer, Splitter(tokenizer)


def _encode_batch(path: str, segmentations: int, batch: list[Record]) -> Encoded:
    tokenizer, splitter = loaded(_with_splitter, path)
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
