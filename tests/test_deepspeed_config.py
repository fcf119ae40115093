import copy
import dataclasses
import json

import pytest
from conftest import REPOSITORY

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine.deepspeed_config import (
    AUTO_DEFAULTS,
    BY_WIDTH,
    fill_by_width,
    read_config,
    resolve,
)

ARGS = TrainingArguments(
    batch_size=4,
    accumulation_steps=3,
    learning_rate=2e-4,
    weight_decay=0.05,
    grad_clip=0.7,
    beta1=0.8,
    beta2=0.97,
)
WORLD_SIZE = 2


@pytest.fixture
def config() -> dict:
    """The repository's own file."""
    return json.loads((REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))


def resolved(config: dict, args: TrainingArguments = ARGS) -> dict:
    return resolve(config, args, WORLD_SIZE, "my.json")


def refused(config: dict, args: TrainingArguments = ARGS) -> str:
    with pytest.raises(UsageError) as error:
        resolved(config, args)
    assert "my.json" in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def put(config: dict, key: str, value) -> dict:
    config = copy.deepcopy(config)
    *parents, name = key.split(".")
    section = config
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = value
    return config


def get(config: dict, key: str):
    for name in key.split("."):
        config = config[name]
    return config


FILLED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "train_batch_size": 24,
    "gradient_clipping": 0.7,
    "bf16.enabled": True,
    "fp16.enabled": False,
    "optimizer.params.lr": 2e-4,
    "optimizer.params.weight_decay": 0.05,
    "optimizer.params.betas": [0.8, 0.97],
    "optimizer.params.eps": 1e-8,
}


def test_flags_fill_every_auto_and_what_is_missing(config):
    before, missing = copy.deepcopy(config), copy.deepcopy(config)
    for key in FILLED:
        *parents, name = key.split(".")
        (get(missing, ".".join(parents)) if parents else missing).pop(name, None)
        config = put(config, key, "auto")
    for found in map(resolved, (before, missing, config)):
        assert {key: get(found, key) for key in FILLED} == FILLED
        assert '"auto"' not in json.dumps(found)
        assert resolved(found) == found  # numbers equal to the flags are accepted
    assert before == json.loads((REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("key", "in_file", "flag", "by_flags"),
    [
        ("gradient_accumulation_steps", 1, "--accumulation_steps", "3"),
        ("train_batch_size", 32, "--batch_size × --accumulation_steps × processes", "24"),
        ("gradient_clipping", 1.0, "--grad_clip", "0.7"),
        ("bf16.enabled", False, "--dtype bfloat16", "true"),
        ("optimizer.params.lr", 0.001, "--learning_rate", "0.0002"),
        ("optimizer.params.betas", [0.9, 0.999], "--beta1 --beta2", "[0.8, 0.97]"),
        ("optimizer.params.eps", 1e-6, "this script", "1e-08"),
    ],
)
def test_a_contradiction_names_key_flag_and_both_values(config, key, in_file, flag, by_flags):
    message = refused(put(config, key, in_file))
    for part in (key, json.dumps(in_file), flag, by_flags):
        assert part in message


@pytest.mark.parametrize(
    ("dtype", "bf16", "fp16"),
    [("bfloat16", True, False), ("float16", False, True), ("float32", False, False)],
)
def test_precision_is_what_the_flag_says(config, dtype, bf16, fp16):
    config = resolved(config, TrainingArguments(dtype=dtype))
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (bf16, fp16)


def test_autos_of_buckets_get_a_value_and_numbers_stay(config):
    zero = config["zero_optimization"]
    zero |= {"stage": 3} | dict.fromkeys((*BY_WIDTH, *AUTO_DEFAULTS), "auto")
    alone = resolve(config, ARGS, 1, "my.json")
    assert alone["zero_optimization"]["overlap_comm"] is False  # nothing to overlap with
    config = resolved(config)
    fill_by_width(config, dim=64)
    assert config["zero_optimization"].items() >= AUTO_DEFAULTS.items()
    by_width = {
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    assert config["zero_optimization"].items() >= by_width.items()


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("zero_optimization.reduce_bucket_size", "many", "reduce_bucket_size"),
        ("zero_optimization.stage3_prefetch_bucket_size", "auto", "only at 3"),
        ("zero_optimization.stage", 0, "must be 1, 2 or 3"),
        ("bf16.check_grad_overflow", False, "NaN"),
        ("optimizer.params", None, '"params" must be a section'),
        ("optimizer.type", "Lion", "Adam or AdamW"),
        ("aio.queue_depth", "auto", '"aio.queue_depth": "auto"'),
    ],
)
def test_what_cannot_work_is_refused_by_name(config, key, value, named):
    assert named in refused(put(config, key, value))


def test_all_contradictions_are_told_at_once(config):
    config = put(put(config, "gradient_clipping", 9), "optimizer.params.lr", 1)
    message = refused(put(config, "zero_optimization.stage3_max_live_parameters", 1))
    for part in ("gradient_clipping", "optimizer.params.lr", "stage3_max_live", '"auto" takes'):
        assert part in message


MUON = dataclasses.replace(ARGS, optimizer="muon")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("stage", 3, '"stage": 2'),
        ("offload_optimizer", {"device": "cpu"}, "--optimizer muon cannot be offloaded"),
    ],
)
def test_muon_is_refused_where_no_process_has_whole_matrices(config, key, value, named):
    assert named in refused(put(config, f"zero_optimization.{key}", value), MUON)


def test_muon_takes_the_place_of_the_files_optimizer(config):
    done = resolved(config, MUON)
    assert "optimizer" not in done
    assert done["zero_allow_untested_optimizer"] is True
    del config["optimizer"]
    assert resolved(config, MUON) == done
    assert "zero_allow_untested_optimizer" not in resolved(config)


@pytest.mark.parametrize("has_section", [True, False])
def test_offloaded_without_a_compiler_pytorchs_adam_takes_the_place_of_deepspeeds(
    config, has_section, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    del config["optimizer"]["params"]["torch_adam"], config["optimizer"]["params"]["fused"]
    if not has_section:
        del config["optimizer"]
    found = resolved(config)
    assert found["zero_force_ds_cpu_optimizer"] is False
    assert "optimizer" not in found or found["optimizer"]["params"]["torch_adam"] is True
    for tool in ("ninja", "c++", "nvcc"):
        (tmp_path / tool).touch(mode=0o755)
    found = resolved(config)
    assert "zero_force_ds_cpu_optimizer" not in found
    assert "optimizer" not in found or "torch_adam" not in found["optimizer"]["params"]


@pytest.mark.parametrize("what", ["optimizer", "param"])
def test_nvme_needs_a_folder(config, what):
    config["zero_optimization"] |= {"stage": 3, f"offload_{what}": {"device": "nvme"}}
    assert "nvme_path" in refused(config)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b'{"zero_optimization": 2}', "zero_optimization"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, says):
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as error:
        read_config(str(path))
    assert str(path) in str(error.value)
