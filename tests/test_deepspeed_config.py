"""DeepSpeed's file and the flags are merged. Files of guides work, or an error says what to change.

The fixtures have the keys of the Hugging Face guides' templates, of Accelerate's guide to several
models and of DeepSpeed-Chat's dictionary.
"""

import copy
import json
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
from conftest import REPOSITORY, error_of

from lm.common.errors import UsageError
from lm.engine.deepspeed_config import (
    BY_WIDTH,
    KNOWN,
    REFUSED,
    read_config,
    read_file,
    rename_old_keys,
    resolve,
)
from lm.engine.engine import Engine
from lm.training.arguments import TrainingArguments

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
GUIDES = sorted({path.stem for path in FIXTURES.glob("*.json")} - {"deepspeed_chat"})
ARGS = TrainingArguments(batch_size=4, accumulation_steps=3, learning_rate=2e-4, grad_clip=0.7)
ARGS = replace(ARGS, weight_decay=0.05, beta1=0.8, beta2=0.97)
MUON = replace(ARGS, optimizer="muon")
SIZES = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


@pytest.fixture
def config() -> dict:
    """The ds_config.json of the repository."""
    return json.loads((REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))


def resolved(config: dict, args: TrainingArguments = ARGS, processes: int = 2) -> dict:
    return resolve(config, args, processes, "my.json")


def refused(config: dict, args: TrainingArguments = ARGS) -> str:
    line = error_of(resolved, config, args)
    assert "my.json" in line
    return line


def put(config: dict, key: str, value) -> dict:
    config = copy.deepcopy(config)
    *parents, name = key.split(".")
    reduce(lambda section, parent: section.setdefault(parent, {}), parents, config)[name] = value
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


def test_flags_fill_every_auto_and_every_missing_key(config):
    before, missing, config = config, {"zero_optimization": {"stage": 2}, "optimizer": {}}, config
    for key in FILLED:
        config = put(config, key, "auto")
    for found in map(resolved, (before, missing, config)):
        for key, value in FILLED.items():
            assert reduce(dict.__getitem__, key.split("."), found) == value
        assert '"auto"' not in json.dumps(found)
        assert resolved(found) == found  # numbers equal to the flags are accepted
    assert before == json.loads((REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))
    for dtype, bf16, fp16 in (("float16", False, True), ("float32", False, False)):
        found = resolved(before, replace(ARGS, dtype=dtype))
        assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (bf16, fp16)


def test_auto_sizes_become_deepspeeds_defaults_or_depend_on_the_model(config, accelerator):
    zero = config["zero_optimization"]
    zero |= {"stage": 3} | dict.fromkeys((*SIZES, "overlap_comm", BY_WIDTH), "auto")
    alone = resolved(config, processes=1)
    assert alone["zero_optimization"]["overlap_comm"] is False  # one process sends nothing
    engine = Engine(accelerator, "ZeRO-3", resolved(config))
    assert {*SIZES, "overlap_comm"}.isdisjoint(engine.deepspeed["zero_optimization"])
    engine.fit_to(64, n_parameters=1000)
    found = engine.deepspeed["zero_optimization"]
    assert (found["reduce_bucket_size"], found[BY_WIDTH]) == (1000, 640)
    engine.fit_to(64, n_parameters=2000)  # a bucket holds at most what the file says
    assert found["reduce_bucket_size"] == 1000


# Key → a value that cannot be used, and what the error says about it.
WRONG = {
    "train_batch_size": (32, '"train_batch_size" is 32, but --batch_size × --accumulation_steps'),
    "gradient_clipping": (9, '"gradient_clipping" is 9, but --grad_clip gives 0.7'),
    "bf16.enabled": (False, '"bf16.enabled" is false, but --dtype bfloat16 gives true'),
    "bf16.check_grad_overflow": (False, 'remove "check_grad_overflow": false'),
    "optimizer.type": ("Lion", "the optimizer must be Adam or AdamW"),
    "optimizer.params.lr": (1, '"optimizer.params.lr" is 1'),
    "optimizer.params.adam_w_mode": (False, 'remove "adam_w_mode": false'),
    "zero_optimization.offload_param": ({"device": "cpu"}, "does nothing at stage 2, only at 3"),
    "zero_optimization.offload_optimizer.device": ("nvme", 'at stage 2 takes no "nvme"'),
    "zero_optimization.offload_optimizer.nvme_path": (None, 'needs "nvme_path", a folder'),
    "zero_optimization.offload_optimizer.ratio": (0.5, 'remove "ratio"'),
    "zero_optimization.round_robin": (1, "DeepSpeed rejects the file: 1 validation error"),
    "aio.block_size": ("auto", '"aio.block_size": "auto" is not replaced'),
    "pipeline": ({"stages": 2}, 'remove "pipeline": not supported here'),
}


def test_one_error_lists_all_keys_and_values_that_cannot_be_used(config):
    for key, (value, _) in WRONG.items():
        config = put(config, key, value)
    message = refused(config)
    for part in (*(part for _, part in WRONG.values()), '("auto" takes'):
        assert message.count(part) == 1, part
    said = '"zero_optimization.stage" must be 1, 2 or 3: leave out the file, or set ENGINE='
    assert said in refused(put(config, "zero_optimization.stage", 0))


OF_SECTIONS = [prefix + keys.split()[-1] for prefix, keys in REFUSED.items()]
OF_SECTIONS += [f"{prefix}no_such_key" for prefix in KNOWN]


@pytest.mark.parametrize("path", OF_SECTIONS)
def test_an_unsupported_key_is_refused_unless_it_is_off(path):
    offload = {"device": "cpu"}
    base = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}, "bf16": {}}
    assert f'remove "{path}"' in refused(put(base, path, {"topk_ratio": 0.1}))
    resolved(put(base, path, {"enabled": False, "max_out_tokens": 512}))


def test_muon_replaces_the_files_optimizer_and_is_refused_at_stage_3_or_with_offloading(config):
    done = resolved(config, MUON)
    assert "optimizer" not in done
    assert done["zero_allow_untested_optimizer"] is True
    assert "zero_allow_untested_optimizer" not in resolved(config)
    assert '"stage": 2' in refused(put(config, "zero_optimization.stage", 3), MUON)
    offload = put(config, "zero_optimization.offload_optimizer", {"device": "cpu"})
    assert "--optimizer muon cannot be offloaded" in refused(offload, MUON)


def test_offloading_without_a_compiler_uses_pytorchs_adam(config, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["optimizer"]["params"] = {}
    without = {key: value for key, value in config.items() if key != "optimizer"}
    assert resolved(config)["optimizer"]["params"]["torch_adam"] is True
    assert resolved(config)["zero_force_ds_cpu_optimizer"] is False
    assert resolved(without)["zero_force_ds_cpu_optimizer"] is False
    for tool in ("ninja", "c++"):
        (tmp_path / tool).touch(mode=0o755)
    assert "zero_force_ds_cpu_optimizer" not in resolved(config)
    assert "torch_adam" not in resolved(config)["optimizer"]["params"]


def test_parameters_on_nvme_need_a_reuse_distance_of_0(config):
    config["zero_optimization"] |= {"stage": 3, "offload_param": {"device": "nvme"}}
    assert '"stage3_max_reuse_distance": 0' in refused(config)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "JSON (Bad key name (eof)"),
        (b'{"bf16": {}, "zero_optimization": {}, "bf16": {}}', 'keep only one "bf16"'),
        (b'{"bf16": {"enabled": true}, "bfloat16": {}, "zero_optimization": {}}', "the old name"),
        (b'{"zero_optimization": 2}', "zero_opt"),
        (None, "JSON (No such file or directory)"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, says):
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_bytes(content)
    line = error_of(read_config, str(path))
    assert says in line
    assert str(path) in line


def fixture(name: str) -> dict:
    config = read_file(str(FIXTURES / f"{name}.json"))
    if "aio" in config["zero_optimization"]:  # a wrong place, which DeepSpeed rejects
        config["aio"] = config["zero_optimization"].pop("aio")
        config["zero_optimization"]["stage3_max_reuse_distance"] = 0
    rename_old_keys(config, name)
    return config


@pytest.mark.parametrize("name", GUIDES)
def test_files_of_guides_are_accepted_after_the_changes_that_errors_demand(name):
    size, steps = 1 if name.endswith("teacher") else 4, 1 if name.startswith("accelerate") else 4
    args = TrainingArguments(batch_size=size, accumulation_steps=steps, learning_rate=3e-4)
    found = resolved(fixture(name), args)
    assert json.dumps(found).count('"auto"') == (found["zero_optimization"].get(BY_WIDTH) == "auto")


def test_deepspeed_chats_configuration_gets_one_error_and_is_accepted_at_all_stages():
    config = fixture("deepspeed_chat")
    message = refused(config)
    for part in ('remove "hybrid_engine"', '"fp16.enabled" is true, but'):
        assert part in message
    config["hybrid_engine"]["enabled"] = False
    args = TrainingArguments(dtype="float16", batch_size=4, accumulation_steps=4)
    for stage in (1, 2, 3):  # one dictionary for all stages
        config["zero_optimization"]["stage"] = stage
        found = resolved(config, args)
        assert found["fp16"] == {"enabled": True, "loss_scale_window": 100}
        assert found["zero_optimization"]["stage3_prefetch_bucket_size"] == 3e7


OLD = """{
  // as a guide prints it
  "bfloat16": {"enabled": "auto"},
  "aio": {"thread_count": 2,}, # a comment of another kind
  "zero_optimization": {
    "stage": 3,
    "sub_group_size": "auto", "stage3_max_live_parameters": "auto",
    "stage3_max_reuse_distance": "auto",
    "stage3_gather_fp16_weights_on_model_save": true,
  },
}"""


@pytest.mark.parametrize(
    ("name", "value"),
    [("aio", True), ("scheduler.params", []), ("zero_optimization.offload_optimizer", "cpu")],
)
def test_a_value_instead_of_a_section_is_refused_but_not_null(config, tmp_path, name, value):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(put(config, name, value)))
    assert f'"{name}" must be a section in braces' in error_of(read_config, str(path))
    path.write_text(json.dumps(put(config, name, None)))
    resolved(read_config(str(path)))


def test_files_are_read_as_deepspeed_reads_them_and_old_names_are_understood(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(OLD)
    found = resolved(read_config(str(path)))
    assert found["bf16"] == {"enabled": True}
    assert found["aio"] == {"intra_op_parallelism": 2}
    gathers = "stage3_gather_16bit_weights_on_model_save"
    assert found["zero_optimization"] == {"stage": 3, gathers: True}
    for value in ("false", '{"enabled": false}'):  # neither is dropped
        path.write_text(OLD.replace('{"enabled": "auto"}', value))
        with pytest.raises(UsageError, match=r"bf16|bfloat16"):
            resolved(read_config(str(path)))
