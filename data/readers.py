"""How files that are more than lines of text are read: compressed ones, and tables with a column of
text. All of it in memory bounded by one row, or by one batch of rows.

What is needed for `.zst` (zstandard) and `.parquet` (pyarrow) is not installed with this project.
"""

import csv
import gzip
import importlib
import io
import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import BinaryIO, NamedTuple

from data.errors import DataError

CHUNK_BYTES = 1 << 17
BATCH_ROWS = 64  # of Parquet, in memory at once
# A quote that is never closed takes the rest of the file for one field: it ends here.
LONGEST_FIELD = 1 << 26


class Row(NamedTuple):
    position: int  # .parquet: number of the row; .csv: of the line on which it begins; from 1
    raw: bytes  # UTF-8, not yet looked at
    fault: str = ""  # why there is no text in it


def open_compressed(path: str) -> BinaryIO:
    """The contents of a file, which may be .gz or .zst. Raises DataError: nothing here that reads
    it. The file raises OSError, EOFError or zlib.error where it is damaged or cut short."""
    if path.endswith(".zst"):
        return io.BufferedReader(ZstFile(path))
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")


class ZstFile(io.RawIOBase):
    """A .zst file, decompressed. (zstandard's own reader takes a file cut short for its end.)"""

    def __init__(self, path: str):
        self._zstandard = _import("zstandard", path)
        self._file = open(path, "rb")  # noqa: SIM115, closed in close()
        self._frame, self._input, self._output = None, b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            self._input = self._input or self._file.read(CHUNK_BYTES)
            if not self._input and self._frame is None:
                return 0
            if not self._input:
                raise EOFError("it ends in the middle of a frame")
            self._decompress()
        n = min(len(buffer), len(self._output))
        buffer[:n], self._output = self._output[:n], self._output[n:]
        return n

    def _decompress(self) -> None:
        try:
            if self._frame is None:  # files may hold several, one after the other
                largest = {"max_window_size": 1 << 31}  # what `zstd --ultra --long=31` needs
                self._frame = self._zstandard.ZstdDecompressor(**largest).decompressobj()
            self._output = memoryview(self._frame.decompress(self._input))
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._input = self._frame.unused_data
        if self._frame.eof:
            self._frame = None

    def close(self) -> None:
        self._file.close()
        super().close()


def csv_rows(path: str, column: str) -> Iterator[Row]:
    """One column of a .csv file with a head. Raises DataError: there is no such column."""
    csv.field_size_limit(LONGEST_FIELD)
    # Bytes that are no UTF-8 pass through, to be complained about with the place of their row.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            names = next(rows, None)
        except csv.Error as error:
            raise DataError(
                f"{path}, line {rows.line_num}: no head of a table ({error})"
            ) from error
        if names is None:
            return
        if column not in names:
            raise DataError(_no_column(path, column, names))
        index = names.index(column)
        while True:
            begins = rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                yield Row(begins, b"", f"not CSV ({error})")
                continue
            if row is None:
                return
            if len(row) > index:
                yield Row(begins, row[index].encode(errors="surrogateescape"))
            elif row:
                yield Row(begins, b"", f"{len(row)} fields, too few for a {column!r}")


def parquet_rows(path: str, column: str) -> Iterator[Row]:
    """One column of a .parquet file. Raises DataError: there is no such column, it holds no text,
    or the file is damaged."""
    arrow = _import("pyarrow", path)

    def choose(schema) -> list[str]:
        if column not in schema.names:
            raise DataError(_no_column(path, column, schema.names))
        kind = schema.field(column).type
        try:
            arrow.array([], kind).cast(arrow.large_binary())
        except arrow.ArrowNotImplementedError as error:
            what = f"column {column!r} holds {kind}, which is no text"
            raise DataError(f"{path}: {what}; {_listed(schema.names)}") from error
        return [column]

    def texts() -> Iterator[bytes | None]:
        for batch in _parquet_batches(path, choose):
            yield from batch.column(0).cast(arrow.large_binary()).to_pylist()

    for number, raw in enumerate(texts(), 1):
        yield Row(number, raw or b"", "" if raw is not None else "null and no text")


def parquet_objects(path: str, keys: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a .parquet file as JSON objects, of those columns among `keys` that it has.
    Raises DataError: it has none, or is damaged."""

    def choose(schema) -> list[str]:
        found = [key for key in keys if key in schema.names]
        if not found:
            has = ", ".join(map(repr, schema.names))
            raise DataError(f"{path}: no column is one of {', '.join(keys)}; it has {has}")
        return found

    number = 0
    for batch in _parquet_batches(path, choose):
        for row in batch.to_pylist():
            number += 1
            yield Row(number, json.dumps(row, default=str).encode())


def _parquet_batches(path: str, choose: Callable) -> Iterator:
    """Of the columns that `choose` names when it has seen the schema."""
    parquet, arrow = _import("pyarrow.parquet", path), _import("pyarrow", path)
    try:
        # So a row group, which may be all of the file, is read piece by piece and not ahead.
        piecewise = {"buffer_size": CHUNK_BYTES, "pre_buffer": False}
        with parquet.ParquetFile(path, **piecewise) as file:
            columns = choose(file.schema_arrow)
            yield from file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)
    except DataError:
        raise
    except (OSError, ValueError, LookupError, arrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _no_column(path: str, column: str, names: list[str]) -> str:
    return f"{path}: no column {column!r}; {_listed(names)}"


def _listed(names: list[str]) -> str:
    return f"--text_column takes one of {', '.join(map(repr, names))}"


def _import(module: str, path: str) -> ModuleType:
    """A package that not everybody needs. Raises DataError: it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{path}: reading it takes {package}: python -m pip install {package}"
        ) from error
