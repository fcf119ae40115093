import gzip
import json
import random
from pathlib import Path

import pytest
import zstandard

from data.corpus import (
    SECTION_BYTES,
    find_files,
    parse,
    read_records,
    text_size,
)
from data.errors import DataError

BOM = "\ufeff"


def texts(source) -> list[str]:
    return [parse(record) for record in read_records(find_files(str(source)))]


def jsonl(*documents: str) -> bytes:
    return "".join(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents).encode()


COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress}


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(data))
    return path


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.jsonl", jsonl("one", "第二\n句", "three"), ["one", "第二\n句", "three"]),
        ("a.jsonl.gz", jsonl("one", "第二\n句", "three"), ["one", "第二\n句", "three"]),
        ("a.jsonl.zst", jsonl("one", "第二\n句", "three"), ["one", "第二\n句", "three"]),
        ("a.txt", "one\n第二句\r\n\tthree".encode(), ["one\n第二句\r\n\tthree"]),
        ("a.txt", b"", []),
        ("a.jsonl", b'\n \n{"text": ""}\r\n\t\n{"text": "two"}\n\n', ["", "two"]),
        ("a.jsonl", b'{"text": "no newline at the end"}', ["no newline at the end"]),
        ("a.jsonl", b'{"text": "\\ud83d\\ude00"}\n', ["😀"]),
        ("a.jsonl", '{"text": "a\u2028b\u0085c"}\n'.encode(), ["a\u2028b\u0085c"]),
    ],
)
def test_a_file_holds_these_documents(tmp_path, name, data, expected):
    assert texts(write(tmp_path / name, data)) == expected


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_byte_order_mark_at_the_start_is_not_part_of_the_text(tmp_path, name):
    inside = f"one{BOM}two"
    data = inside.encode() if name == "a.txt" else jsonl(inside, BOM + "three")
    expected = [inside] if name == "a.txt" else [inside, BOM + "three"]
    assert texts(write(tmp_path / name, BOM.encode() + data)) == expected


def test_a_folder_holds_all_files_below_it_in_sorted_order(tmp_path):
    write(tmp_path / "b" / "deep" / "er" / "x.jsonl", jsonl("third"))
    write(tmp_path / "a.txt", b"first")
    write(tmp_path / "b" / "a.jsonl.gz", jsonl("second"))
    write(tmp_path / "c.txt", b"fourth")
    write(tmp_path / "b" / "readme.md", b"not text of the corpus")
    write(tmp_path / "z.json", b"{}")
    (tmp_path / "folder.txt").mkdir()
    assert texts(tmp_path) == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize("name", ["a.md", "a.zst", "a.txt.gz", "txt", "a.jsonl.bz2"])
def test_another_kind_of_file_is_refused_with_the_kinds_that_are_read(tmp_path, name):
    path = write(tmp_path / name, b"text")
    for place in (path, path.parent):
        with pytest.raises(DataError, match=rf"{place}.*\.txt, \.jsonl, \.jsonl\.gz"):
            find_files(str(place))


BAD_LINES = {
    "no JSON": (b"{text: 1}", "not JSON"),
    "deep nesting": (b"[" * 100_000, "not JSON"),
    "an enormous number": (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON"),
    "no text": (b'{"content": "a"}', 'no "text" with a string in it'),
    "text is a list": (b'{"text": ["a"]}', '"text"'),
    "invalid UTF-8": (b'{"text": "a\xff"}', "not valid UTF-8"),
    "lone surrogate": (b'{"text": "a\\ud800b"}', "surrogate"),
}


@pytest.mark.parametrize(("line", "what"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_an_error_with_file_line_and_reason(tmp_path, line, what):
    path = write(tmp_path / "a.jsonl", jsonl("good") + b"\n" + line + b"\n" + jsonl("good"))
    first, bad, last = read_records([str(path)])
    assert parse(first) == parse(last) == "good"
    with pytest.raises(DataError) as error:
        parse(bad)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert what in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_utf8_have_their_place(tmp_path):
    sections = b"\xef\xbb\xbf" + b"0123456\n" * (2 * SECTION_BYTES // 8)
    path = write(tmp_path / "a.txt", sections + "春眠".encode("gb18030"))
    *_, last = read_records([str(path)])
    with pytest.raises(DataError) as error:
        parse(last)
    n = len(sections) - last.position
    assert f"{path}, byte {last.position}: not valid UTF-8" in str(error.value)
    assert f"{n} bytes further" in str(error.value)
    assert "iconv -f gb18030" in str(error.value)


def test_a_gzip_file_cut_short_is_an_error_with_its_name(tmp_path):
    data = gzip.compress(jsonl(*(f"{i} {random.Random(i).random()}" for i in range(2000))))
    path = tmp_path / "a.jsonl.gz"
    for share in (0.0005, 0.3, 0.9999):
        path.write_bytes(data[: int(share * len(data))])
        with pytest.raises(DataError, match=rf"^{path}: cannot be read"):
            texts(path)


def uneven_lines() -> str:
    chooser = random.Random(0)
    words = [chooser.choice(["é", "第", "😀", "a"]) * chooser.randint(1, 30_000) for _ in range(60)]
    return "".join(word + chooser.choice(["\n", "\r\n", " ", "\n\n"]) for word in words)


LONG_TEXTS = {
    "whole blocks of short lines": ("x" * 63 + "\n") * (8 * SECTION_BYTES // 64),
    "one line of three-byte characters": "第" * 100_000,
    "one line of four-byte characters, shifted": "a" + "😀" * 100_000,
    "one line that ends a byte too late": "a" * SECTION_BYTES + "é",
    "exactly one section": "a" * SECTION_BYTES,
    "uneven lines": uneven_lines(),
    "a short first line and one long": "\n" + BOM + "a" * 200_000,
}


@pytest.mark.parametrize("most", [SECTION_BYTES, 1 << 10])
@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_sections_of_a_long_text_rejoin_to_it_exactly(tmp_path, text, most):
    path = write(tmp_path / "long.txt", text.encode())
    records = list(read_records([str(path)], section_bytes=most))
    assert b"".join(record.raw for record in records) == text.encode()
    assert "".join(map(parse, records)) == text  # so no character is split either
    offset = 0
    for record in records:
        assert record.position == offset
        assert len(record.raw) <= most
        offset += len(record.raw)
    if text == LONG_TEXTS["whole blocks of short lines"]:
        assert all(record.raw.endswith(b"\n") for record in records)
    assert (len(records) == 1) == (len(text.encode()) <= most)


def test_the_size_of_a_text_is_that_of_its_files_and_four_times_that_of_compressed_ones(tmp_path):
    plain = str(write(tmp_path / "a.jsonl", b"x" * 300))
    packed = tmp_path / "a.jsonl.zst"
    packed.write_bytes(b"x" * 100)
    assert text_size([plain, str(packed)]) == 300 + 4 * 100


def test_the_builtin_corpus_is_sound_source_code_without_tests():
    files = find_files("builtin")
    assert files == find_files("builtin")
    assert all(path.endswith(".py") for path in files)
    folders = {folder for path in files for folder in Path(path).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    text = "".join(texts("builtin"))
    assert len(text) > 1_000_000
    assert text.count("\ndef ") > 1000
