"""Turn text files into token shards: train the tokenizer, encode in several processes, write.

Documents are written one after the other as BOS, text, EOS; training cuts the stream into
sequences, so that no position is padding. data/validation_split.py decides which documents are for
validation.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from common.atomic import whole_folder
from data.corpus import TEXT_COLUMN, Reading, Record, parse, read_records, text_size
from data.encoders import Document, Encode, Encoded, encoders, loaded, readable
from data.errors import DataError
from data.segmentation import Splitter
from data.shards import DESCRIPTION_FILE, FORMAT, SPLITS, TEXT, ShardWriter, token_dtype
from data.sizes import Suited, suited_to
from data.tokenizer import TOKENIZER_FILE, Tokenizer, copy_tokenizer, open_tokenizer, tokenizer_hash
from data.tokenizer_training import train_tokenizer
from data.validation_split import HASHES, ValidationSplit, hashes

SHARD_TOKENS = 100_000_000
SKIP_HINT = "--skip_bad_lines counts such documents and goes on"
# Three times as much would train in three times the time and save 1% of the tokens.
TOKENIZER_SAMPLE_BYTES = 4_000_000


@dataclass(frozen=True)
class PackingOptions:
    """Settings for text; see ConversationOptions for conversations."""

    kind: ClassVar[str] = TEXT  # see `shards.KINDS`
    vocab_size: int | None  # None: what suits the text's size, or fewer if it holds no more
    val_fraction: float | None  # None: what suits the text's size
    workers: int
    skip_bad_lines: bool
    tokenizer: str | None = None  # path of an existing one, instead of training
    text_column: str = TEXT_COLUMN  # see `Reading`
    segmentations: int | None = 1  # ways to cut a document; None: what suits the text's size

    def share(self, files: list[str]) -> float:
        """Return the share of the documents that is for validation."""
        return suited(files).val_fraction if self.val_fraction is None else self.val_fraction

    def ways(self, files: list[str]) -> int:
        """Return in how many ways each training document is cut into pieces."""
        return self.segmentations or suited(files).segmentations

    def records(self, files: list[str]) -> Iterator[Record]:
        """Yield everything there is to encode."""
        return read_records(files, Reading(self.text_column, suited(files).section_bytes))

    def encoder(self, files: list[str], tokenizer: str) -> Encode:
        """Return the function that encodes a batch of these records, in any process."""
        return partial(_encode_batch, tokenizer, self.ways(files))

    def settings(self, files: list[str]) -> dict:
        """Return everything that the result depends on besides the files."""
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


def suited(files: list[str]) -> Suited:
    """Return the settings that suit the size of these files."""
    return suited_to(text_size(files))


def prepare(
    files: list[str], out: Path, options: PackingOptions, progress: Callable[[int], None]
) -> dict:
    """Write tokenizer, shards and description of a corpus into the folder out.

    The folder appears when all of it is on the disk, and only then replaces an older one.

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
    # Before reading: a file that changes meanwhile counts as changed.
    fingerprint = describe_sources(files, options)
    with whole_folder(out) as folder:
        # The processes start while the tokenizer is trained.
        with encoders(options.workers, text_size(files)) as encode_all:
            tokenizer = _make_tokenizer(files, options, folder)
            encode = options.encoder(files, tokenizer.path)

            def encoded() -> Iterable[Encoded]:
                return encode_all(options.records(files), encode)

            dtype = token_dtype(tokenizer.vocab_size)
            split = ValidationSplit(options.share(files))
            written = _write_splits(encoded(), folder, dtype, split, options, progress)
            again = split.with_one_document()
            if again is not split and not written["splits"]["val"]["documents"]:
                for path in folder.glob("train-*.bin"):
                    path.unlink()
                written = _write_splits(encoded(), folder, dtype, again, options, lambda n: None)
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
        (folder / DESCRIPTION_FILE).write_text(content, encoding="utf-8")
    return description


def describe_sources(files: list[str], options: PackingOptions) -> dict:
    """Return what a prepared folder is made from; equal descriptions make equal shards."""
    stats = [(os.path.abspath(path), os.stat(path)) for path in files]
    listing = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return {
        "source": os.path.commonpath([path for path, _ in stats]),
        "files": len(files),
        "bytes_on_disk": sum(stat.st_size for _, stat in stats),
        "files_sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
        **options.settings(files),
    }


def _make_tokenizer(files: list[str], options: PackingOptions, folder: Path) -> Tokenizer:
    if options.tokenizer is None:
        may_shrink = options.vocab_size is None
        train_tokenizer(
            _sample(files, options),
            suited(files).vocab_size if may_shrink else options.vocab_size,
            folder / TOKENIZER_FILE,
            may_shrink=may_shrink,
        )
    else:
        copy_tokenizer(options.tokenizer, folder)
    return open_tokenizer(folder)


def _sample(files: list[str], options: PackingOptions) -> Iterator[str]:
    """Yield about TOKENIZER_SAMPLE_BYTES of documents from all over the corpus, chosen by a
    checksum; the first ones where the corpus is a few very long documents of which none is chosen.
    """
    below = 2**32 * TOKENIZER_SAMPLE_BYTES / max(text_size(files), 1)
    # The first limit is for an estimate that was off, and for documents that repeat.
    for threshold, limit in ((below, 2 * TOKENIZER_SAMPLE_BYTES), (2**32, TOKENIZER_SAMPLE_BYTES)):
        taken = 0
        for record in options.records(files):
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
            if taken > limit:
                return
        if taken:
            return


def _write_splits(
    batches: Iterable[Encoded],
    folder: Path,
    dtype: np.dtype,
    split: ValidationSplit,
    options: PackingOptions,
    progress: Callable[[int], None],
) -> dict:
    """Write the shards of both splits; return their part of the description."""
    train, val = (ShardWriter(folder, name, dtype, SHARD_TOKENS) for name in SPLITS)
    bad_documents, first_bad, elsewhere = 0, None, 0
    for encoded in batches:
        if encoded.bad and not options.skip_bad_lines:
            raise DataError(f"{encoded.bad[0]}; {SKIP_HINT}")
        bad_documents += len(encoded.bad)
        first_bad = first_bad or next(iter(encoded.bad), None)
        elsewhere += encoded.elsewhere
        for document in encoded.documents:
            if split.takes(document.where):
                val.write(document.tokens[0], document.n_bytes, document.answers)
                continue
            for tokens in document.tokens:
                train.write(tokens, document.n_bytes, document.answers)
        progress(encoded.raw_bytes)
    if not train.documents:
        raise DataError(f"no {options.kind} for training in these files")
    return {
        "splits": {"train": train.close(), "val": val.close()},
        "bad_documents": bad_documents,
        "first_bad_document": first_bad,
        "for_other_stages": elsewhere,
    }


def _with_splitter(path: str) -> tuple[Tokenizer, Splitter]:
    tokenizer = open_tokenizer(path)
    return tokenizer, Splitter(tokenizer)


def _encode_batch(path: str, segmentations: int, batch: list[Record]) -> Encoded:
    tokenizer, splitter = loaded(_with_splitter, path)
    texts, bad = readable(batch, parse)
    texts = [text for text in texts if text]
    dtype = token_dtype(tokenizer.vocab_size)
    # One marker may do both: then the next document's beginning ends this one.
    end = [tokenizer.eos_id] if tokenizer.eos_id != tokenizer.bos_id else []
    documents = []
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        raw = text.encode()
        (number,) = hashes(raw, 1)
        random = np.random.default_rng(number)  # the same text is always cut in the same ways
        others = (splitter.split(ids, random) for _ in range(segmentations - 1))
        tokens = [np.array([tokenizer.bos_id, *way, *end], dtype) for way in (ids, *others)]
        documents.append(Document(tokens, len(raw), number / HASHES))
    return Encoded(documents, bad, sum(len(record.raw) for record in batch))
