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


def all_values(config) -> list:
    if isinstance(config, dict):
        return [value for section in config.values() for value in all_values(section)]
    if isinstance(config, list):
        return [value for item in config for value in all_values(item)]
    return [config]


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


def test_the_repositorys_file_keeps_no_auto(config):
    assert "auto" in all_values(config)
    assert "auto" not in all_values(resolved(config))


@pytest.mark.parametrize(("key", "value"), FILLED.items())
def test_flags_fill_every_auto(config, key, value):
    assert get(resolved(put(config, key, "auto")), key) == value


@pytest.mark.parametrize(("key", "value"), FILLED.items())
def test_flags_fill_what_is_missing(config, key, value):
    *parents, name = key.split(".")
    del (get(config, ".".join(parents)) if parents else config)[name]
    assert get(resolved(config), key) == value


def test_missing_sections_are_filled(config):
    assert all(
        get(resolved({"zero_optimization": {"stage": 2}}), key) == FILLED[key]
        for key in FILLED
        if not key.startswith("optimizer")
    )


@pytest.mark.parametrize(("key", "value"), FILLED.items())
def test_a_number_equal_to_the_flags_is_accepted(config, key, value):
    assert get(resolved(put(config, key, value)), key) == value


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


@pytest.mark.parametrize("grad_clip", [0.0, 0.1, 1.0])
def test_clipping_is_what_the_flag_says(config, grad_clip):
    args = TrainingArguments(grad_clip=grad_clip)
    assert resolved(config, args)["gradient_clipping"] == grad_clip


@pytest.mark.parametrize(
    ("dtype", "bf16", "fp16"),
    [("bfloat16", True, False), ("float16", False, True), ("float32", False, False)],
)
def test_precision_is_what_the_flag_says(config, dtype, bf16, fp16):
    config = resolved(config, TrainingArguments(dtype=dtype))
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (bf16, fp16)


OF_ANY_STAGE = [key for key in AUTO_DEFAULTS if "stage3" not in key]


@pytest.mark.parametrize("key", OF_ANY_STAGE)
def test_autos_of_trainer_files_get_a_value(config, key):
    assert get(resolved(put(config, key, "auto")), key) == AUTO_DEFAULTS[key]


@pytest.mark.parametrize("key", [*OF_ANY_STAGE, "zero_optimization.reduce_bucket_size"])
def test_a_bucket_that_was_set_stays(config, key):
    value = False if key.endswith("overlap_comm") else 12345
    config = resolved(put(config, key, value))
    fill_by_width(config, dim=64)
    assert get(config, key) == value


def test_the_width_of_the_model_fills_the_other_buckets():
    config = {"zero_optimization": dict.fromkeys(BY_WIDTH, "auto")}
    fill_by_width(config, dim=64)
    assert config["zero_optimization"] == {
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }


@pytest.mark.parametrize("value", [True, False, "auto", None])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_process_that_is_alone_overlaps_nothing(config, value, stage):
    config = put(
        put(config, "zero_optimization.overlap_comm", value), "zero_optimization.stage", stage
    )
    alone = resolve(config, ARGS, 1, "my.json")
    assert alone["zero_optimization"]["overlap_comm"] is False


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_optimization.overlap_com", True),
        ("zero_optimization.reduce_bucket_size", "many"),
        ("bf16.check_grad_overflow", False),
    ],
)
def test_what_deepspeed_would_reject_or_let_nan_pass_is_refused_by_name(config, key, value):
    assert key.split(".")[-1] in refused(put(config, key, value))


@pytest.mark.parametrize(
    "key", ["steps_per_print", "zero_optimization.round_robin_gradients", "aio.queue_depth"]
)
def test_an_auto_that_nothing_fills_is_refused(config, key):
    message = refused(put(config, key, "auto"))
    assert key in message
    assert "auto" in message


@pytest.mark.parametrize("stage", [0, 4, "auto", None, "2"])
def test_stages_that_are_not_supported_are_refused(config, stage):
    message = refused(put(config, "zero_optimization.stage", stage))
    assert "zero_optimization.stage" in message
    assert repr(stage) in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_one_to_three_are_accepted(config, stage):
    assert (
        resolved(put(config, "zero_optimization.stage", stage))["zero_optimization"]["stage"]
        == stage
    )


@pytest.mark.parametrize("kind", ["Lion", "Muon", "OneBitAdam"])
def test_another_optimizer_is_refused(config, kind):
    assert "AdamW" in refused(put(config, "optimizer.type", kind))


WIDTH_AUTOS = {  # of a model of width 100, as the Hugging Face Trainer fills them
    "reduce_bucket_size": 10_000,
    "stage3_prefetch_bucket_size": 9_000,
    "stage3_param_persistence_threshold": 1_000,
}


def test_zero_3_takes_autos_from_the_width_of_the_model(config):
    config["zero_optimization"] |= {"stage": 3} | dict.fromkeys(WIDTH_AUTOS, "auto")
    config = resolved(config)
    fill_by_width(config, 100)
    assert {key: config["zero_optimization"][key] for key in WIDTH_AUTOS} == WIDTH_AUTOS
    assert "auto" not in all_values(config)
    before = copy.deepcopy(config)
    fill_by_width(config, 200)  # numbers stay
    assert config == before


def test_below_zero_3_an_auto_of_zero_3_is_refused(config):
    assert "stage3_prefetch" in refused(
        put(config, "zero_optimization.stage3_prefetch_bucket_size", "auto")
    )


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
    ("key", "value"), [("optimizer.params.lr", 0.001), ("optimizer.params.betas", [0.9, 0.999])]
)
def test_a_contradiction_is_one_for_muons_adamw_too(config, key, value):
    assert key in refused(put(config, key, value), MUON)


@pytest.mark.parametrize("args", [ARGS, MUON])
def test_muon_in_the_file_is_pointed_to_the_flag(config, args):
    assert "--optimizer muon" in refused(put(config, "optimizer.type", "Muon"), args)


@pytest.mark.parametrize(
    ("key", "value"), [("offload_optimizer", {"device": "cpu"}), ("cpu_offload", True)]
)
def test_muon_is_not_offloaded(config, key, value):
    message = refused(put(config, f"zero_optimization.{key}", value), MUON)
    assert "--optimizer muon cannot be offloaded" in message


@pytest.mark.parametrize("value", [None, {"device": "none"}])
def test_no_offload_is_no_obstacle_for_muon(config, value):
    found = resolved(put(config, "zero_optimization.offload_optimizer", value), MUON)
    assert found["zero_optimization"]["offload_optimizer"] == value


@pytest.mark.parametrize("key", ["bf16", "optimizer.params", "optimizer"])
@pytest.mark.parametrize("value", [None, "auto", True, [1]])
def test_a_section_that_is_not_one_is_refused_by_name(config, key, value):
    assert key.split(".")[-1] in refused(put(config, key, value))


@pytest.mark.parametrize("has_compiler", [True, False])
def test_an_optimizer_without_a_type_is_adamw(config, tools, has_compiler):
    tools(*(["ninja", "c++"] if has_compiler else []))
    del config["optimizer"]["type"]
    assert resolved(config)["optimizer"]["type"] == "AdamW"
    del config["optimizer"]["params"]["torch_adam"], config["optimizer"]["params"]["fused"]
    if has_compiler:
        assert resolved(config)["optimizer"]["type"] == "AdamW"
    else:
        assert "AdamW" in refused(config)


def test_without_an_optimizer_section_none_is_added(config):
    del config["optimizer"]
    config = resolved(config)
    assert "optimizer" not in config
    assert "auto" not in all_values(config)


def test_what_was_given_is_not_changed(config):
    before = copy.deepcopy(config)
    resolved(config)
    assert config == before


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


def test_torch_adam_false_counts_as_deepspeeds_own(config, tools):
    assert "torch_adam" in refused(put(config, "optimizer.params.torch_adam", False))


def test_no_compiler_is_needed_for_the_repositorys_file(config, tools):
    assert resolved(config)["optimizer"]["params"]["torch_adam"] is True


def test_no_compiler_is_needed_for_muon(own_adam, tools):
    assert resolved(own_adam, MUON)["zero_optimization"] == own_adam["zero_optimization"]


def test_no_compiler_is_needed_without_an_optimizer_section(config, tools):
    del config["optimizer"]
    assert "optimizer" not in resolved(config)


def test_a_sound_file_is_read():
    assert read_config(str(REPOSITORY / "ds_config.json"))["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("", "not JSON"),
        ("{'stage': 2}", "not JSON"),
        ("[]", "zero_optimization"),
        ("{}", "zero_optimization"),
        ('{"zero_optimization": 2}', "zero_optimization"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, says):
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=says) as error:
        read_config(str(path))
    assert str(path) in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match=r"ds\.json"):
        read_config(str(path))


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_opened_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="DeepSpeed configuration"):
        read_config(str(tmp_path / name))


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
def test_1000_damaged_configurations_are_refused_in_words_or_resolved(config, optimizer, tmp_path):
    """Damaged as text or as values: never another error, and nothing "auto" that is left over."""
    dice, path, whole = random.Random(0), tmp_path / "ds.json", json.dumps(config)
    messages = []
    for i in range(1000):
        if i % 2:
            text = json.dumps(damage(damage(config, dice), dice))
        else:
            data = bytearray(whole.encode())
            for _ in range(dice.randint(1, 5)):
                data[dice.randrange(len(data))] = dice.randrange(32, 127)
            text = data[: dice.choice((len(data), dice.randrange(len(data))))].decode()
        path.write_text(text)
        try:
            args = TrainingArguments(optimizer=optimizer)
            done = resolve(read_config(str(path)), args, 2, "ds.json")
        except UsageError as error:
            messages.append(str(error))
        else:
            fill_by_width(done, dim=64)
            assert "auto" not in all_values(done)
    assert 300 < len(messages) < 1000
    assert not any("\n" in message for message in messages)


def test_deepspeeds_throughput_timer_which_waits_for_the_gpu_is_off_unless_asked_for(config):
    assert resolved(config)["timers"] == {"throughput": {"enabled": False}}
    asked = {"throughput": {"enabled": True, "synchronized": False}}
    assert resolved(config | {"timers": asked})["timers"] == asked
