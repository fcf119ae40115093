import copy
import dataclasses
import json
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine.deepspeed_config import (
    AUTO_DEFAULTS,
    BY_WIDTH,
    fill_by_width,
    offload_device,
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


def test_without_an_optimizer_section_none_is_added():
    assert "optimizer" not in resolved({"zero_optimization": {"stage": 2}})


@pytest.mark.parametrize(
    ("key", "in_file", "flag", "by_flags"),
    [
        ("train_micro_batch_size_per_gpu", 8, "--batch_size", "4"),
        ("gradient_accumulation_steps", 1, "--accumulation_steps", "3"),
        ("train_batch_size", 32, "--batch_size × --accumulation_steps × processes", "24"),
        ("gradient_clipping", 1.0, "--grad_clip", "0.7"),
        ("bf16.enabled", False, "--dtype bfloat16", "true"),
        ("fp16.enabled", True, "--dtype bfloat16", "false"),
        ("optimizer.params.lr", 0.001, "--learning_rate", "0.0002"),
        ("optimizer.params.weight_decay", 0.1, "--weight_decay", "0.05"),
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
    config = resolved(config)
    fill_by_width(config, dim=64)
    assert config["zero_optimization"].items() >= AUTO_DEFAULTS.items()
    by_width = {
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    assert config["zero_optimization"].items() >= by_width.items()
    before = copy.deepcopy(config)
    fill_by_width(config, dim=128)
    assert config == before


def test_a_process_that_is_alone_overlaps_nothing(config):
    assert resolve(config, ARGS, 1, "my.json")["zero_optimization"]["overlap_comm"] is False
    assert resolved(config)["zero_optimization"]["overlap_comm"] is True


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("zero_optimization.overlap_com", True, "overlap_com"),
        ("zero_optimization.reduce_bucket_size", "many", "reduce_bucket_size"),
        ("zero_optimization.stage3_prefetch_bucket_size", "auto", "only at 3"),
        ("zero_optimization.stage", 0, "must be 1, 2 or 3, not 0"),
        ("zero_optimization.stage", "2", "must be 1, 2 or 3, not '2'"),
        ("bf16.check_grad_overflow", False, "NaN"),
        ("bf16", [1], '"bf16" must be a section'),
        ("optimizer.params", None, '"params" must be a section'),
        ("optimizer.type", "Lion", "Adam or AdamW"),
        ("steps_per_print", "auto", '"steps_per_print": "auto"'),
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


@pytest.mark.parametrize(
    ("section", "device"),
    [
        ({}, None),
        ({"offload_optimizer": None}, None),
        ({"offload_optimizer": {"device": "none"}}, None),
        ({"offload_optimizer": {"device": "nvme"}}, "nvme"),
    ],
)
def test_where_the_optimizer_is_kept(section, device):
    assert offload_device({"zero_optimization": section}, "optimizer") == device
    assert offload_device({"zero_optimization": section}, "param") is None
    assert offload_device(None, "optimizer") is None


MUON = dataclasses.replace(ARGS, optimizer="muon")


def test_muon_under_zero_3_is_refused(config):
    message = refused(put(config, "zero_optimization.stage", 3), MUON)
    assert "--optimizer muon" in message
    assert '"stage": 2' in message


def test_muon_takes_the_place_of_the_files_optimizer(config):
    done = resolved(config, MUON)
    assert "optimizer" not in done
    assert done["zero_allow_untested_optimizer"] is True
    del config["optimizer"]
    assert resolved(config, MUON) == done
    assert "zero_allow_untested_optimizer" not in resolved(config)


@pytest.mark.parametrize(
    ("key", "value"), [("offload_optimizer", {"device": "cpu"}), ("cpu_offload", True)]
)
def test_muon_is_not_offloaded(config, key, value):
    message = refused(put(config, f"zero_optimization.{key}", value), MUON)
    assert "--optimizer muon cannot be offloaded" in message


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH with nothing but the tools named."""

    def only(*names: str) -> None:
        for name in names:
            (tmp_path / name).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    only()
    return only


@pytest.fixture
def own_adam(config) -> dict:
    del config["optimizer"]["params"]["torch_adam"], config["optimizer"]["params"]["fused"]
    return config


@pytest.mark.parametrize(
    ("has_gpu", "compiler", "there", "missing"),
    [
        (False, "c++", [], "ninja and c++"),
        (False, "c++", ["ninja"], "c++"),
        (False, "c++", ["c++"], "ninja"),
        (True, "nvcc", [], "ninja and nvcc"),
        (True, "nvcc", ["ninja"], "nvcc"),
    ],
)
def test_deepspeeds_own_adam_is_refused_without_a_compiler(
    own_adam, tools, monkeypatch, has_gpu, compiler, there, missing
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    tools(*there)
    message = refused(own_adam)
    assert f"compiled with {missing}," in message
    assert '"torch_adam": true' in message
    tools("ninja", compiler)
    resolved(own_adam)


@pytest.mark.parametrize("has_section", [True, False])
def test_offloaded_without_a_compiler_pytorchs_adam_takes_the_place_of_deepspeeds(
    own_adam, tools, has_section
):
    own_adam["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if not has_section:
        del own_adam["optimizer"]
    config = resolved(own_adam)
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert "optimizer" not in config or config["optimizer"]["params"]["torch_adam"] is True
    tools("ninja", "c++")
    config = resolved(own_adam)
    assert "zero_force_ds_cpu_optimizer" not in config
    assert "optimizer" not in config or "torch_adam" not in config["optimizer"]["params"]


@pytest.mark.parametrize("what", ["optimizer", "param"])
@pytest.mark.parametrize(
    ("there", "missing"), [([], "ninja and c++"), (["ninja", "c++"], "libaio (apt-get")]
)
def test_nvme_without_what_it_is_compiled_with_is_refused(
    config, tools, monkeypatch, what, there, missing
):
    from deepspeed.ops import op_builder

    def libaio(is_there: bool) -> None:
        builder = SimpleNamespace(is_compatible=lambda: is_there)
        monkeypatch.setattr(op_builder, "AsyncIOBuilder", lambda: builder)

    libaio(False)
    tools(*there)
    nvme = {"device": "nvme", "nvme_path": "out/nvme"}
    config["zero_optimization"] |= {"stage": 3, f"offload_{what}": nvme}
    assert missing in refused(config)
    libaio(True)
    tools("ninja", "c++")
    resolved(config)
    del nvme["nvme_path"]
    assert "nvme_path" in refused(config)


def test_no_compiler_is_needed_for_pytorchs_adamw_nor_for_muon(config, own_adam, tools):
    resolved(own_adam, MUON)
    own_adam["optimizer"]["params"]["torch_adam"] = False
    assert "torch_adam" in refused(own_adam)
    own_adam["optimizer"]["params"]["torch_adam"] = True
    resolved(own_adam)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[]", "zero_optimization"),
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


def damaged_value(dice: random.Random):
    return dice.choice(
        [None, True, -1, 0, 1.5, 10**30, "auto", "", "x", [], [0.9], {}, {"a": 1}, "NaN"]
    )


def damage(value, dice: random.Random):
    """A copy of a JSON value with one thing in it gone, replaced or moved."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(sorted(value))
        kind = dice.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.3:
            return value | {dice.choice(["zzz", "stage", "type", key + "_"]): damaged_value(dice)}
        return value | {key: damage(value[key], dice)}
    return damaged_value(dice)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_damaged_configurations_are_refused_in_words_or_resolved(config, optimizer):
    """Never another error, and nothing "auto" that is left over."""
    dice, messages = random.Random(0), []
    for _ in range(400):
        damaged = damage(damage(config, dice), dice)
        if not isinstance(damaged, dict) or not isinstance(damaged.get("zero_optimization"), dict):
            continue  # read_config refuses it
        try:
            done = resolve(damaged, TrainingArguments(optimizer=optimizer), 2, "ds.json")
        except UsageError as error:
            messages.append(str(error))
        else:
            fill_by_width(done, dim=64)
            assert '"auto"' not in json.dumps(done)
    assert 100 < len(messages) < 400
    assert not any("\n" in message for message in messages)


def test_deepspeeds_throughput_timer_which_waits_for_the_gpu_is_off_unless_asked_for(config):
    assert resolved(config)["timers"] == {"throughput": {"enabled": False}}
    asked = {"throughput": {"enabled": True, "synchronized": False}}
    assert resolved(config | {"timers": asked})["timers"] == asked
