"""Turn text or conversations into token shards: find the folder, train a tokenizer, encode, write.

The shards of text hold BOS, text, EOS of each document in turn. Pretraining cuts this stream
into sequences, so no position is padding.
"""

import hashlib
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lm.common.atomic import whole_folder
from lm.common.errors import UsageError
from lm.data.conversations import conversation_records
from lm.data.corpus import (
    BUILTIN,
    SUFFIXES,
    TEXT_COLUMN,
    Record,
    by_split,
    parse,
    read_records,
    suffix_of,
    text_size,
)
from lm.data.encoding import Document, Encoded, documents_in, encode_batch, encoders
from lm.data.shards import (
    CONVERSATIONS,
    DESCRIPTION_FILE,
    FORMAT,
    TEXT,
    ShardWriter,
    read_description,
    token_dtype,
)
from lm.data.tokenizer import TOKENIZER_FILE, copy_tokenizer, open_tokenizer, tokenizer_hash
from lm.data.tokenizer_training import train_tokenizer

SHARD_TOKENS = 100_000_000  # a shard ends after the document that reaches this number
SKIP_HINT = "scripts.prepare_data --skip_bad_lines skips and counts such documents"
# With a tokenizer trained on three times as much text, a text has only 1% fewer tokens.
SAMPLE_BYTES = 4_000_000
# Share of the built-in conversations for validation. It is large, because they hold little text.
BUILTIN_VAL_FRACTION = 0.1
Reader = Callable[[list[str]], Iterator[Record]]  # yields the records of files


class TextDefaults(NamedTuple):
    """Default settings for a text of less than `below` bytes."""

    below: float
    vocab_size: int
    val_fraction: float
    section_bytes: int  # longer files of .txt or .py are cut into documents of at most this size
    segmentations: int  # see `lm.data.encoding`
    bytes_per_token: tuple[float, float]  # from and to, usual for English and Chinese


# A small text has a small vocabulary, because a model memorises a small text before it learns a
# large vocabulary. It has short sections, so that its validation split has several of them.
BY_SIZE = (
    TextDefaults(500e3, 512, 0.1, 1 << 10, 7, (1.5, 1.7)),
    TextDefaults(4e6, 4096, 0.03, 2 << 10, 20, (2.4, 3.6)),
    TextDefaults(10e6, 8192, 0.03, 2 << 10, 1, (2.6, 4)),
    TextDefaults(50e6, 8192, 0.03, 4 << 10, 1, (2.6, 4)),  # the built-in text
    TextDefaults(math.inf, 16384, 0.02, 16 << 10, 1, (2.6, 4)),
)


def defaults_for(files: Iterable[str]) -> TextDefaults:
    """Return the settings for these files."""
    n_bytes = text_size(files)
    return next(defaults for defaults in BY_SIZE if n_bytes < defaults.below)


@dataclass(frozen=True)
class PackingOptions:
    """Settings for text or conversations."""

    vocab_size: int | None  # None: by the size of the text
    val_fraction: float | None  # None: see `val_fraction_of`
    workers: int
    skip_bad_lines: bool
    tokenizer: str | None = None  # path of a tokenizer; None: train one on the text
    text_column: str = TEXT_COLUMN  # see `read_records`
    segmentations: int | None = 1  # of a training document, see `lm.data.encoding`; None: by size
    kind: str = TEXT  # one of `shards.KINDS`
    markers: bool = False  # names of markers in a text begin and end documents

    def val_fraction_of(self, files: list[str]) -> float:
        """Return the share of the training files' documents that is for validation."""
        if self.val_fraction is not None:
            return self.val_fraction
        if by_split(files)["val"]:
            return 0
        if self.kind == CONVERSATIONS and suffix_of(files[0]) == ".py":
            return BUILTIN_VAL_FRACTION
        return defaults_for(files).val_fraction

    def segmentations_of(self, files: list[str]) -> int:
        """Return the number of copies of each training document, see `lm.data.encoding`."""
        return self.segmentations or defaults_for(files).segmentations


def prepare(
    files: list[str], out: Path, options: PackingOptions, progress: Callable[[int], None]
) -> dict:
    """Write tokenizer, shards and description into the folder `out`; return the description.
    `progress` gets the number of bytes just encoded. Raises UsageError for problems of the text
    or tokenizer, OSError for problems of the disk. After an error, no incomplete folder is left."""
    # Describe files before reading them. A file that changes later then counts as changed.
    fingerprint = describe_sources(files, options)
    chosen, splits = defaults_for(files), by_split(files)
    share = options.val_fraction_of(files)
    read, column = conversation_records, options.text_column
    if options.kind == TEXT:
        read = partial(read_records, columns=(column,), section_bytes=chosen.section_bytes)
    # The encoding processes start while the tokenizer is trained.
    with whole_folder(out) as folder, encoders(options.workers, text_size(files)) as encode_all:
        if options.tokenizer is not None:
            copy_tokenizer(options.tokenizer, folder)
        else:
            texts, path = _some_texts(splits["train"], read, options), folder / TOKENIZER_FILE
            by_size = options.vocab_size is None
            size = chosen.vocab_size if by_size else options.vocab_size
            train_tokenizer(texts, size, path, may_shrink=by_size)
        tokenizer = open_tokenizer(folder)
        ways = options.segmentations_of(files)
        encode = partial(encode_batch, options.kind, tokenizer.path, ways, options.markers)
        dtype = token_dtype(tokenizer.vocab_size)
        writer = partial(ShardWriter, folder, dtype=dtype, shard_tokens=SHARD_TOKENS)
        batches = [
            (share_for_val, encode_all(read(splits[name]), encode))
            for name, share_for_val in (("train", share), ("val", 1))
            if splits[name]
        ]
        description = {
            "format": FORMAT,
            "kind": options.kind,
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "tokenizer_sha256": tokenizer_hash(tokenizer.path),
            **_write_splits(batches, writer, options, progress),
            "prepared_from": fingerprint,
        }
        content = json.dumps(description, indent=2, ensure_ascii=False)
        (folder / DESCRIPTION_FILE).write_bytes(content.encode(errors="replace"))
    return description


def describe_sources(files: list[str], options: PackingOptions) -> dict:
    """Describe files and settings. Equal descriptions lead to equal shards.
    Raises UsageError if the tokenizer cannot be read, OSError if a file is missing."""
    if options.tokenizer is not None:
        open_tokenizer(options.tokenizer)  # refuse a wrong file early
    stats = [(os.path.abspath(path), os.stat(path)) for path in files]
    listing = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return {
        "source": os.path.commonpath([path for path, _ in stats]),
        "files": len(files),
        "bytes_on_disk": sum(stat.st_size for _, stat in stats),
        "files_sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
        "vocab_size": options.vocab_size if options.tokenizer is None else None,
        "tokenizer": options.tokenizer and tokenizer_hash(options.tokenizer),
        "val_fraction": options.val_fraction_of(files),
        "skip_bad_lines": options.skip_bad_lines,
        "text_column": options.text_column,
        "segmentations": options.segmentations_of(files),
        **({"kind": options.kind} if options.kind != TEXT else {}),
        **({"markers": True} if options.markers else {}),
    }


def _some_texts(files: list[str], read: Reader, options: PackingOptions) -> Iterator[str]:
    """Yield about SAMPLE_BYTES of documents. Raises UsageError at the end if there are bad
    documents and they are not skipped, or if every document is bad."""
    tried, bad, first_bad = Counter(), Counter(), None
    for record in _some_records(files, read):
        tried[record.path] += 1
        try:
            for text in documents_in(parse(record), options.markers):
                yield text[:SAMPLE_BYTES]
        except UsageError as error:
            bad[record.path] += 1
            first_bad = first_bad or (record.path, str(error))
    if first_bad and (bad == tried or not options.skip_bad_lines):
        raise refusal(*first_bad, bad, tried)


def _some_records(files: list[str], read: Reader) -> Iterator[Record]:
    """Yield about SAMPLE_BYTES of records, chosen by their checksums. If none is chosen, yield the
    first records."""
    chosen = 2**32 * SAMPLE_BYTES / max(text_size(files), 1)
    # The records reach the limit of 2 * SAMPLE_BYTES if text_size is wrong or documents repeat.
    for threshold, limit in ((chosen, 2 * SAMPLE_BYTES), (2**32, SAMPLE_BYTES)):
        taken = 0
        for record in read(files):
            if zlib.crc32(record.raw) < threshold:
                yield record
                taken += max(1, len(record.raw))
                if taken > limit:
                    return
        if taken:
            return


def refusal(path: str, problem: str, bad: Counter, tried: Counter) -> UsageError:
    """Return the error for a bad document of a file. `bad` and `tried` count the documents of each
    file. The error advises to skip bad documents only if at least half of them are good."""
    few = 2 * bad[path] <= tried[path]
    tally = f"{bad[path]:,} of {tried[path]:,} documents tried in this file are bad"
    return UsageError(f"{problem}; {SKIP_HINT if few else tally}")


def _write_splits(
    batches: list[tuple[float, Iterable[Encoded]]],
    writer: Callable[[str], ShardWriter],
    options: PackingOptions,
    progress: Callable[[int], None],
) -> dict:
    """Write the shards of both splits, and return their part of the description. `batches` has the
    documents of the training files, then those of the files for validation, each with a share. A
    document is for validation if its `number`, a hash of 64 bits, is below share · 2^64. If this
    holds for all documents, the first document is for training. The training split holds the first
    segmentation of all its documents, then the other segmentations."""
    train, resegmented, val = map(writer, ("train", "train-resegmented", "val"))
    tried, bad, marked, unread = (Counter() for _ in range(4))
    first_bad, bytes_after = None, 0
    waiting = []  # documents for validation before the first document for training

    def write(document: Document, split: ShardWriter) -> None:
        split.write(document.tokens[0], document.n_bytes, document.answers)
        for tokens in document.tokens[1:] if split is train else ():
            resegmented.write(tokens, document.n_bytes)

    for share, encoded in ((share, encoded) for share, part in batches for encoded in part):
        tried.update(encoded.tried)
        bad.update(path for path, _ in encoded.bad)
        marked.update(encoded.marked)
        unread.update(encoded.unread)
        first_bad = first_bad or next(iter(encoded.bad), None)
        if first_bad and not options.skip_bad_lines:
            bytes_after += encoded.raw_bytes
            if bytes_after > SAMPLE_BYTES:  # enough to see if most documents are bad
                break
        for document in encoded.documents:
            if document.number / 2**64 < share:
                waiting.append(document)
            else:
                write(document, train)
            while waiting and train.documents:
                write(waiting.pop(0), val)
        progress(encoded.raw_bytes)
    if first_bad and not options.skip_bad_lines:
        raise refusal(*first_bad, bad, tried)
    for i, document in enumerate(waiting):
        write(document, val if i else train)
    first_problem = first_bad[1] if first_bad else None
    if not train.documents:
        raise UsageError(first_problem or f"no {options.kind} for training in these files")
    first, others = train.close(), resegmented.close()
    both = {name: first[name] + others[name] for name in others}
    return {
        "splits": {"train": first | both | {"first_tokens": first["tokens"]}, "val": val.close()},
        "bad_documents": bad.total(),
        "first_bad_document": first_problem,
        "documents_with_markers": dict(marked),
        "unread_keys": dict(sorted(unread.items())),
    }


def default_out(data: str, flags: str = "", kind: str = TEXT) -> Path:
    """Return the folder for prepared data: out/data/ and the data's name without its suffix.
    A hash of `flags` follows if there are flags. Conversations have "-chat" at the end."""
    name = Path(data).resolve().name if data != BUILTIN else BUILTIN
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        name = name[: -len(suffix)] if name.lower().endswith(suffix) else name
    if words := flags.split():
        name += "-" + hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
    return Path("out/data") / (name if kind == TEXT else f"{name}-chat")


def conversations_out(conversations: str, tokenizer: Path) -> Path:
    """Return the folder for encoded conversations. Raises UsageError without the tokenizer file."""
    if not tokenizer.is_file():
        raise UsageError(f"{tokenizer}, the tokenizer of the model, is missing")
    words = [tokenizer_hash(tokenizer)]
    if conversations != BUILTIN:
        words.append(str(Path(conversations).resolve()))
    return default_out(conversations, " ".join(words), CONVERSATIONS)


def find_prepared(
    out: Path, files: list[str], options: PackingOptions, reuse: bool, overwrite: bool
) -> str | None:
    """Return a message that says why `out` can be used, or None if `out` must be written.
    With `reuse`, settings may differ, and data that is damaged or whose source files changed is
    replaced. With `overwrite`, all other data is replaced. Raises UsageError if `out` must stay."""
    source, stored = describe_sources(files, options), {}
    with suppress(UsageError, OSError, KeyError):  # `out` is missing or damaged
        description = read_description(out)
        if description["tokenizer_sha256"] == tokenizer_hash(out):
            stored = description["prepared_from"]
    if stored == source:
        return "already prepared from this text"
    if reuse and stored.get("files_sha256") == source["files_sha256"]:
        return "prepared from this text with other settings, used as it is"
    if any(out.resolve() in Path(path).resolve().parents for path in files):
        raise UsageError(f"--out {out} holds the text itself: choose another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / DESCRIPTION_FILE).exists():
        raise UsageError(f"--out {out} exists and is not prepared data: choose another folder")
    same_name = reuse and stored.get("source", source["source"]) == source["source"]
    if out.exists() and not (overwrite or same_name):
        holds = f"holds other data, of {stored['source']}" if stored else "exists"
        raise UsageError(f"{out} {holds}: pass another --out or --overwrite")
    return None
