"""Find the files of a corpus and read their documents. docs/data.md lists the kinds of files.

Memory holds one line, object, section or batch of rows at a time. `.zst` and `.parquet` need
pyarrow.
"""

import codecs
import csv
import gzip
import io
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lm.common.errors import UsageError
from lm.common.parser import is_text
from lm.data.json_objects import CHUNK_BYTES, LONGEST, json_objects

BUILTIN = "builtin"  # the source of Python's standard library, about 12 MB without its tests
TEXT_COLUMN = "text"
JSON = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst")
SUFFIXES = (".txt", *JSON, ".csv", ".tsv", ".parquet")
# Files of a folder that describe a data set. Hugging Face's `datasets` does not read them either.
ABOUT_DATA = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json")
SECTION_BYTES = 16 * 1024  # bytes of the largest document of a .txt or .py, by default
BATCH_ROWS = 64  # rows of Parquet in memory at once
# What gzip, csv and pyarrow raise for damaged files.
DAMAGE = (OSError, EOFError, ValueError, LookupError, NotImplementedError, zlib.error, csv.Error)
DELIMITERS = (",", ";", "\t", "|")  # of a .csv; Excel writes semicolons in much of Europe
SEPARATOR = re.compile(r'"?sep=(.)"?\s*')  # a first line with which Excel names the delimiter
NO_DELIMITER = "\x1f"
# Folders that are not part of the built-in text: tests, installed packages and caches.
NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# The words for splits in names of files and folders, as in Hugging Face's `datasets`.
SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# A word alone or between separators: "train", "train_en", "ptb.train", "my-train-set".
SPLIT_NAME = re.compile(rf"(?:(.+)[-_. ])?({'|'.join(SPLIT_OF)})(?:[-_. ](.+))?")
SHARD = re.compile(r"[-_.]?\d+([-_]of[-_]\d+)?(-[0-9a-f]{16})?$")  # train-00000-of-00002


class Record(NamedTuple):
    """The bytes of one document in its file, not yet decoded."""

    path: str
    place: str  # the path, and the line, row, element or first byte (from 0), for messages
    raw: bytes
    text_column: str | None = None  # the key of the text in an object of JSON; None: no JSON
    fault: str = ""  # why a row of a .csv has no text; otherwise ""


def suffix_of(path: str) -> str:
    """Return the suffix that decides how a file is read, in lower case, such as ".jsonl.gz"."""
    known = (*SUFFIXES, ".py")
    return next((suffix for suffix in known if path.lower().endswith(suffix)), "")


def text_size(files: Iterable[str]) -> int:
    """Estimate the bytes of text in files. A .gz, .zst or .parquet counts four times its size."""
    packed = (".gz", ".zst", ".parquet")
    factors = {path: 4 if path.lower().endswith(packed) else 1 for path in files}
    return sum(os.path.getsize(path) * factor for path, factor in factors.items())


def find_files(source: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """Return the paths of a corpus, which is a file, a folder or "builtin". The files of a folder
    that are for testing are left out. Raises UsageError if `source` does not exist or has no file
    for training with one of the suffixes."""
    splits = find_splits(source, suffixes)
    if not splits["train"]:
        found = f"{source}: its files are for validation or testing, by their names"
        raise UsageError(f"{found}: pass one of them, or rename one")
    return splits["train"] + splits["val"]


def find_splits(source: str, suffixes: tuple[str, ...] = SUFFIXES) -> dict[str, list[str]]:
    """Return the files of each split of a corpus, see `find_files`."""
    if source == BUILTIN:
        files = []
        for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
            subfolders[:] = sorted(set(subfolders) - NOT_CORPUS)
            files += [f"{folder}/{name}" for name in sorted(names) if name.endswith(".py")]
        return _by_split(files)
    path = Path(source)
    if not path.exists():
        raise UsageError(f"{source}: no such file or folder")
    paths = [str(path)] if path.is_file() else all_files(path, hidden=False)
    paths = [each for each in paths if path.is_file() or Path(each).name not in ABOUT_DATA]
    known = [each for each in paths if suffix_of(each) in suffixes and os.path.isfile(each)]
    # A file with several names, of which some are links, is read under its first name.
    files = sorted({os.path.realpath(each): each for each in reversed(known)}.values())
    if not files:
        kinds = ", ".join(suffixes)
        raise UsageError(f"{source}: found no file that ends in one of {kinds}")
    return _by_split(files)


def _by_split(files: list[str]) -> dict[str, list[str]]:
    """Divide the files of a folder into "train", "val" and "test" by SPLIT_OF, in the names
    of files or subfolders. A file is for validation or testing only if a file for training has the
    same name apart from the word, the suffix and the number of the shard, or if there are only
    files for validation and testing. All others train."""
    base = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files])
    named = {path: _split_of(Path(os.path.relpath(path, base))) for path in files}
    partners = {name for split, name in named.values() if split == "train"}
    held_out = {split for split, _ in named.values()} == {"val", "test"}
    splits = {"train": [], "val": [], "test": []}
    for path, (split, name) in named.items():
        splits[split if held_out or name in partners else "train"].append(path)
    return splits


def _split_of(path: Path) -> tuple[str, str | None]:
    """Return the split that the file's name or the innermost folder names, and the name without
    this word; ("train", None) if there is no such word."""
    parts = [path.name[: len(path.name) - len(suffix_of(path.name))], *path.parts[-2::-1]]
    for part in parts:
        if found := SPLIT_NAME.fullmatch(SHARD.sub("", part.lower())):
            before, word, after = found.groups(default="")
            return SPLIT_OF[word], f"{before}*{after}"
    return "train", None


def all_files(folder: str | Path, *, hidden: bool) -> list[str]:
    """Return the files in a folder and its subfolders, sorted. Links are followed, but no folder is
    opened twice. Broken links and folders that cannot be opened are in the list. Without `hidden`,
    leave out names that begin with a dot: caches and second copies, such as .ipynb_checkpoints."""
    found, visited = [], set()
    walk = os.walk(folder, followlinks=True, onerror=lambda error: found.append(error.filename))
    for base, subfolders, names in walk:
        is_new = os.path.realpath(base) not in visited
        visited.add(os.path.realpath(base))
        subfolders[:] = sorted(n for n in subfolders if is_new and (hidden or n[0] != "."))
        found += [str(Path(base, n)) for n in names if is_new and (hidden or n[0] != ".")]
    return sorted(found)


def read_records(
    files: Iterable[str],
    columns: tuple[str, ...] = (TEXT_COLUMN,),
    section_bytes: int = SECTION_BYTES,
) -> Iterator[Record]:
    """Yield every document of every file. The text is under the first of `columns`; a .parquet
    must have one of them. A document of a .txt or .py has at most section_bytes. Raises UsageError
    if a file cannot be read or has no such column."""
    for path in files:
        suffix = suffix_of(path)
        try:
            if suffix in (".csv", ".tsv"):
                yield from _csv_records(path, columns[0])
            elif suffix == ".parquet":
                yield from _parquet_records(path, columns)
            elif suffix in JSON:
                opener = {".gz": gzip.open, ".zst": _open_zst}.get(Path(suffix).suffix, open)
                with opener(path, "rb") as file:
                    for place, raw in json_objects(path, file):
                        yield Record(path, place, raw, columns[0])
            else:
                yield from _sections(path, section_bytes)
        except UsageError:
            raise
        except DAMAGE as error:
            raise UsageError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _sections(path: str, most: int) -> Iterator[Record]:
    with open(path, "rb") as file:
        rest = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        offset = file.tell() - len(rest)
        while block := file.read(most):
            rest += block
            while len(rest) > most:  # a shorter rest may be the last section of the file
                cut = rest.rfind(b"\n", 0, most) + 1
                if not cut:  # one very long line: cut where a character begins
                    starts = (at for at in range(most, most - 4, -1) if rest[at] & 0xC0 != 0x80)
                    cut = next(starts, most)
                yield Record(path, f"{path}, byte {offset}", rest[:cut])
                offset += cut
                rest = rest[cut:]
    if rest:
        yield Record(path, f"{path}, byte {offset}", rest)


def _open_zst(path: str, mode: str) -> io.BufferedReader:
    return io.BufferedReader(_pyarrow(path).input_stream(path, compression="zstd"))


def _csv_records(path: str, column: str) -> Iterator[Record]:
    csv.field_size_limit(LONGEST)
    # Invalid UTF-8 is kept here, so that `decode` can report its line number.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        line = file.readline()
        named = SEPARATOR.fullmatch(line)
        delimiter = named[1] if named else _delimiter(path, line, column)
        rows = csv.reader(chain([line], file), strict=True, delimiter=delimiter)
        if named:  # the header is the next line
            next(rows)
        columns = next(rows, None) or [column]  # an empty file has no documents
        title = ",".join(columns).encode(errors="surrogateescape")
        decode(Record(path, f"{path}, line {rows.line_num}", title))
        _known_columns(path, (column,), columns)
        place, wrong = columns.index(column), "put quotes around a text with commas"
        while True:
            before = rows.line_num
            try:
                row = next(rows)
                n, expected = len(row), len(columns)
                fault = f"{n} fields under {expected} columns: {wrong}" if n != expected else ""
            except StopIteration:
                return
            except csv.Error as error:
                row = None
                fault = f"cannot be read: {error}".replace(f"'{NO_DELIMITER}'", "the line's end")
            if not fault:
                raw = row[place].encode(errors="surrogateescape")
                yield Record(path, f"{path}, line {rows.line_num}", raw)
            elif row != []:  # not an empty line; a quote that is not closed takes many lines
                for number in range(before + 1, rows.line_num + 1):
                    yield Record(path, f"{path}, line {number}", b"%d" % number, fault=fault)


def _delimiter(path: str, header: str, column: str) -> str:
    """Return the delimiter with which the header has the column, or else the most columns. In a
    file with a single column, a comma is text."""
    known = "\t" if suffix_of(path) == ".tsv" else DELIMITERS
    fields = {d: next(csv.reader([header], delimiter=d), []) for d in known}
    best = max(fields, key=lambda d: (column in fields[d], len(fields[d])))
    return best if len(fields[best]) > 1 else NO_DELIMITER


def _parquet_records(path: str, keys: tuple[str, ...]) -> Iterator[Record]:
    """Yield each row of a .parquet file as JSON: of the only column in `keys`, or else of all
    columns. Raises UsageError if the file has no column in `keys` or is damaged."""
    # A row group may be the whole file. These two settings read it in pieces.
    settings = {"buffer_size": CHUNK_BYTES, "pre_buffer": False}
    with _pyarrow(path).parquet.ParquetFile(path, **settings) as file:
        columns = _known_columns(path, keys, file.schema_arrow.names)
        columns = columns if len(keys) == 1 else None
        batches = file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows, 1):
            line = json.dumps(row, ensure_ascii=False, default=_as_text)
            raw = line.encode(errors="surrogateescape")
            yield Record(path, f"{path}, row {number}", raw, keys[0])


def _as_text(value: object) -> str:
    """Return a value that JSON does not have, such as a date, as text. Keep invalid UTF-8."""
    is_bytes = isinstance(value, bytes)
    return value.decode(errors="surrogateescape") if is_bytes else str(value)


def _known_columns(path: str, keys: tuple[str, ...], names: list[str]) -> list[str]:
    """Return the keys that are column names. Raises UsageError if no key is a column name, or if
    two columns have the same name."""
    if twice := [key for key in keys if names.count(key) > 1]:
        raise UsageError(f"{path}: several columns have the name {twice[0]!r}: rename the others")
    if columns := [key for key in keys if key in names]:
        return columns
    known = ", ".join(map(repr, names))
    wanted = " or ".join(map(repr, keys)) + (" (--text_column)" if len(keys) == 1 else "")
    raise UsageError(f"{path}: no column {wanted}; it has {known:.200}")


def _pyarrow(path: str) -> ModuleType:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow: python -m pip install pyarrow") from error
    return pyarrow


def parse(record: Record) -> str:
    """Return the text of a record. Raises UsageError, with the place, for an invalid record."""
    if record.fault:
        raise UsageError(f"{record.place}: {record.fault}")
    if record.text_column is None:
        return decode(record)
    value = load_json(record)
    _known_columns(record.place, (record.text_column,), list(value))
    text = value[record.text_column]
    if not is_text(text):
        found = f'"{record.text_column}" must be a valid string, not {text!r:.40}'
        raise UsageError(f"{record.place}: {found}")
    return text


def decode(record: Record) -> str:
    """Decode a record. Raises UsageError if it is not UTF-8."""
    try:
        return record.raw.decode()
    except UnicodeDecodeError as error:
        where = f"{record.place}: not valid UTF-8 (after {error.start} valid bytes)"
        is_utf16 = record.raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        usual = "utf-16" if is_utf16 else "gb18030 (often of Chinese text) or cp1252 (European)"
        hint = f"save it as UTF-8: iconv -t utf-8 -f {usual}"
        raise UsageError(f"{where}: {hint}") from error


def load_json(record: Record) -> dict[str, Any]:
    """Return the JSON object of a record. Raises UsageError if the record is not a JSON object."""
    text = decode(record)
    try:
        if isinstance(value := json.loads(text), dict):
            return value
        raise ValueError(f"this is a {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{record.place}: not JSON of one object ({error})") from error
