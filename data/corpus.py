"""Raw text: the files of a corpus and the documents in them.

- `.jsonl`, `.jsonl.gz`, `.jsonl.zst`: one JSON object per line, the document under "text"
  (MiniMind's format), or under another name.
- `.csv`, `.parquet`: one document per row, in the column of that name.
- `.txt`: one document; a long file is cut at line ends into sections that each count as one
  document, so that a single large file still has a validation split and never has to fit in memory.
- a folder: all such files below it, in sorted order.
- "builtin": the Python standard library's own source, there wherever Python is, about 12 MB without
  its tests.
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
from data.readers import csv_rows, parquet_rows, zst_lines

BUILTIN = "builtin"
TEXT_COLUMN = "text"
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SUFFIXES = (".txt", *JSONL, ".csv", ".parquet")
WITH_COLUMNS = (*JSONL, ".csv", ".parquet")
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


class Reading(NamedTuple):
    """Settings that turn files into documents."""

    text_column: str = TEXT_COLUMN  # of .jsonl, .csv and .parquet
    section_bytes: int = SECTION_BYTES  # longest document of a .txt


def is_jsonl(path: str) -> bool:
    return path.endswith(JSONL)


def text_size(files: Iterable[str]) -> int:
    """Return the bytes of text, roughly: compression makes it about four times smaller."""
    return sum(os.path.getsize(path) * (4 if path.endswith(COMPRESSED) else 1) for path in files)


def bytes_to_read(files: Iterable[str]) -> int | None:
    """Return the bytes of all records of the files; None where only reading them would tell."""
    if any(path.endswith((*COMPRESSED, ".csv")) for path in files):
        return None
    return sum(map(os.path.getsize, files))


def find_files(source: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """Return the files of a corpus: of a file, a folder, or "builtin".

    Raises DataError: nothing there, or nothing of a kind that can be read.
    """
    if source == BUILTIN:
        return _builtin_files()
    path, kinds = Path(source), ", ".join(suffixes)
    if path.is_dir():
        files = sorted(str(p) for p in path.rglob("*") if p.name.endswith(suffixes) and p.is_file())
        if not files:
            raise DataError(f"{source}: no {kinds} file in this folder")
        return files
    if not path.is_file():
        raise DataError(f"{source}: no such file or folder")
    if not path.name.endswith(suffixes):
        raise DataError(f"{source}: cannot read this kind of file; use one of {kinds}")
    return [str(path)]


def require_columns(files: Iterable[str], text_column: str | None) -> None:
    """Raises DataError: a column was named, and none of the files has columns."""
    if text_column is not None and not any(path.endswith(WITH_COLUMNS) for path in files):
        raise DataError(
            f"--text_column {text_column}: none of these files has columns, as "
            f"{', '.join(WITH_COLUMNS)} have"
        )


def _builtin_files() -> list[str]:
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - NOT_CORPUS)
        files += (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))
    if sum(map(os.path.getsize, files)) < 1_000_000:
        raise DataError(
            "this Python comes without the source of its standard library: give a text of your own"
        )
    return files


def read_records(files: Iterable[str], reading: Reading | None = None) -> Iterator[Record]:
    """Yield every document of every file, in order, in memory bounded by one line, section or
    batch of rows.

    Raises DataError: a file cannot be opened, is damaged or cut short, has no such column, or takes
    a package that is not installed.
    """
    column, section_bytes = reading or Reading()
    for path in files:
        try:
            if path.endswith((".csv", ".parquet")):
                rows = csv_rows if path.endswith(".csv") else parquet_rows
                yield from (Record(path, *row) for row in rows(path, column))
            elif path.endswith(".zst"):
                yield from _lines(path, zst_lines(path), column)
            else:
                with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
                    if is_jsonl(path):
                        yield from _lines(path, file, column)
                    else:
                        yield from _sections(path, file, section_bytes)
        except (OSError, EOFError, zlib.error, csv.Error) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error


def _lines(path: str, lines: Iterable[bytes], text_column: str) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Record(path, number, line, text_column=text_column)


def _sections(path: str, file, most: int) -> Iterator[Record]:
    offset, rest = 0, b""
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
    """Return the text of a document.

    Raises DataError: invalid UTF-8, a line that is not JSON, or no text in it; names the place.
    """
    if record.fault:
        raise DataError(f"{record.place}: {record.fault}")
    if not is_jsonl(record.path):
        return decode(record)
    document, name = load_json(record), record.text_column
    if not isinstance(document, dict) or not isinstance(document.get(name), str):
        raise DataError(f'{record.place}: no "{name}" with a string in it')
    refuse_half_characters(record.place, document[name])
    return document[name]


def decode(record: Record) -> str:
    """Return the record as characters, without a byte order mark at the start of its file.

    Raises DataError: invalid UTF-8; names the place.
    """
    try:
        text = record.raw.decode()
    except UnicodeDecodeError as error:
        where = f"{record.place}: not valid UTF-8 ({error.reason} {error.start} bytes further)"
        raise DataError(f"{where}: {SAVE_HINT}") from error
    at_start = record.position == (1 if is_jsonl(record.path) else 0)
    return text.removeprefix("\ufeff") if at_start else text


def load_json(record: Record) -> Any:
    """Return the value that a line of a .jsonl file holds.

    Raises DataError: invalid UTF-8, or a line that is not JSON; names the place.
    """
    text = decode(record)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{record.place}: not JSON ({error})") from error


def refuse_half_characters(place: str, text: str) -> None:
    """Raises DataError: half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: half a surrogate pair, which is no character") from error
