"""Raw text: the files of a corpus and the documents in them.

- `.jsonl`, `.jsonl.gz`, `.jsonl.zst`: one JSON object per line, the document under "text"
  (MiniMind's format), or under another name.
- `.csv`, `.parquet`: one document per row, in the column of that name.
- `.txt`: one document; a long file is cut at line ends into sections that each count as one
  document, so that a single large file still has a validation split and never has to fit in memory.
- a folder: all such files below it, in sorted order.
- "builtin": the source of Python's standard library, about 12 MB without its tests.
"""

import csv
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import DataError
from data.readers import csv_rows, open_zst, parquet_rows

BUILTIN = "builtin"
TEXT_COLUMN = "text"
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SUFFIXES = (".txt", *JSONL, ".csv", ".parquet")
COMPRESSED = (".gz", ".zst", ".parquet")
SECTION_BYTES = 16 * 1024
SAVE_HINT = "save it as UTF-8 (for Chinese text often: iconv -f gb18030 -t utf-8)"
# Tests hold deliberate nonsense; the others are installed packages and caches.
NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Record(NamedTuple):
    """A document as it stands in its file, not yet decoded."""

    path: str
    position: int  # a byte in a .txt, else a line or a row, counted from 1
    raw: bytes
    fault: str = ""  # why there is no text in it
    text_column: str = TEXT_COLUMN  # the name under which a line of JSON has it

    @property
    def place(self) -> str:
        """File and position, for people."""
        unit = "line" if self.path.endswith((*JSONL, ".csv")) else "byte"
        unit = "row" if self.path.endswith(".parquet") else unit
        return f"{self.path}, {unit} {self.position}"


def text_size(files: Iterable[str]) -> int:
    """Return the bytes of text, roughly: compression makes it about four times smaller."""
    return sum(os.path.getsize(path) * (4 if path.endswith(COMPRESSED) else 1) for path in files)


def find_files(source: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """Return the files of a corpus: of a file, a folder, or "builtin". Raises DataError: there are
    none, or none of a kind that can be read."""
    if source == BUILTIN:
        return _builtin_files()
    path = Path(source)
    if not path.exists():
        raise DataError(f"{source}: no such file or folder")
    paths = sorted(map(str, path.rglob("*"))) if path.is_dir() else [str(path)]
    files = [each for each in paths if each.endswith(suffixes) and os.path.isfile(each)]
    if not files:
        kinds = ", ".join(suffixes)
        raise DataError(f"{source}: cannot read this kind of file or folder; use one of {kinds}")
    return files


def _builtin_files() -> list[str]:
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - NOT_CORPUS)
        files += (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))
    return files


def read_records(
    files: Iterable[str], text_column: str = TEXT_COLUMN, section_bytes: int = SECTION_BYTES
) -> Iterator[Record]:
    """Yield every document of every file, in order, in memory bounded by one line, section or
    batch of rows; a section, of a .txt, has at most section_bytes.

    Raises DataError: a file cannot be read, has no such column, or takes a missing package.
    """
    for path in files:
        try:
            if path.endswith(".csv"):
                yield from (Record(path, *row) for row in csv_rows(path, text_column))
            elif path.endswith(".parquet"):
                for number, row in enumerate(parquet_rows(path, (text_column,)), 1):
                    text = row[text_column]
                    raw = text.encode() if isinstance(text, str) else text
                    fault = "" if isinstance(raw, bytes) else "no text in it"
                    yield Record(path, number, b"" if fault else raw, fault)
            elif path.endswith(JSONL):
                opener = {".gz": gzip.open, ".zst": open_zst}.get(Path(path).suffix, open)
                with opener(path, "rb") as file:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield Record(path, number, line, text_column=text_column)
            else:
                yield from _sections(path, section_bytes)
        except (OSError, EOFError, zlib.error, csv.Error) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error


def _sections(path: str, most: int) -> Iterator[Record]:
    offset, rest = 0, b""
    with open(path, "rb") as file:
        while block := file.read(most):
            rest += block
            while len(rest) > most:  # else perhaps the file ends here, in one section
                cut = rest.rfind(b"\n", 0, most) + 1
                if not cut:  # one very long line: cut between two characters
                    cut = most
                    while cut > most - 4 and rest[cut] & 0xC0 == 0x80:  # inside a character
                        cut -= 1
                yield Record(path, offset, rest[:cut])
                offset, rest = offset + cut, rest[cut:]
    if rest:
        yield Record(path, offset, rest)


def parse(record: Record) -> str:
    """Return the text of a document. Raises DataError, with its place: invalid UTF-8, a line that
    is not JSON, or no text in it."""
    if record.fault:
        raise DataError(f"{record.place}: {record.fault}")
    if not record.path.endswith(JSONL):
        return decode(record)
    document, name = load_json(record), record.text_column
    if not isinstance(document, dict) or not isinstance(document.get(name), str):
        raise DataError(f'{record.place}: no "{name}" with a string in it')
    refuse_half_characters(record.place, document[name])
    return document[name]


def decode(record: Record) -> str:
    """Return the record as characters, without a byte order mark at the start of its file. Raises
    DataError, with its place: invalid UTF-8."""
    try:
        text = record.raw.decode()
    except UnicodeDecodeError as error:
        where = f"{record.place}: not valid UTF-8 ({error.reason} {error.start} bytes further)"
        raise DataError(f"{where}: {SAVE_HINT}") from error
    at_start = record.position == (1 if record.path.endswith(JSONL) else 0)
    return text.removeprefix("\ufeff") if at_start else text


def load_json(record: Record) -> Any:
    """Return the value of a line of a .jsonl file. Raises DataError, with its place: invalid UTF-8,
    or a line that is not JSON."""
    text = decode(record)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{record.place}: not JSON ({error})") from error


def refuse_half_characters(place: str, text: str) -> None:
    """Raise DataError for half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: half a surrogate pair, which is no character") from error
