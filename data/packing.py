"""Turn text files into token shards: train the tokenizer, encode in several processes, write.

Documents are written one after the other as BOS, text, EOS; training cuts the stream into
sequences, so that no position is padding.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.atomic import whole_folder
from data.conversations import conversation_records
from data.corpus import TEXT_COLUMN, Record, parse, read_records, text_size
from data.encoding import Encoded, encode_batch, encoders
from data.errors import DataError
from data.shards import CONVERSATIONS, DESCRIPTION_FILE, FORMAT, TEXT, ShardWriter, token_dtype
from data.tokenizer import TOKENIZER_FILE, copy_tokenizer, open_tokenizer, tokenizer_hash
from data.tokenizer_training import train_tokenizer
from data.validation_split import ValidationSplit

SHARD_TOKENS = 100_000_000
SKIP_HINT = "--skip_bad_lines counts such documents and goes on"
# Three times as much would save 1% of the tokens.
TOKENIZER_SAMPLE_BYTES = 4_000_000
# Of the built-in conversations: the size of their source tells nothing.
BUILTIN_VAL_FRACTION = 0.1


class Suited(NamedTuple):
    """Default settings for a text of less than `below` bytes."""

    below: float
    vocab_size: int
    val_fraction: float
    section_bytes: int  # a longer .txt is cut into documents of that size
    segmentations: int  # see data/encoding.py


# A small text is learned by heart before a large vocabulary is learned at all, and one document
# of sixteen kilobytes is no validation.
BY_SIZE = (
    Suited(500e3, 512, 0.1, 1 << 10, 7),
    Suited(4e6, 2048, 0.1, 2 << 10, 7),
    Suited(10e6, 4096, 0.05, 2 << 10, 1),
    Suited(50e6, 6400, 0.03, 4 << 10, 1),  # the built-in text
    Suited(math.inf, 6400, 0.02, 16 << 10, 1),
)


def suited_to(files: Iterable[str]) -> Suited:
    """Return the settings for these files. They go in steps: a text may grow and keep them."""
    n_bytes = text_size(files)
    return next(suited for suited in BY_SIZE if n_bytes < suited.below)


@dataclass(frozen=True)
class PackingOptions:
    """Settings for text or conversations. None: what suits the text's size."""

    vocab_size: int | None  # None: also fewer, if the text holds no more
    val_fraction: float | None
    workers: int
    skip_bad_lines: bool
    tokenizer: str | None = None  # path of an existing one; None: train one, of text
    text_column: str = TEXT_COLUMN  # see `read_records`
    segmentations: int | None = 1  # ways to cut a training document into pieces
    kind: str = TEXT  # see `shards.KINDS`

    def share(self, files: list[str]) -> float:
        """Return the share of the documents that is for validation."""
        if self.val_fraction is not None:
            return self.val_fraction
        if self.kind == CONVERSATIONS and files[0].endswith(".py"):
            return BUILTIN_VAL_FRACTION
        return suited_to(files).val_fraction

    def ways(self, files: list[str]) -> int:
        """Return in how many ways each training document is cut into pieces."""
        return self.segmentations or suited_to(files).segmentations

    def records(self, files: list[str]) -> Iterator[Record]:
        """Yield everything there is to encode."""
        if self.kind == CONVERSATIONS:
            return conversation_records(files)
        return read_records(files, self.text_column, suited_to(files).section_bytes)


def prepare(
    files: list[str], out: Path, options: PackingOptions, progress: Callable[[int], None]
) -> dict:
    """Write tokenizer, shards and description of these files into the folder out, which replaces
    an older one when all is on the disk. `progress` is called with the bytes just encoded.

    Returns the contents of dataset.json. Raises DataError: about the text. OSError: about the
    disk. Nothing is left behind then.
    """
    # Before reading: a file that changes meanwhile counts as changed.
    fingerprint = describe_sources(files, options)
    # The processes start while the tokenizer is trained.
    with whole_folder(out) as folder, encoders(options.workers, text_size(files)) as encode_all:
        if options.tokenizer is not None:
            copy_tokenizer(options.tokenizer, folder)
        else:
            may_shrink = options.vocab_size is None
            size = suited_to(files).vocab_size if may_shrink else options.vocab_size
            sample = _sample(files, options)
            train_tokenizer(sample, size, folder / TOKENIZER_FILE, may_shrink=may_shrink)
        tokenizer = open_tokenizer(folder)
        encode = partial(encode_batch, options.kind, tokenizer.path, options.ways(files))
        dtype = token_dtype(tokenizer.vocab_size)

        def write(split: ValidationSplit) -> dict:
            writers = [ShardWriter(folder, name, dtype, SHARD_TOKENS) for name in ("train", "val")]
            batches = encode_all(options.records(files), encode)
            return _write_splits(batches, *writers, split, options, progress)

        split = ValidationSplit(options.share(files))
        written = write(split)
        empty = split.share > 0 and not written["splits"]["val"]["documents"]
        if empty and split.least < split.greatest:
            # A corpus this small holds out the document with the least hash.
            for path in folder.glob("train-*.bin"):
                path.unlink()
            written = write(ValidationSplit(math.nextafter(split.least, 1)))
        description = {
            "format": FORMAT,
            "kind": options.kind,
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "tokenizer_sha256": tokenizer_hash(tokenizer.path),
            **written,
            "prepared_from": fingerprint,
        }
        content = json.dumps(description, indent=2, ensure_ascii=False)
        (folder / DESCRIPTION_FILE).write_bytes(content.encode())
    return description


def describe_sources(files: list[str], options: PackingOptions) -> dict:
    """Return what a prepared folder is made from; equal descriptions make equal shards."""
    if options.tokenizer is not None:
        open_tokenizer(options.tokenizer)  # a wrong file is refused before the work
    stats = [(os.path.abspath(path), os.stat(path)) for path in files]
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
        **({"kind": options.kind} if options.kind != TEXT else {}),
    }


def _sample(files: list[str], options: PackingOptions) -> Iterator[str]:
    """Yield about TOKENIZER_SAMPLE_BYTES of documents chosen by a checksum; the first ones if that
    chooses none of a few long ones."""
    size = TOKENIZER_SAMPLE_BYTES
    # The first limit is for an estimate that was off, and for documents that repeat.
    for threshold, limit in ((2**32 * size / max(text_size(files), 1), 2 * size), (2**32, size)):
        taken = 0
        for record in options.records(files):
            if zlib.crc32(record.raw) >= threshold:
                continue
            try:
                yield parse(record)
            except DataError as error:
                if options.skip_bad_lines:
                    continue
                raise DataError(f"{error}; {SKIP_HINT}") from error
            taken += len(record.raw)
            if taken > limit:
                return
        if taken:
            return


def _write_splits(
    batches: Iterable[Encoded],
    train: ShardWriter,
    val: ShardWriter,
    split: ValidationSplit,
    options: PackingOptions,
    progress: Callable[[int], None],
) -> dict:
    """Write the shards of both splits; return their part of the description."""
    n_bad, first_bad = 0, None
    for encoded in batches:
        if encoded.bad and not options.skip_bad_lines:
            raise DataError(f"{encoded.bad[0]}; {SKIP_HINT}")
        n_bad += len(encoded.bad)
        first_bad = first_bad or next(iter(encoded.bad), None)
        for document in encoded.documents:
            if split.takes(document.number):
                val.write(document.tokens[0], document.n_bytes, document.answers)
                continue
            for tokens in document.tokens:
                train.write(tokens, document.n_bytes, document.answers)
        progress(encoded.raw_bytes)
    if not train.documents:
        raise DataError(f"no {options.kind} for training in these files")
    return {
        "splits": {"train": train.close(), "val": val.close()},
        "bad_documents": n_bad,
        "first_bad_document": first_bad,
    }
