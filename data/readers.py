"""Read compressed files and tables, in memory bounded by one line or one batch of rows.

`.zst` and `.parquet` need pyarrow, which is not installed with this project.
"""

import csv
import importlib
import io
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from data.errors import DataError

CHUNK_BYTES = 1 << 17
BATCH_ROWS = 64  # of Parquet, in memory at once
# A quote that is never closed makes one field of the rest of the file: reading stops here.
LONGEST_FIELD = 1 << 26


def open_zst(path: str, mode: str) -> io.BufferedReader:
    """Open a .zst file to read its contents. Raises DataError: pyarrow is not installed. OSError:
    the file is damaged; reading raises it too."""
    return io.BufferedReader(_import("pyarrow", path).input_stream(path, compression="zstd"))


def csv_rows(path: str, column: str) -> Iterator[tuple[int, bytes, str]]:
    """Yield one column of a .csv file with a head: the line on which a row ends, from 1, the text
    as UTF-8, and why there is none, "" if there is.

    Raises DataError: there is no such column. csv.Error: the file is no CSV.
    """
    csv.field_size_limit(LONGEST_FIELD)
    # Bytes that are no UTF-8 pass through, so that the error names the place of their row.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        _require_columns(path, (column,), rows.fieldnames or [column])
        for row in rows:
            text = row[column]
            fault = "too few fields" if text is None else ""
            yield rows.line_num, (text or "").encode(errors="surrogateescape"), fault


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
    if not set(keys) & set(names):
        wanted, known = " or ".join(map(repr, keys)), ", ".join(map(repr, names))
        raise DataError(f"{path}: no column {wanted} (--text_column); it has {known}")


def _import(module: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{path}: reading it takes: python -m pip install pyarrow") from error
