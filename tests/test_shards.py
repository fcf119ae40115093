import hashlib
import json
import shutil

import numpy as np
import pytest

from lm.common.errors import UsageError
from lm.data.shards import ShardWriter, read_description, token_dtype


@pytest.mark.parametrize(
    ("vocab_size", "expected"),
    [
        (65_535, bytes([1, 0, 0xE8, 3, 2, 0])),
        (65_536, bytes([1, 0, 0, 0, 0xE8, 3, 0, 0, 2, 0, 0, 0])),
    ],
)
def test_a_shard_is_little_endian_integers_and_nothing_else(tmp_path, vocab_size, expected):
    writer = ShardWriter(tmp_path, "train", token_dtype(vocab_size), 100)
    writer.write(np.array([1, 1000, 2]), 5)
    (shard,) = writer.close()["shards"]
    assert (tmp_path / "train-00000.bin").read_bytes() == expected
    sha256 = hashlib.sha256(expected).hexdigest()
    assert shard == {"file": "train-00000.bin", "tokens": 3, "sha256": sha256}


def test_a_new_shard_begins_after_the_document_that_reaches_the_limit(tmp_path):
    writer = ShardWriter(tmp_path, "val", token_dtype(300), 5)
    for length in (3, 3, 5, 1, 1):
        writer.write(np.arange(length), 10 * length)
    part = writer.close()
    assert [shard["tokens"] for shard in part["shards"]] == [6, 5, 2]
    assert (part["documents"], part["tokens"], part["bytes"]) == (5, 13, 130)


def test_a_path_without_data_is_refused_with_the_command_that_prepares_data(tmp_path):
    with pytest.raises(UsageError, match=rf"prepare_data --data FILE --out {tmp_path}`"):
        read_description(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(UsageError, match=rf"prepare_data --data {tmp_path}/a.txt`"):
        read_description(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda d: d.update(format=2), "a format that"),
        (lambda d: d.update(kind="pictures"), "a format that"),
        (lambda d: d.update(dtype=">u2"), "a format that"),
        (lambda d: d["splits"].pop("val"), "KeyError: 'val'"),
        (lambda d: d["splits"]["val"]["shards"][0].update(file="x.bin"), "No such file.*x.bin"),
        (lambda d: d["splits"]["val"]["shards"][0].update(tokens=7), "has .* bytes, not 14"),
    ],
)
def test_a_damaged_description_is_refused_with_the_reason(packed, tmp_path, edit, expected):
    copied = shutil.copytree(packed, tmp_path / "copy")
    path = copied / "dataset.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    assert read_description(copied) == description
    edit(description)
    path.write_text(json.dumps(description), encoding="utf-8")
    with pytest.raises(UsageError, match=f"{path}: damaged .*{expected}.*prepare the data again"):
        read_description(copied)
    for text in (b"", b"[]", b"\xff", b"{}", b"[" * 100_000):
        path.write_bytes(text)
        with pytest.raises(UsageError, match=f"{path}: damaged"):
            read_description(copied)
