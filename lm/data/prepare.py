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
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lm.common.atomic import new_folder, whole_folder
from lm.common.errors import UsageError
from lm.data.conversations import CHAT_SUFFIXES, conversation_records
from lm.data.corpus import (
    BUILTIN,
    SUFFIXES,
    TEXT_COLUMN,
    Record,
    find_files,
    find_splits,
    parse,
    read_records,
    suffix_of,
    text_size,
)
from lm.data.encoding import Document, Encoded, documents_in, encode_all, encode_batch
from lm.data.shards import TEXT, ShardWriter, is_prepared, read_description, write_description
from lm.data.tokenizer import TOKENIZER_FILE, copy_tokenizer, open_tokenizer, tokenizer_hash
from lm.data.tokenizer_training import train_tokenizer

SKIP_HINT = "; scripts.prepare_data --skip_bad_lines skips and counts such documents"
# With a tokenizer trained on three times as much text, a text has only 1% fewer tokens.
SAMPLE_BYTES = 4_000_000
# Share of the built-in conversations for validation. It is large, because they hold little text.
BUILTIN_VAL_FRACTION = 0.1


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


@dataclass
class Preparation:
    """Text or conversations, and the settings that turn them into shards. Raises UsageError if
    there is no file for training."""

    source: str  # a file, a folder or "builtin"
    kind: str = TEXT  # one of `shards.KINDS`
    workers: int = 1
    tokenizer: str | None = None  # path of a tokenizer; None: train one on the text
    vocab_size: int | None = None  # of a new tokenizer; None: by the size of the text
    # Share of the training files' documents that is for validation. None: 0 if there are files for
    # validation, else by the size of the text.
    val_fraction: float | None = None
    # Copies of each training document, see `lm.data.encoding`. None: by the size of the text.
    segmentations: int | None = None
    text_column: str = TEXT_COLUMN
    skip_bad_lines: bool = False
    markers: bool = False  # names of markers in a text begin and end documents

    def __post_init__(self):
        of_text = self.kind == TEXT
        suffixes = SUFFIXES if of_text else CHAT_SUFFIXES
        self.files = find_files(self.source, suffixes)
        self.splits = find_splits(self.source, suffixes)
        self.text_size = text_size(self.files)  # bytes, an estimate
        self.defaults = next(each for each in BY_SIZE if self.text_size < each.below)
        if self.val_fraction is None:
            is_builtin_chat = self.source == BUILTIN and not of_text
            usual = BUILTIN_VAL_FRACTION if is_builtin_chat else self.defaults.val_fraction
            self.val_fraction = 0 if self.splits["val"] else usual
        if self.segmentations is None:
            self.segmentations = self.defaults.segmentations if of_text else 1

    def write(self, out: Path, progress: Callable[[int], None]) -> dict:
        """Write tokenizer, shards and description into the folder `out`; return the description.
        `progress` gets the number of bytes just read. Raises UsageError for problems of the text
        or tokenizer, OSError for problems of the disk. After an error, no incomplete folder is
        left."""
        # Describe files before reading them. A file that changes later then counts as changed.
        made_from = self.fingerprint()
        with whole_folder(out) as folder:
            if self.tokenizer is None:
                self._train_tokenizer(folder / TOKENIZER_FILE)
            else:
                copy_tokenizer(self.tokenizer, folder)
            tokenizer = open_tokenizer(folder)
            how = (self.kind, tokenizer.path, self.segmentations, self.markers)
            records, encode = self._counted(progress), partial(encode_batch, *how)
            with closing(encode_all(records, encode, self.workers, self.text_size)) as batches:
                written = self._write_splits(folder, tokenizer.vocab_size, batches)
            facts = {
                "kind": self.kind,
                "vocab_size": tokenizer.vocab_size,
                "tokenizer_sha256": tokenizer_hash(tokenizer.path),
                **written,
                "prepared_from": made_from,
            }
            return write_description(folder, facts)

    def fingerprint(self) -> dict:
        """Describe files and settings. Equal descriptions lead to equal shards.
        Raises UsageError if the tokenizer cannot be read, OSError if a file is missing."""
        if self.tokenizer is not None:
            open_tokenizer(self.tokenizer)  # refuse a wrong file early
        stats = [(os.path.abspath(path), os.stat(path)) for path in self.files]
        listing = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        return {
            "source": os.path.commonpath([path for path, _ in stats]),
            "files": len(self.files),
            "bytes_on_disk": sum(stat.st_size for _, stat in stats),
            "files_sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
            "vocab_size": self.vocab_size if self.tokenizer is None else None,
            "tokenizer": self.tokenizer and tokenizer_hash(self.tokenizer),
            "val_fraction": self.val_fraction,
            "skip_bad_lines": self.skip_bad_lines,
            "text_column": self.text_column,
            "segmentations": self.segmentations,
            **({"kind": self.kind} if self.kind != TEXT else {}),
            **({"markers": True} if self.markers else {}),
        }

    def found_in(self, out: Path, reuse: bool, overwrite: bool) -> str | None:
        """Return a message that says why `out` can be used, or None if `out` must be written.
        With `reuse`, settings may differ, and data that is damaged or whose source files changed is
        replaced. With `overwrite`, all other data is replaced. Raises UsageError if `out` must
        stay."""
        source, stored = self.fingerprint(), {}
        with suppress(UsageError, OSError, KeyError):  # `out` is missing or damaged
            description = read_description(out)
            if description["tokenizer_sha256"] == tokenizer_hash(out):
                stored = description["prepared_from"]
        if stored == source:
            return "already prepared from this text"
        if reuse and stored.get("files_sha256") == source["files_sha256"]:
            return "prepared from this text with other settings, used as it is"
        if any(out.resolve() in Path(path).resolve().parents for path in self.files):
            raise UsageError(f"--out {out} holds the text itself: choose another folder")
        same_name = reuse and stored.get("source", source["source"]) == source["source"]
        new_folder(out, "prepared data", is_prepared, overwrite or same_name)  # only to check
        return None

    def _records(self, files: list[str]) -> Iterator[Record]:
        if self.kind == TEXT:
            return read_records(files, (self.text_column,), self.defaults.section_bytes)
        return conversation_records(files)

    def _counted(self, progress: Callable[[int], None]) -> Iterator[Record]:
        for record in self._records(self.files):
            progress(len(record.raw))
            yield record

    def _train_tokenizer(self, path: Path) -> None:
        """Train a tokenizer on a sample of the training files. Raises UsageError if that fails."""
        texts, first_bad, by_size = [], None, self.vocab_size is None
        share = SAMPLE_BYTES / max(1, text_size(self.splits["train"]))
        # Of a few long documents, perhaps none is chosen. Then take the first documents.
        for record in [*self._some_records(share)] or [*self._some_records(1)]:
            try:
                parts = documents_in(parse(record), self.markers)
                texts += [text[:SAMPLE_BYTES] for text in parts]
            except UsageError as error:
                first_bad = first_bad or error
        size = self.defaults.vocab_size if by_size else self.vocab_size
        try:
            train_tokenizer(texts, size, path, may_shrink=by_size)
        except UsageError as error:
            is_cause = first_bad and not (texts and self.skip_bad_lines)
            raise (first_bad if is_cause else error) from None

    def _some_records(self, share: float) -> Iterator[Record]:
        """Yield about a share of the records for training, chosen by their checksums."""
        taken = 0
        for record in self._records(self.splits["train"]):
            if zlib.crc32(record.raw) < 2**32 * share:
                yield record
                taken += max(1, len(record.raw))
            if taken > 2 * SAMPLE_BYTES:  # text_size is wrong, or documents repeat
                return

    def _write_splits(self, folder: Path, vocab_size: int, batches: Iterable[Encoded]) -> dict:
        """Write the shards of both splits, and return their part of the description. A document of
        a training file is for validation if its `number`, a hash of 64 bits, is below
        val_fraction · 2^64. If no document is left for training, the first document is for
        training. The training split holds the first segmentation of all its documents, then the
        other segmentations."""
        names = ("train", "train-resegmented", "val")
        train, resegmented, val = (ShardWriter(folder, name, vocab_size) for name in names)
        good, bad, marked, unread = (Counter() for _ in range(4))
        first_bad, for_val = None, {*self.splits["val"]}
        waiting = []  # documents for validation before the first document for training

        def write(document: Document, split: ShardWriter) -> None:
            split.write(document.tokens[0], document.n_bytes, document.answers)
            for tokens in document.tokens[1:] if split is train else ():
                resegmented.write(tokens, document.n_bytes)

        for encoded in batches:
            good.update(document.path for document in encoded.documents)
            bad.update(path for path, _ in encoded.bad)
            marked.update(encoded.marked)
            unread.update(encoded.unread)
            first_bad = first_bad or next(iter(encoded.bad), None)
            if first_bad and not self.skip_bad_lines:
                path, problem = first_bad
                raise UsageError(problem + (SKIP_HINT if bad[path] <= good[path] else ""))
            for document in encoded.documents:
                if document.path in for_val or document.number / 2**64 < self.val_fraction:
                    waiting.append(document)
                else:
                    write(document, train)
                while waiting and train.part["documents"]:
                    write(waiting.pop(0), val)
        for i, document in enumerate(waiting):
            write(document, val if i else train)
        first_problem = first_bad and first_bad[1]
        if not train.part["documents"]:
            raise UsageError(first_problem or f"no {self.kind} for training in these files")
        first, others = train.close(), resegmented.close()
        both = {name: first[name] + others[name] for name in others}
        return {
            "splits": {
                "train": first | both | {"first_tokens": first["tokens"]},
                "val": val.close(),
            },
            "bad_documents": bad.total(),
            "first_bad_document": first_problem,
            "documents_with_markers": dict(marked),
            "unread_keys": dict(sorted(unread.items())),
        }


def default_out(data: str, flags: str = "", is_chat: bool = False) -> Path:
    """Return the folder for prepared data: out/data/ and the data's name without its suffix.
    A hash of `flags` follows if there are flags. Conversations have "-chat" at the end."""
    name = Path(data).resolve().name if data != BUILTIN else BUILTIN
    name = name[: len(name) - len(suffix_of(name))]
    if words := flags.split():
        name += "-" + hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
    return Path("out/data") / (f"{name}-chat" if is_chat else name)


def conversations_out(conversations: str, tokenizer: Path) -> Path:
    """Return the folder for encoded conversations. Raises UsageError without the tokenizer file."""
    if not tokenizer.is_file():
        raise UsageError(f"{tokenizer}, the tokenizer of the model, is missing")
    words = [tokenizer_hash(tokenizer)]
    if conversations != BUILTIN:
        words.append(str(Path(conversations).resolve()))
    return default_out(conversations, " ".join(words), is_chat=True)
