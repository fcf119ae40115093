import hashlib
import json
import shutil

import numpy as np
import pytest

from lm.common.errors import UsageError
from lm.data.shards import ShardWriter, read_description


@pytest.mark.parametrize(("vocab_size", "size"), [(65_535, 2), (65_536, 4)])
def test_a_shard_is_little_endian_integers_up_to_the_document_that_reaches_the_limit(
    tmp_path, vocab_size, size
):
    writer = ShardWriter(tmp_path, "val", vocab_size, 5)
    for first, length in ((1000, 3), (1, 3), (2, 5), (0, 1), (0, 1)):
        writer.write(np.arange(first, first + length), 10 * length)
    part = writer.close()
    assert (part["documents"], part["tokens"], part["bytes"]) == (5, 13, 130)
    for i, ids in enumerate([[1000, 1001, 1002, 1, 2, 3], [2, 3, 4, 5, 6], [0, 0]]):
        content = b"".join(id.to_bytes(size, "little") for id in ids)
        assert (tmp_path / f"val-0000{i}.bin").read_bytes() == content
        sha256 = hashlib.sha256(content).hexdigest()
        expected = {"file": f"val-0000{i}.bin", "tokens": len(ids), "sha256": sha256}
        assert part["shards"][i] == expected
    assert len(part["shards"]) == 3


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
