"""DeepSpeed files of others: they run as they are, or are told in words what to change.

The fixtures have the keys of the Hugging Face guides' templates, of Accelerate's guide to several
models and of DeepSpeed-Chat's dictionary.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_deepspeed_config import damage, get, put

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine import deepspeed_config
from training.engine.deepspeed_config import fill_by_width, read_config, resolve
from training.engine.deepspeed_keys import OF_STAGE_3, REFUSED

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.json"))
PROCESSES, DIM = 2, 64
ARGS = TrainingArguments(batch_size=4, accumulation_steps=4, learning_rate=3e-4, beta2=0.97)


@pytest.fixture(autouse=True)
def every_tool(monkeypatch):
    """What a machine lacks is the business of test_deepspeed_config.py."""
    monkeypatch.setattr(deepspeed_config, "_require_compiler", lambda config, source: None)


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
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config, args = fixture(name), fitting(name)
    ours = settled(config, args)
    assert "scheduler" not in ours
    config.pop("scheduler", None)
    if "bfloat16" in config:
        config["bf16"] = config.pop("bfloat16")
    trainer = HfTrainerDeepSpeedConfig(config)
    theirs = SimpleNamespace(
        world_size=PROCESSES,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation_steps,
        max_grad_norm=args.grad_clip,
        learning_rate=args.learning_rate,
        adam_beta1=args.beta1,
        adam_beta2=args.beta2,
        adam_epsilon=1e-8,
        weight_decay=args.weight_decay,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=True,
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: 1,
    )
    trainer.trainer_config_process(theirs)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=DIM))
    trainer.trainer_config_finalize(theirs, model, num_training_steps=1000)
    filled = [key for key in keys(config) if get(config, key) == "auto"]
    assert filled
    assert {key: get(ours, key) for key in filled} == {
        key: get(trainer.config, key) for key in filled
    }


def keys(config: dict, prefix: str = ""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


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


def test_old_names_become_the_new_ones():
    config = settled(fixture("old_names_zero3"))
    zero = config["zero_optimization"]
    assert config["bf16"] == {"enabled": True}
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert zero["offload_param"] == {"device": "none"}
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert not {"bfloat16", "cpu_offload", "cpu_offload_param"} & {*config, *zero}
    both = refused({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}} | zero2())
    assert 'remove "bfloat16", the old name of "bf16"' in both


@pytest.mark.parametrize("path", REFUSED)
def test_a_key_that_is_not_followed_is_refused_unless_it_is_off(path):
    offload = {"device": "cpu"}
    base = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}, "bf16": {}, "fp16": {}}
    assert f'remove "{path}": {REFUSED[path]}' in refused(put(base, path, {"topk_ratio": 0.1}))
    for off in (False, None, {"enabled": False, "max_out_tokens": 512}):
        settled(put(base, path, off))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (zero2(offload_param={"device": "cpu"}), "at stage 2, only at 3"),
        (zero2(cpu_offload_param=True), "offload_param"),
        (zero2(stage3_max_live_parameters=1e9), "stage3_max_live_parameters"),
        (zero2(sub_group_size=1), "sub_group_size"),
        (zero2(offload_optimizer={"device": "nvme", "nvme_path": "x"}), 'write "cpu"'),
        (zero2(offload_optimizer={"device": "cpu", "ratio": 0.5}), '"ratio"'),
        ({"train_batchsize": 8} | zero2(), 'did you mean "train_batch_size"?'),
        ({"zzz": {"enabled": False}} | zero2(), '"zzz" does nothing here: remove it'),
        ({"aio": {"queue_dept": 8}} | zero2(), 'did you mean "aio.queue_depth"?'),
        ({"optimizer": {"typ": "Adam"}} | zero2(), 'did you mean "optimizer.type"?'),
        (zero2(overlap_com=True), "DeepSpeed rejects their.json: "),
        (zero2() | {"fp16": {"loss_scale": -1}}, "loss_scale"),
        (zero2() | {"communication_data_type": "int4"}, "int4"),
    ],
)
def test_a_key_that_would_do_nothing_or_fail_is_refused_by_name(config, named):
    assert named in refused(config)


@pytest.mark.parametrize("section", [{"device": "none", "pin_memory": True}, {}, None])
def test_a_section_that_is_switched_off_is_no_obstacle(section):
    off = {"offload_param": section, "stage3_gather_16bit_weights_on_model_save": False}
    assert settled(zero2(**off))["zero_optimization"]["stage"] == 2


# Fields of DeepSpeed's ZeRO that act here, without state that checkpoints would miss.
HARMLESS = """
    stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions
    use_multi_rank_bucket_allreduce allgather_bucket_size overlap_comm compute_grad_norm
    load_from_fp32_weights elastic_checkpoint offload_optimizer cpu_offload cpu_offload_param
    cpu_offload_use_pin_memory ignore_unused_parameters round_robin_gradients parameter_alignment
    pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks
    save_muon_momentum_buffer_in_memory device nvme_path buffer_count buffer_size max_in_cpu
    pin_memory pipeline_read pipeline_write fast_init cpuadam_cores_perc ratio
"""


def test_every_field_of_deepspeeds_zero_is_one_that_was_judged():
    """A new field may keep state of its own, which checkpoints would miss."""
    from deepspeed.runtime.zero import config, offload_config

    sections = (
        config.DeepSpeedZeroConfig,
        offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        offload_config.DeepSpeedZeroOffloadParamConfig,
    )
    judged = {*HARMLESS.split(), *OF_STAGE_3, *(path.rpartition(".")[2] for path in REFUSED)}
    found = {name: item for each in sections for name, item in each.model_fields.items()}
    new = {name for name, item in found.items() if not (item.alias or name).startswith("stage3_")}
    assert new <= judged
    assert {*OF_STAGE_3} <= found.keys()


def test_damaged_files_of_each_kind_are_refused_in_words_or_run():
    dice, messages = random.Random(1), []
    for i in range(150 * len(NAMES)):
        name = NAMES[i % len(NAMES)]
        config = damage(damage(fixture(name), dice), dice)
        if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
            continue  # read_config refuses it
        try:
            settled(config, fitting(name))
        except UsageError as error:
            messages.append(str(error))
    assert len(messages) > 150
    assert not any("\n" in message for message in messages)
