"""DeepSpeed files of others: they run as they are, or are told in words what to change.

The fixtures have the keys of the Hugging Face guides' templates, of Accelerate's guide to several
models and of DeepSpeed-Chat's dictionary.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_deepspeed_config import put
from training.engine.deepspeed_keys import REFUSED, RENAMED

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine.deepspeed_config import fill_by_width, read_config, resolve

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.json"))
PROCESSES, DIM = 2, 64
ARGS = TrainingArguments(batch_size=4, accumulation_steps=4, learning_rate=3e-4, beta2=0.97)


def fixture(name: str) -> dict:
    config = read_config(str(FIXTURES / f"{name}.json"))
    if "aio" in config["zero_optimization"]:  # the guide's section stands where nobody reads it
        config["aio"] = config["zero_optimization"].pop("aio")
    return config


def fitting(name: str) -> TrainingArguments:
    """Flags that the numbers of a fixture do not contradict."""
    if name == "deepspeed_chat":
        return replace(ARGS, dtype="float16")
    return replace(
        ARGS,
        batch_size=1 if name.endswith("teacher") else 4,
        accumulation_steps=1 if name.startswith("accelerate") else 4,
    )


def zero2(**section) -> dict:
    return {"zero_optimization": {"stage": 2} | section}


def settled(config: dict, args: TrainingArguments = ARGS) -> dict:
    """The configuration in use, the model's width being known."""
    config = resolve(config, args, PROCESSES, "their.json")
    fill_by_width(config, DIM)
    assert '"auto"' not in json.dumps(config)
    return config


def refused(config: dict, args: TrainingArguments = ARGS) -> str:
    with pytest.raises(UsageError) as error:
        settled(config, args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "deepspeed_chat"])
def test_the_guides_files_run_as_they_are_and_are_filled_as_the_trainer_fills_them(name):
    before, found = fixture(name), settled(fixture(name), fitting(name))
    assert "scheduler" not in found
    # As transformers/integrations/deepspeed.py fills them for a model of this width.
    by_width = {
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    for key, value in by_width.items():
        if before["zero_optimization"].get(key) == "auto":
            assert found["zero_optimization"][key] == value


def test_deepspeed_chats_dictionary_is_told_all_at_once_and_runs_at_stage_3():
    config = fixture("deepspeed_chat")
    message = refused(config)
    for part in ('remove "hybrid_engine"', "stage3_prefetch", '"fp16.enabled" is true, but'):
        assert part in message
    config["hybrid_engine"]["enabled"] = False
    config["zero_optimization"]["stage"] = 3
    found = settled(config, fitting("deepspeed_chat"))
    assert found["fp16"] == {"enabled": True, "loss_scale_window": 100}
    assert found["zero_optimization"]["stage3_prefetch_bucket_size"] == 3e7


@pytest.mark.parametrize("path", [REFUSED[0], *REFUSED[-9:], *RENAMED])
def test_a_key_that_is_not_followed_is_refused_unless_it_is_off(path):
    offload = {"device": "cpu"}
    base = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}, "bf16": {}}
    assert f'remove "{path}"' in refused(put(base, path, {"topk_ratio": 0.1}))
    settled(put(base, path, {"enabled": False, "max_out_tokens": 512}))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (zero2(offload_param={"device": "cpu"}), "at stage 2, only at 3"),
        (zero2(stage3_max_live_parameters=1e9), "stage3_max_live_parameters"),
        (zero2(sub_group_size=1), "sub_group_size"),
        (zero2(offload_optimizer={"device": "nvme", "nvme_path": "x"}), 'write "cpu"'),
        (zero2(offload_optimizer={"device": "cpu", "ratio": 0.5}), '"ratio"'),
        ({"train_batchsize": 8} | zero2(), 'did you mean "train_batch_size"?'),
        ({"zzz": {"enabled": False}} | zero2(), '"zzz" does nothing here: remove it'),
        ({"aio": {"queue_dept": 8}} | zero2(), 'did you mean "aio.queue_depth"?'),
        (zero2(overlap_com=True), "DeepSpeed rejects their.json: "),
        (zero2() | {"communication_data_type": "int4"}, "int4"),
    ],
)
def test_a_key_that_would_do_nothing_or_fail_is_refused_by_name(config, named):
    assert named in refused(config)


def test_a_section_that_is_switched_off_is_no_obstacle():
    off = {"device": "none", "pin_memory": True}
    off = {"offload_param": off, "stage3_gather_16bit_weights_on_model_save": False}
    assert settled(zero2(**off))["zero_optimization"]["stage"] == 2
