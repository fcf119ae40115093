import hashlib
import json
import shutil

import numpy as np
import pytest

from data.errors import DataError
from data.shards import ShardWriter, read_description, token_dtype


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "<u2"), (6400, "<u2"), (65_535, "<u2"), (65_536, "<u4"), (250_000, "<u4")],
)
def test_tokens_take_two_bytes_while_every_id_fits_and_four_beyond(vocab_size, dtype):
    assert token_dtype(vocab_size).str == dtype
    assert vocab_size - 1 <= np.iinfo(token_dtype(vocab_size)).max


@pytest.mark.parametrize(
    ("vocab_size", "expected"),
    [
        (6400, bytes([1, 0, 0xE8, 3, 2, 0])),
        (70_000, bytes([1, 0, 0, 0, 0xE8, 3, 0, 0, 2, 0, 0, 0])),
    ],
)
def test_a_shard_is_little_endian_integers_and_nothing_else(tmp_path, vocab_size, expected):
    writer = ShardWriter(tmp_path, "train", token_dtype(vocab_size), 100)
    writer.write(np.array([1, 1000, 2]), 5)
    (shard,) = writer.close()["shards"]
    assert (tmp_path / shard["file"]).read_bytes() == expected
    assert shard == {
        "file": "train-00000.bin",
        "tokens": 3,
        "sha256": hashlib.sha256(expected).hexdigest(),
    }


def test_a_new_shard_begins_with_the_document_after_the_limit(tmp_path):
    writer = ShardWriter(tmp_path, "val", token_dtype(300), 5)
    for length in (3, 3, 5, 1, 1):
        writer.write(np.arange(length), 10 * length)
    part = writer.close()
    assert [shard["tokens"] for shard in part["shards"]] == [6, 5, 2]
    assert (part["documents"], part["tokens"], part["bytes"]) == (5, 13, 130)
    stored = [np.fromfile(tmp_path / shard["file"], "<u2") for shard in part["shards"]]
    expected = [np.arange(length) for length in (3, 3, 5, 1, 1)]
    assert np.array_equal(np.concatenate(stored), np.concatenate(expected))


def test_a_split_without_documents_has_no_shards(tmp_path):
    part = ShardWriter(tmp_path, "val", token_dtype(300), 5).close()
    assert part == {"documents": 0, "bytes": 0, "tokens": 0, "shards": []}
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def copied(packed, tmp_path):
    return shutil.copytree(packed, tmp_path / "copy")


def change(folder, edit) -> None:
    path = folder / "dataset.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    edit(description)
    path.write_text(json.dumps(description), encoding="utf-8")


def test_a_sound_folder_is_described_as_it_says(packed):
    description = read_description(packed)
    assert description == json.loads((packed / "dataset.json").read_text(encoding="utf-8"))


def test_a_folder_without_description_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(DataError, match=rf"prepare_data --data TEXT --out {tmp_path}"):
        read_description(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b'"x"', b"\xff", b"[" * 100_000])
def test_a_description_that_is_none_is_refused_by_name(copied, text):
    (copied / "dataset.json").write_bytes(text)
    with pytest.raises(DataError, match=str(copied / "dataset.json")):
        read_description(copied)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda d: d.update(format=2), "format 2, this version reads format 1"),
        (lambda d: d.update(vocab_size=0), "vocab_size is 0"),
        (lambda d: d.update(vocab_size="400"), "vocab_size is '400'"),
        (lambda d: d.update(vocab_size=70_000), "dtype '<u2' does not suit the vocabulary"),
        (lambda d: d.update(dtype=">u2"), "dtype '>u2' does not suit the vocabulary"),
        (lambda d: d.update(dtype=",u2"), "dtype"),
        (lambda d: d.update(dtype={}), "dtype"),
        (lambda d: d["splits"].pop("val"), "KeyError: 'val'"),
        (lambda d: d["splits"]["train"].update(tokens=7), "train shards hold .* not what it says"),
        (lambda d: d["splits"]["val"]["shards"].clear(), "val shards hold 0 tokens"),
        (lambda d: d["splits"]["val"].update(bytes="many"), "bytes"),
        (lambda d: d["splits"]["val"]["shards"][0].update(tokens=-1), "described as -1 items"),
        (lambda d: d["splits"]["val"]["shards"][0].update(file="x.bin"), "x.bin.* is missing"),
        (lambda d: d["splits"]["val"]["shards"][0].update(file="a\0b"), r"dataset\.json"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused_with_what_is_wrong(copied, edit, expected):
    change(copied, edit)
    with pytest.raises(DataError, match=expected):
        read_description(copied)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_missing_shard_is_refused_by_name(copied, split):
    (copied / f"{split}-00000.bin").unlink()
    with pytest.raises(DataError, match=rf"{split}-00000\.bin: this token shard is missing"):
        read_description(copied)


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_truncated_shard_is_refused_with_both_sizes(copied, cut):
    path = copied / "train-00000.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=f"{size - cut} bytes long, but .* take {size}"):
        read_description(copied)


def test_a_shard_of_another_folder_is_refused(copied):
    shutil.copy(copied / "train-00000.bin", copied / "val-00000.bin")
    with pytest.raises(DataError, match=r"val-00000\.bin: .* cut short or foreign"):
        read_description(copied)
