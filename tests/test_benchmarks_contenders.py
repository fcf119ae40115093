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
    everybody = all_contenders(2, has_gpu=False)
    assert len(set(names_of(everybody))) == len(everybody) == 24
    assert names_of(select(everybody, "litgpt-eager+allocator, ours-zero2-compiled")) == [
        "ours-zero2-compiled",
        "litgpt-eager+allocator",
    ]
    assert {c.family for c in select(everybody, "peers")} == {"transformers", "litgpt"}
    assert {c.compiled for c in select(everybody, "compiled")} == {True}
    experiments = ("+fused", "+blocks", "+selective")
    all_but_experiments = [name for name in names_of(everybody) if not name.endswith(experiments)]
    assert names_of(select(everybody, "all")) == all_but_experiments
    assert len(all_but_experiments) == 18
    assert names_of(select(everybody, "ours-compiled+fused")) == ["ours-compiled+fused"]
    assert [(c.compiled, c.recompute) for c in select(everybody, "recompute")] == [
        *((False, "blocks"), (False, "selective"), (True, "blocks"), (True, "selective"))
    ]
    with pytest.raises(UsageError, match=r"'nanogpt' is none of all, compiled, eager, .*zero2"):
        select(everybody, "nanogpt")


def test_a_gpu_has_no_allocator_variants():
    assert not [name for name in names_of(all_contenders(1, has_gpu=True)) if "allocator" in name]


def test_a_single_process_exchanges_nothing_with_others():
    names = names_of(all_contenders(1, has_gpu=False))
    assert not [name for name in names if "ddp" in name or "alone" in name]
    assert "ours-zero2-compiled" in names


def test_a_peer_that_is_not_installed_is_told_how_to_come(monkeypatch):
    monkeypatch.setattr(contenders, "find_spec", lambda name: None)
    assert "pip install --no-deps -r" in obstacle(Contender("litgpt", False))
    assert obstacle(OURS_COMPILED) is None


def test_ranks_get_what_a_launcher_would_set(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("WORLD_SIZE", "8")
    zero1 = Contender("ours", False, "zero1", processes=2)
    first, second = environments(zero1, 1234, tmp_path, fresh_compile=True)
    assert [first["RANK"], second["RANK"], second["LOCAL_RANK"]] == ["0", "1", "1"]
    assert (first["WORLD_SIZE"], first["MASTER_PORT"]) == ("2", "1234")
    assert "ACCELERATE_USE_CPU" not in first
    config = json.loads(Path(first["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
    assert config["zero_optimization"]["stage"] == 1
    assert first["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    (single,) = environments(OURS, 1234, tmp_path, fresh_compile=False)
    assert not {"RANK", "WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED"} & set(single)
    assert single.get("TORCHINDUCTOR_CACHE_DIR") == os.environ.get("TORCHINDUCTOR_CACHE_DIR")


def test_who_is_alone_has_its_share_of_the_cores_and_knows_of_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(contenders, "available_cores", lambda: 8)
    alone = Contender("ours", False, "alone", processes=2)
    ranks = environments(alone, 1234, tmp_path, fresh_compile=False)
    assert [rank["OMP_NUM_THREADS"] for rank in ranks] == ["4", "4"]
    assert not {"RANK", "WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED"} & set(ranks[1])
