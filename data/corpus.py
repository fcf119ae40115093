"""Raw text: the files of a corpus and the documents in them.

- `.jsonl`, `.jsonl.gz`, `.jsonl.zst`: one JSON object per line, the document under "text"
  (MiniMind's format), or under another name.
- `.csv`, `.parquet`: one document per row, in the column of that name.
- `.txt`: one document; a long file is cut at line ends into sections that each count as one.
- a folder: all such files below it, in sorted order.
- "builtin": the source of Python's standard library, about 12 MB without its tests.

Memory is bounded by one line, section or batch of rows. `.zst` and `.parquet` need pyarrow.
"""

import csv
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from data.errors import DataError

BUILTIN = "builtin"
TEXT_COLUMN = "text"
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SUFFIXES = (".txt", *JSONL, ".csv", ".parquet")
SECTION_BYTES = 16 * 1024
CHUNK_BYTES, BATCH_ROWS = 1 << 17, 64  # of Parquet, in memory at once
# A quote that is never closed makes the rest of the file one field.
LONGEST_FIELD = 1 << 26
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
        units = {".txt": "byte", ".py": "byte", ".parquet": "row"}
        unit = units.get(Path(self.path).suffix, "line")
        return f"{self.path}, {unit} {self.position}"


def text_size(files: Iterable[str]) -> int:
    """Return the bytes of text, roughly: compression makes it four times smaller."""
    times = {".gz": 4, ".zst": 4, ".parquet": 4}
    return sum(os.path.getsize(path) * times.get(Path(path).suffix, 1) for path in files)


def find_files(source: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """Return the files of a corpus: a file, a folder, or "builtin". Raises DataError: there are
    none that can be read."""
    if source == BUILTIN:
        walk, files = os.walk(sysconfig.get_path("stdlib")), []
        for folder, subfolders, names in walk:
            subfolders[:] = sorted(set(subfolders) - NOT_CORPUS)
            files += [f"{folder}/{name}" for name in sorted(names) if name.endswith(".py")]
        return files
    path = Path(source)
    if not path.exists():
        raise DataError(f"{source}: no such file or folder")
    paths = sorted(map(str, path.rglob("*"))) if path.is_dir() else [str(path)]
    files = [each for each in paths if each.endswith(suffixes) and os.path.isfile(each)]
    if not files:
        kinds = ", ".join(suffixes)
        raise DataError(f"{source}: cannot read this kind of file; use one of {kinds}")
    return files


def read_records(
    files: Iterable[str], text_column: str = TEXT_COLUMN, section_bytes: int = SECTION_BYTES
) -> Iterator[Record]:
    """Yield every document of every file; those of a .txt have at most section_bytes. Raises
    DataError: a file cannot be read, or has no such column."""
    for path in files:
        try:
            if path.endswith(".csv"):
                yield from _csv_records(path, text_column)
            elif path.endswith(".parquet"):
                for number, row in enumerate(parquet_rows(path, (text_column,)), 1):
                    text = row[text_column]
                    raw = text.encode() if isinstance(text, str) else text
                    fault = "" if isinstance(raw, bytes) else "no text in it"
                    yield Record(path, number, b"" if fault else raw, fault)
            elif path.endswith(JSONL):
                opener = {".gz": gzip.open, ".zst": _open_zst}.get(Path(path).suffix, open)
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


def _open_zst(path: str, mode: str) -> io.BufferedReader:
    return io.BufferedReader(_pyarrow(path).input_stream(path, compression="zstd"))


def _csv_records(path: str, column: str) -> Iterator[Record]:
    csv.field_size_limit(LONGEST_FIELD)
    # Bytes that are no UTF-8 pass through, until the row's place is known.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        _known_columns(path, (column,), rows.fieldnames or [column])
        for row in rows:
            fault = "too few fields" if row[column] is None else ""
            raw = (row[column] or "").encode(errors="surrogateescape")
            yield Record(path, rows.line_num, raw, fault)


def parquet_rows(path: str, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .parquet file, with those columns among `keys` that it has. Raises
    DataError: it has none of them, or is damaged."""
    arrow = _pyarrow(path)
    try:
        # With these a row group, which may be the whole file, is read in pieces.
        with arrow.parquet.ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as file:
            columns = _known_columns(path, keys, file.schema_arrow.names)
            for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                yield from batch.to_pylist()
    except DataError:
        raise
    except (OSError, ValueError, LookupError, arrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _known_columns(path: str, keys: tuple[str, ...], names: list[str]) -> list[str]:
    if columns := [key for key in keys if key in names]:
        return columns
    wanted, known = " or ".join(map(repr, keys)), ", ".join(map(repr, names))
    raise DataError(f"{path}: no column {wanted} (--text_column); it has {known}")


def _pyarrow(path: str) -> ModuleType:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: reading it takes: python -m pip install pyarrow") from error
    return pyarrow


def parse(record: Record) -> str:
    """Return the text of a document. Raises DataError, with its place: there is none."""
    if record.fault:
        raise DataError(f"{record.place}: {record.fault}")
    if not record.path.endswith(JSONL):
        return decode(record)
    document, name = load_json(record), record.text_column
    if not isinstance(document, dict) or not isinstance(document.get(name), str):
        raise DataError(f'{record.place}: no "{name}" with a string in it')
    return document[name]


def decode(record: Record) -> str:
    """Return the record as characters, without a byte order mark. Raises DataError, with its place:
    invalid UTF-8."""
    try:
        text = record.raw.decode()
    except UnicodeDecodeError as error:
        where = f"{record.place}: not valid UTF-8 {error.start} bytes further"
        raise DataError(f"{where}: {SAVE_HINT}") from error
    at_start = record.position == (1 if record.path.endswith(JSONL) else 0)
    return text.removeprefix("\ufeff") if at_start else text


def load_json(record: Record) -> Any:
    """Return the value of a line. Raises DataError, with its place: it is not JSON."""
    text = decode(record)
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails at half a surrogate pair
        return value
    except (ValueError, RecursionError) as error:
        raise DataError(f"{record.place}: not JSON ({error})") from error
