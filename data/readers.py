"""Read compressed files and tables, in memory bounded by one line or one batch of rows.

`.zst` needs zstandard and `.parquet` needs pyarrow, which are not installed with this project.
"""

import csv
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from data.errors import DataError

CHUNK_BYTES = 1 << 17
BATCH_ROWS = 64  # of Parquet, in memory at once
# A quote that is never closed makes one field of the rest of the file: reading stops here.
LONGEST_FIELD = 1 << 26


def zst_lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a .zst file, line ends included.

    zstandard's own reader takes a file that was cut short for a whole one.

    Raises DataError: zstandard is not installed. OSError, EOFError: the file is damaged.
    """
    zstandard = _import("zstandard", path)
    # `zstd --ultra --long=31` makes windows of this size.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, rest = None, b""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            while chunk:  # a file may hold several frames
                frame = frame or decompressor.decompressobj()
                try:
                    *lines, rest = (rest + frame.decompress(chunk)).split(b"\n")
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from error
                yield from (line + b"\n" for line in lines)
                chunk = frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")
    if rest:
        yield rest


def csv_rows(path: str, column: str) -> Iterator[tuple[int, bytes, str]]:
    """Yield one column of a .csv file with a head: the line on which a row begins, from 1, the
    text as UTF-8, and why there is none, "" if there is.

    Raises DataError: there is no such column. csv.Error: the head is no CSV.
    """
    csv.field_size_limit(LONGEST_FIELD)
    # Bytes that are no UTF-8 pass through, so that the error names the place of their row.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, strict=True)
        names = next(rows, [column])  # an empty file has no head and no rows
        _require_columns(path, (column,), names)
        index, row = names.index(column), []
        while row is not None:
            begins = rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                yield begins, b"", f"not CSV ({error})"
                continue
            if row and len(row) <= index:
                yield begins, b"", f"{len(row)} fields, too few for a {column!r}"
            elif row:
                yield begins, row[index].encode(errors="surrogateescape"), ""


def parquet_rows(path: str, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .parquet file, with those columns among `keys` that it has.

    Raises DataError: it has none of them, or is damaged.
    """
    parquet, arrow = _import("pyarrow.parquet", path), _import("pyarrow", path)
    try:
        # With these a row group, which may be the whole file, is read in pieces.
        with parquet.ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as file:
            names = file.schema_arrow.names
            _require_columns(path, keys, names)
            columns = [key for key in keys if key in names]
            for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                yield from batch.to_pylist()
    except DataError:
        raise
    except (OSError, ValueError, LookupError, arrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _require_columns(path: str, keys: tuple[str, ...], names: list[str]) -> None:
    """Raises DataError: none of the keys is the name of a column."""
    if not set(keys) & set(names):
        has = "--text_column takes one of" if len(keys) == 1 else "it has"
        known = ", ".join(map(repr, names))
        raise DataError(f"{path}: no column {' or '.join(map(repr, keys))}; {has} {known}")


def _import(module: str, path: str) -> ModuleType:
    """Import a package that not everybody needs. Raises DataError: it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(f"{path}: reading it takes: python -m pip install {package}") from error
