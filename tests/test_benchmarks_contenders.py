import json
import os
from pathlib import Path

import pytest

from benchmarks import contenders
from benchmarks.contenders import Contender, all_contenders, environments, obstacle, select
from common.errors import UsageError

OURS, OURS_COMPILED = Contender("ours", False), Contender("ours", True)
LLAMA, LLAMA_COMPILED = Contender("transformers", False), Contender("transformers", True)


def names_of(found):
    return [contender.name for contender in found]


def test_contenders_are_chosen_by_name_and_by_group():
    everybody = all_contenders(2, has_gpu=False, allocator="both")
    assert len(set(names_of(everybody))) == len(everybody) == 18
    assert names_of(select(everybody, ["litgpt-eager+allocator", "ours-zero2-compiled"])) == [
        "ours-zero2-compiled",
        "litgpt-eager+allocator",
    ]
    assert {c.family for c in select(everybody, ["peers"])} == {"transformers", "litgpt"}
    assert {c.compiled for c in select(everybody, ["compiled"])} == {True}
    assert len(select(everybody, ["all"])) == len(everybody)
    with pytest.raises(UsageError, match=r"'nanogpt' is none of all, alone, compiled, .*zero2"):
        select(everybody, ["nanogpt"])


def test_a_gpu_has_no_allocator_variants():
    on_gpu = all_contenders(1, has_gpu=True, allocator="both")
    assert not [name for name in names_of(on_gpu) if "allocator" in name]
    only = all_contenders(1, has_gpu=False, allocator="ours")
    assert all("+allocator" in name for name in names_of(only) if not name.startswith("ours"))


def test_what_cannot_run_says_why_in_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert "C++ compiler" in obstacle(LLAMA_COMPILED, 0)
    assert obstacle(LLAMA, 0) is None
    monkeypatch.setattr(contenders, "find_spec", lambda name: None)
    assert "pip install --no-deps -r" in obstacle(Contender("litgpt", False), 0)
    monkeypatch.setattr(contenders, "can_compile", lambda: False)
    assert "no --compile" in obstacle(OURS_COMPILED, 0)
    assert "--processes 2" in obstacle(Contender("ours", False, "ddp"), 0)
    assert obstacle(Contender("ours", False, "zero2"), 0) is None
    assert "4 processes for 2 GPUs" in obstacle(Contender("ours", False, "zero2", processes=4), 2)


def test_ranks_get_what_a_launcher_would_set(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    zero1 = Contender("ours", False, "zero1", processes=2)
    first, second = environments(zero1, 1234, tmp_path, fresh=True)
    assert [first["RANK"], second["RANK"], second["LOCAL_RANK"]] == ["0", "1", "1"]
    assert (first["WORLD_SIZE"], first["MASTER_PORT"]) == ("2", "1234")
    assert "ACCELERATE_USE_CPU" not in first
    config = json.loads(Path(first["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
    assert config["zero_optimization"]["stage"] == 1
    assert first["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    alone = environments(
        Contender("ours", False, "alone", processes=2), 1234, tmp_path, fresh=False
    )
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in alone] == ["0", "1"]
    assert not {"RANK", "WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED"} & set(alone[1])
    (single,) = environments(OURS, 1234, tmp_path, fresh=False)
    assert not {"RANK", "WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED"} & set(single)
    assert single.get("TORCHINDUCTOR_CACHE_DIR") == os.environ.get("TORCHINDUCTOR_CACHE_DIR")
