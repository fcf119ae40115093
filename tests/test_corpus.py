import csv
import gzip
import json
import random
import sys
import tracemalloc
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import error_of

from lm.common.errors import UsageError
from lm.data import corpus, json_objects
from lm.data.corpus import (
    JSON,
    SECTION_BYTES,
    Record,
    all_files,
    find_files,
    find_splits,
    parse,
    read_records,
)

BOM = "\ufeff"
DOCUMENTS = ["one", '第二\n句, with "quotes"', "", "😀\r\nthree", "last"]


def records(source, column: str = "text") -> list[Record]:
    return list(read_records(find_files(str(source)), (column,)))


def texts(source, column: str = "text") -> list[str]:
    return [parse(record) for record in records(source, column)]


def one_line(path: Path, column: str = "text") -> str:
    """Read the documents of `path`. This must raise UsageError; return its message, one line."""
    line = error_of(texts, path, column)
    assert line.startswith(str(path))
    return line


def jsonl(*documents: str) -> bytes:
    return "".join(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents).encode()


def write(path: Path, content: bytes | list | dict) -> Path:
    """Write bytes, rows of a .csv or columns of a .parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        pq.write_table(pa.table(content), path)
    elif isinstance(content, list):
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(content)
    else:
        compress = {".gz": gzip.compress, ".zst": zstandard.compress}
        path.write_bytes(compress.get(path.suffix.lower(), bytes)(content))
    return path


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.txt", "one\n第二句\r\n\tthree".encode(), ["one\n第二句\r\n\tthree"]),
        ("a.txt", b"", []),
        ("a.txt", f"{BOM}one{BOM}two".encode(), [f"one{BOM}two"]),
        ("a.jsonl", b'\n \n{"text": ""}\r\n\t\n{"text": "b"}\n\n{"text": "c"}', ["", "b", "c"]),
        ("a.jsonl", b'{"text": "a", "title": "cut \\ud83d", "tags": ["\\ude00"]}\n', ["a"]),
        ("a.jsonl", '{"text": "a\u2028b\u0085c"}\n'.encode(), ["a\u2028b\u0085c"]),
        ("a.json", b"[ ]\n", []),
        ("a.csv", b"", []),
        ("a.tsv", b"", []),
        ("a.tsv", b'b,text,c\ttext\n1\tone; two\n2\t"three\tfour"\n', ["one; two", "three\tfour"]),
    ],
)
def test_documents_are_read_from_text_json_and_tables(tmp_path, name, data, expected):
    assert texts(write(tmp_path / name, data)) == expected


PRETTY = json.dumps([{"text": d, "tags": [{"n": 1}]} for d in DOCUMENTS], indent=1).encode()
OBJECTS = {
    "an array": PRETTY,
    "an element per line": b"\n[\n" + jsonl(*DOCUMENTS).replace(b"}\n{", b"}\n,{") + b"]\n",
    "an object per line": jsonl(*DOCUMENTS),
    "objects over lines": PRETTY[1:-1].replace(b"\n },", b"\n }\n"),
}


@pytest.mark.parametrize("content", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("chunk", [1 << 17, 16])
def test_json_is_an_array_or_objects_under_each_suffix(tmp_path, monkeypatch, content, chunk):
    monkeypatch.setattr(json_objects, "CHUNK_BYTES", chunk)
    for suffix in JSON:
        path = write(tmp_path / f"a{suffix}", BOM.encode() + content)
        assert texts(path) == DOCUMENTS


BAD_ARRAYS = {
    "an element that is no object": (b'[{"text": "a"}, 3]', "2: not JSON of one object"),
    "invalid UTF-8": (b'[{"text": "a"}, {"text": "\xff"}]', ", element 2: not valid UTF-8"),
    "cut off": (b'[{"text": "a"}, {"text": "b', ", element 2: not a whole JSON object"),
    "not closed": (b'[{"text": "a"},', ", element 2: not a whole JSON object"),
    "two arrays": (b'[{"text": "a"}]\n[{"text": "b"}]', "more after the end of the array"),
    "too long": (b'[{"text": "' + b"a" * 9000 + b'"}]', "more than 4,096 characters"),
    "a long line": (jsonl("a", "a" * 5000), ", line 2: longer than 4,096 bytes"),
}


@pytest.mark.parametrize(("content", "reason"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_a_wrong_array_or_a_too_long_object_is_an_error(tmp_path, monkeypatch, content, reason):
    monkeypatch.setattr(json_objects, "LONGEST", 4096)
    monkeypatch.setattr(json_objects, "CHUNK_BYTES", 16)
    assert reason in one_line(write(tmp_path / "a.json", content))


def test_a_row_of_a_table_is_a_document(tmp_path):
    rows = [["id", "body"], *([str(i), text] for i, text in enumerate(DOCUMENTS))]
    assert texts(write(tmp_path / "a.csv", rows), "body") == DOCUMENTS
    column = pa.array([text.encode() for text in DOCUMENTS])
    kinds = [column.cast(kind()) for kind in (pa.string, pa.string_view, pa.large_binary)]
    for column in (*kinds, kinds[0].dictionary_encode()):
        columns = {"id": range(len(DOCUMENTS)), "body": column}
        assert texts(write(tmp_path / "a.parquet", columns), "body") == DOCUMENTS


HUB = {"train": ["data/train-00000-of-00002-2d5a1467fff1081b.parquet", "data/train-00001.parquet"]}
SPLIT_FOLDERS = {
    "of the Hub": HUB | {"val": ["data/validation-00000-of-00001.parquet"], "test": ["test.csv"]},
    "subfolders": {
        "train": ["train/x.txt", "z.txt"],
        "val": ["valid/y.txt"],
        "test": ["test/x.txt"],
    },
    "words at the end": {"train": ["a-train.txt"], "val": ["a-val.txt"], "test": ["A.Test.jsonl"]},
    "words at the start": {"train": ["train_sft-0-of-1.csv"], "val": ["dev_sft.csv"], "test": []},
    "words in the middle": {"train": ["my-train-set.txt"], "val": [], "test": ["my_test_set.txt"]},
    "no word": {"train": ["contest.txt", "latest.txt", "train.txt"]},
    "another name": {"train": ["a-dev.txt", "b-train.txt", "b.txt", "dev.txt", "test_b.txt"]},
    "only a file for testing": {"train": ["other.txt", "test.txt"]},
    "only two files for testing": {"train": ["test-0.txt", "test-1.txt"]},
}


@pytest.mark.parametrize("expected", SPLIT_FOLDERS.values(), ids=SPLIT_FOLDERS)
def test_files_for_validation_and_testing_are_found_by_their_names(tmp_path, expected):
    for name in chain(*expected.values()):
        write(tmp_path / name, b"")
    found = find_splits(str(tmp_path))
    relative = {k: [str(Path(p).relative_to(tmp_path)) for p in v] for k, v in found.items()}
    assert relative == {"train": [], "val": [], "test": []} | expected
    assert find_files(str(tmp_path)) == found["train"] + found["val"]


def test_a_folder_with_files_for_validation_and_testing_alone_is_refused_for_training(tmp_path):
    paths = [str(write(tmp_path / name, b"")) for name in ("data/dev.csv", "data/test.csv")]
    assert find_splits(str(tmp_path)) == {"train": [], "val": paths[:1], "test": paths[1:]}
    said = error_of(find_files, str(tmp_path))
    assert said.startswith(f"{tmp_path}: its files are for validation or testing")


def test_each_file_of_a_folder_is_read_once_in_sorted_order(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    write(folder / "b" / "a.JSONL.GZ", jsonl("second"))  # suffixes have any case
    write(folder / "a.TXT", b"first")
    write(elsewhere / "deep" / "x.txt", b"third")
    write(folder / "blobs" / "1f", jsonl("fifth"))  # as in the cache of the Hugging Face Hub
    write(folder / "c.CSV", [["text"], ["fourth"]])
    write(folder / "e.Parquet", {"text": ["sixth"]})
    write(folder / "b" / "readme.md", b"not text of the corpus")
    write(folder / "dataset_infos.json", b'{"default": {}}')  # describes the data
    write(folder / ".ipynb_checkpoints" / "1-checkpoint.txt", b"a second copy")
    write(folder / "._1.txt", b"hidden, written by a Mac")
    (folder / "folder.txt").mkdir()
    for name, target in {
        "again.txt": "a.TXT",
        "broken.txt": "nowhere.txt",
        "bb": elsewhere,
        "d.jsonl": "blobs/1f",
        "f.txt": "._1.txt",
        "loop": ".",
        "self.txt": "self.txt",
    }.items():
        (folder / name).symlink_to(target)
    (elsewhere / "deep" / "up").symlink_to(folder)
    monkeypatch.chdir(folder)
    read = ["first", "second", "third", "fourth", "fifth", "sixth", "hidden, written by a Mac"]
    assert texts(".") == read
    assert texts("._1.txt") == read[-1:]  # a file that is named is read
    broken = {f"{folder}/broken.txt", f"{folder}/self.txt"}
    assert broken < {*all_files(folder, hidden=True)}


@pytest.mark.parametrize("name", ["a.md", "a.zst", "a.txt.gz", "txt"])
def test_an_unknown_kind_of_file_is_refused_and_the_known_kinds_are_listed(tmp_path, name):
    path = write(tmp_path / name, b"text")
    for place in (path, path.parent):
        with pytest.raises(UsageError, match=rf"{place}.*\.txt, \.jsonl, \.jsonl\.gz"):
            find_files(str(place))


NO_COLUMN = "no column 'text' (--text_column); it has 'id', 'body'"
OPEN_QUOTE = b'text\na\n"no end\nb\n'
WRONG_TABLES = [
    ("a.csv", [["text", "id", "text"], ["a", "1", "b"]], "several columns have the name 'text'"),
    ("a.csv", b"id;body\n", NO_COLUMN),
    ("a.parquet", {"id": [1], "body": ["x"]}, NO_COLUMN),
    ("a.csv", "text\r\n1\r\n".encode("utf-16"), "a.csv, line 1: not valid UTF-8"),
    ("a.csv", "text\r\n1\r\n".encode("utf-16"), "save it as UTF-8: iconv -t utf-8 -f utf-16"),
    ("a.csv", OPEN_QUOTE, "cannot be read: unexpected end of data"),
    ("a.csv", OPEN_QUOTE + b"x\n" * 2000, "cannot be read: field larger than field limit (1000)"),
]


@pytest.mark.parametrize(("name", "content", "reason"), WRONG_TABLES)
def test_a_wrong_table_is_an_error_with_the_reason(tmp_path, monkeypatch, name, content, reason):
    monkeypatch.setattr(corpus, "LONGEST", 1000)
    assert reason in one_line(write(tmp_path / name, content))


BAD = {
    "not JSON": (b"{text: 1}", "not JSON"),
    "an object over many lines": (b"{\n", "not JSON of one object (Expecting"),
    "an array on one line": (b'[{"text": "a"}]', "of one object (this is a list)"),
    "deep nesting": (b"[" * 100_000, "not JSON"),
    "no text": (b'{"content": "a"}', "no column 'text' (--text_column); it has 'content'"),
    "invalid UTF-8": (b'{"text": "a\xff"}', "not valid UTF-8"),
    "lone surrogate": (b'{"text": "a\\ud800b"}', "must be a valid string, not 'a\\ud800b'"),
    "null": ({"text": ["good", None, "good"]}, '"text" must be a valid string, not None'),
    "invalid UTF-8 in a table": ({"text": [b"good", b"x\xff", b"good"]}, "not valid UTF-8"),
    "too few fields": ([["id", "text"], [1, "good"], [2], [3, "good"]], "1 fields under 2"),
    "more fields than columns": (
        [["id", "text"], [1, "good"], [2, "a", " b"], [3, "good"]],
        "3 fields under 2 columns: put quotes around a text with commas",
    ),
}


@pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=BAD)
def test_a_bad_document_is_reported_with_its_place_and_the_others_are_read(tmp_path, bad, reason):
    name = {bytes: "a.jsonl", dict: "a.parquet", list: "a.csv"}[type(bad)]
    if isinstance(bad, bytes):
        bad = jsonl("good") + b"\n" + bad + b"\n" + jsonl("good")
    path = write(tmp_path / name, bad)
    where, said = one_line(path).split(": ", 1)
    assert where == f"{path}, {'row 2' if isinstance(bad, dict) else 'line 3'}"
    assert reason in said
    first, _, last = records(path)
    assert parse(first) == parse(last) == "good"


def test_bytes_that_are_not_utf8_are_reported_with_their_position(tmp_path):
    sections = b"\xef\xbb\xbf" + b"0123456\n" * (2 * SECTION_BYTES // 8)
    path = write(tmp_path / "a.txt", sections + "春眠".encode("gb18030"))
    valid = len(records(path)[-1].raw) - 4
    said = one_line(path)
    assert f", byte {len(sections) - valid}: not valid UTF-8 (after {valid} valid bytes)" in said
    assert "iconv -t utf-8 -f gb18030" in said


def test_positions_are_row_numbers_in_parquet_and_line_numbers_in_csv(tmp_path):
    documents = [f"document {i}" for i in range(3 * corpus.BATCH_ROWS + 5)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": documents}), path, row_group_size=100)
    assert texts(path) == documents
    rows = range(1, len(documents) + 1)
    assert [record.place for record in records(path)] == [f"{path}, row {n}" for n in rows]

    def located(path: Path) -> list[tuple[str, str]]:
        return [(r.place.removeprefix(f"{path}, "), parse(r)) for r in records(path)]

    path = write(tmp_path / "b.csv", f'{BOM}text,id\r\n"one\n\nmore",1\r\n\r\ntwo,2\r\n'.encode())
    assert located(path) == [("line 4", "one\n\nmore"), ("line 6", "two")]
    # Excel may name the delimiter in the first line.
    write(path, f"{BOM}sep=;\r\nid;text\r\n1;a, b, c\r\n2;d|e,f|g\r\n".encode())
    assert located(path) == [("line 3", "a, b, c"), ("line 4", "d|e,f|g")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("start", ["", BOM])
def test_the_header_of_a_csv_shows_its_delimiter(tmp_path, delimiter, start):
    rows = [["id", "text"], *([str(i), text] for i, text in enumerate(DOCUMENTS))]
    path = tmp_path / "a.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write(start)
        csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
    assert texts(path) == DOCUMENTS


def test_in_a_csv_of_one_column_every_delimiter_is_text_and_a_malformed_row_is_bad(tmp_path):
    path = write(tmp_path / "a.csv", b'text\na, b; c | d\n"a"b\n"e, ""f"""\n')
    first, bad, last = records(path)
    assert (parse(first), parse(last)) == ("a, b; c | d", 'e, "f"')
    assert "cannot be read: the line's end expected after '\"'" in bad.fault


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name):
    documents = [f"{i} {random.Random(i).random()}" for i in range(2000)]
    content = {"text": documents} if name == "a.parquet" else jsonl(*documents)
    path = write(tmp_path / name, content)
    data = path.read_bytes()
    for share in (0.0005, 0.3, 0.9999):
        path.write_bytes(data[: int(share * len(data))])
        assert "cannot be read: " in one_line(path)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_missing_package_is_an_error_with_the_command_to_install_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / name).write_bytes(b"anything")
    assert "python -m pip install pyarrow" in one_line(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl.zst", "a.json"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    """The 25 MB of text are a single row group in the Parquet file."""
    path, dice = tmp_path / name, random.Random(0)
    documents = [dice.randbytes(5000).hex() for _ in range(2500)]
    if name == "a.parquet":
        table = pa.table({"text": documents})
        pq.write_table(table, path, compression="none", use_dictionary=False)
    else:
        rows = [["text"], *([text] for text in documents)]
        array = json.dumps([{"text": text} for text in documents]).encode()
        write(path, {"a.csv": rows, "a.json": array}.get(name, jsonl(*documents)))
    before, most, unread = pa.total_allocated_bytes(), 0, len(documents)
    tracemalloc.start()
    for record in read_records([str(path)]):
        unread -= len(record.raw) >= 10_000
        most = max(most, pa.total_allocated_bytes() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert unread == 0
    assert max(most, peak) < 14_000_000


LONG_TEXTS = {
    "lines of different lengths": "".join("aé第😀"[n % 4] * n + "\r\n" for n in range(250)),
    "one line of four-byte characters, shifted": "a" + "😀" * 100_000,
    "a line end after a full section": "a" * SECTION_BYTES + "\né",
    "exactly one section": "a" * SECTION_BYTES,
    "a long second line that begins with a byte order mark": "\n" + BOM + "a" * 200_000,
}


@pytest.mark.parametrize("most", [SECTION_BYTES, 1 << 10])
@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_the_joined_sections_of_a_long_text_are_exactly_the_text(tmp_path, text, most):
    path = write(tmp_path / "long.txt", text.encode())
    found = list(read_records([str(path)], section_bytes=most))
    assert "".join(map(parse, found)) == text  # no character was split
    offset = 0
    for record in found:
        assert record.place == f"{path}, byte {offset}"
        assert len(record.raw) <= most
        offset += len(record.raw)
    if text == LONG_TEXTS["lines of different lengths"]:
        assert all(record.raw.endswith(b"\n") for record in found)
    assert (len(found) == 1) == (len(text.encode()) <= most)


def test_the_builtin_corpus_is_python_source_code_without_tests():
    files = find_files("builtin")
    assert all(path.endswith(".py") for path in files)
    folders = {folder for path in files for folder in Path(path).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    text = "".join(texts("builtin"))
    assert len(text) > 1_000_000
    assert text.count("\ndef ") > 1000
