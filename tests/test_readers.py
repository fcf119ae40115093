import csv
import gzip
import json
import random
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data import corpus
from data.corpus import find_files, parse, read_records
from data.errors import DataError

DOCUMENTS = ["one", '第二\n句, with "quotes"', "", "😀\r\nthree", "last"]


def records(path: Path, column: str = "text") -> list:
    return list(read_records(find_files(str(path)), column))


def texts(path: Path, column: str = "text") -> list[str]:
    return [parse(record) for record in records(path, column)]


def write_csv(path: Path, rows: list[list[str]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def write_parquet(path: Path, columns: dict, **options) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def one_line(path: Path, column: str = "text") -> str:
    """The error with which reading these documents ends."""
    with pytest.raises(DataError) as error:
        texts(path, column)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("column", ["text", "content"])
def test_a_row_of_a_table_is_a_document(tmp_path, column):
    rows = [["id", column], *([str(i), text] for i, text in enumerate(DOCUMENTS))]
    assert texts(write_csv(tmp_path / "a.csv", rows), column) == DOCUMENTS
    columns = {"id": list(range(len(DOCUMENTS))), column: DOCUMENTS}
    assert texts(write_parquet(tmp_path / "a.parquet", columns), column) == DOCUMENTS


@pytest.mark.parametrize("column", ["Body", ""])
def test_a_column_that_is_not_there_is_answered_with_those_that_are(tmp_path, column):
    wanted = f"no column {column!r} (--text_column); it has 'id', 'body'"
    assert wanted in one_line(write_csv(tmp_path / "a.csv", [["id", "body"]]), column)
    columns = {"id": [1], "body": ["x"]}
    assert wanted in one_line(write_parquet(tmp_path / "a.parquet", columns), column)


STRINGS = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())


@pytest.mark.parametrize("kind", [*STRINGS, pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_every_form_of_text_that_parquet_has_is_read(tmp_path, kind):
    raw = DOCUMENTS if "binary" not in str(kind) else [text.encode() for text in DOCUMENTS]
    column = pa.array(raw, kind) if not pa.types.is_dictionary(kind) else pa.array(raw).cast(kind)
    assert texts(write_parquet(tmp_path / "a.parquet", {"text": column})) == DOCUMENTS


def test_rows_are_counted_through_all_row_groups_and_batches(tmp_path):
    documents = [f"document {i}" for i in range(3 * corpus.BATCH_ROWS + 5)]
    path = write_parquet(tmp_path / "a.parquet", {"text": documents}, row_group_size=100)
    found = records(path)
    assert [parse(record) for record in found] == documents
    assert [record.position for record in found] == list(range(1, len(documents) + 1))


def test_rows_of_csv_have_the_line_on_which_they_end(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\ufefftext,id\r\n"one\n\nmore",1\r\n\r\ntwo,2\r\n', encoding="utf-8")
    assert [(r.position, parse(r)) for r in records(path)] == [(4, "one\n\nmore"), (6, "two")]


BAD_ROWS = {
    "null": ("row 2: no text in it", {"text": ["a", None, "b"]}),
    "no UTF-8": ("row 2: not valid UTF-8", {"text": pa.array([b"a", b"x\xff", b"b"])}),
    "too few fields": ("line 3: too few fields", b"id,text\n1,a\n2\n3,b\n"),
    "no UTF-8 in CSV": ("line 3: not valid UTF-8", b"id,text\n1,a\n2,x\xff\n3,b\n"),
}


@pytest.mark.parametrize(("place", "content"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_has_its_place_and_the_others_are_read(tmp_path, place, content):
    path = tmp_path / ("a.parquet" if isinstance(content, dict) else "a.csv")
    if isinstance(content, dict):
        write_parquet(path, content)
    else:
        path.write_bytes(content)
    assert f"{path}, {place}" in one_line(path)
    first, _, last = records(path)
    assert [parse(first), parse(last)] == ["a", "b"]


def test_a_quote_that_is_never_closed_is_found_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST_FIELD", 1000)
    path = tmp_path / "a.csv"
    path.write_text('text\na\n"no end\nb\n')
    assert "cannot be read: unexpected end of data" in one_line(path)
    path.write_text('text\na\n"' + "x\n" * 2000)
    assert "cannot be read: field larger than field limit (1000)" in one_line(path)


def random_lines(n: int = 2000) -> bytes:
    chooser = random.Random(0)
    return b"".join(b'{"text": "%d"}\n' % chooser.randrange(10**9) for _ in range(n))


@pytest.mark.parametrize("frames", [1, 3])
def test_a_zst_file_cut_short_is_an_error_with_its_name(tmp_path, frames):
    window = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=window).compressobj()
    data = frames * (compressor.compress(random_lines()) + compressor.flush())
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(data)
    lines = frames * random_lines().splitlines(keepends=True)
    assert [record.raw for record in records(path)] == lines
    for missing in (1, 1000, len(data) // frames - 5):
        path.write_bytes(data[:-missing])
        assert "cannot be read: " in one_line(path)
    path.write_bytes(b"no zst")
    assert "cannot be read: " in one_line(path)


def test_a_damaged_parquet_file_is_refused_in_one_line(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": DOCUMENTS * 20})
    data = path.read_bytes()
    for share in (0.0, 0.01, 0.99):
        path.write_bytes(data[: int(share * len(data))])
        assert "cannot be read: " in one_line(path)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_package_that_is_missing_is_said_with_how_to_install_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / name).write_bytes(b"anything")
    assert "python -m pip install pyarrow" in one_line(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    """The 25 MB of text are one row group where there are such."""
    path, dice = tmp_path / name, random.Random(0)
    documents = [dice.randbytes(5000).hex() for _ in range(2500)]
    if name == "a.parquet":
        write_parquet(path, {"text": documents}, compression="none", use_dictionary=False)
    elif name == "a.csv":
        write_csv(path, [["text"], *([document] for document in documents)])
    else:
        lines = "".join(json.dumps({"text": document}) + "\n" for document in documents).encode()
        path.write_bytes((gzip if name.endswith("gz") else zstandard).compress(lines))
    before, most, tracked = pa.total_allocated_bytes(), 0, len(documents)
    tracemalloc.start()
    for record in read_records([str(path)]):
        tracked -= len(record.raw) >= 10_000
        most = max(most, pa.total_allocated_bytes() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tracked == 0
    assert max(most, peak) < 14_000_000
