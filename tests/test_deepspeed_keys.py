"""DeepSpeed files of others: they run as they are, or are told in words what to change.

The fixtures have the keys of the Hugging Face guides' templates, of Accelerate's guide to several
models and of DeepSpeed-Chat's dictionary.
"""

import json
import random
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from test_deepspeed_config import damage, get, put

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine import deepspeed_config
from training.engine.deepspeed_config import fill_by_width, read_config, resolve
from training.engine.deepspeed_keys import FLAGS, KNOWN, NOT_FOLLOWED, OF_NO_USE, OF_STAGE_3

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.json"))
PROCESSES, DIM = 2, 64
ARGS = TrainingArguments(batch_size=4, accumulation_steps=4, learning_rate=3e-4, beta2=0.97)


@pytest.fixture(autouse=True)
def every_tool(monkeypatch):
    """What a machine lacks is the business of test_deepspeed_config.py."""
    monkeypatch.setattr(deepspeed_config, "_require_compiler", lambda config, source: None)


def fixture(name: str) -> dict:
    return read_config(str(FIXTURES / f"{name}.json"))


def without(config: dict, key: str) -> dict:
    """A copy that lacks a key, as in "section.key"."""
    config = json.loads(json.dumps(config))
    *parents, name = key.split(".")
    del (get(config, ".".join(parents)) if parents else config)[name]
    return config


def zero2(**section) -> dict:
    return {"zero_optimization": {"stage": 2} | section}


def settled(config: dict, args: TrainingArguments = ARGS, processes: int = PROCESSES) -> dict:
    """The configuration in use, the model's width being known."""
    config = resolve(config, args, processes, "their.json")
    fill_by_width(config, DIM)
    assert '"auto"' not in json.dumps(config)
    return config


def refused(config: dict, args: TrainingArguments = ARGS) -> str:
    with pytest.raises(UsageError) as error:
        settled(config, args)
    assert "\n" not in str(error.value)
    return str(error.value)


def told(message: str) -> str:
    return f"their.json: {message}"


BY_LOG = (
    'which warms up from 0 in a straight line; {} without "warmup_type": "linear" warms up by the '
    "logarithm, half way after the square root of its steps"
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "hugging_face_zero2",
            'remove "scheduler" and pass --lr_schedule constant --warmup_steps N, '
            + BY_LOG.format("WarmupLR"),
        ),
        (
            "hugging_face_zero3",
            'remove "scheduler" and pass --lr_schedule linear --min_lr_ratio 0 --warmup_steps N, '
            + BY_LOG.format("WarmupDecayLR"),
        ),
        (
            "accelerate_zero2_student",
            'remove "scheduler" and pass --lr_schedule constant --warmup_steps N, '
            + BY_LOG.format("WarmupLR"),
        ),
    ],
)
def test_a_schedule_that_is_another_is_refused_with_the_flags_and_without_it_the_file_runs(
    name, message
):
    config = fixture(name)
    args = replace(ARGS, accumulation_steps=1)
    assert refused(config, args) == told(message)
    settled(without(config, "scheduler"), args)


@pytest.mark.parametrize("name", ["hugging_face_zero2", "hugging_face_zero3"])
def test_a_template_with_a_straight_warm_up_runs_as_it_is_under_the_flags_of_its_schedule(name):
    config = put(fixture(name), "scheduler.params.warmup_type", "linear")
    zero3 = name.endswith("3")
    wanted = "--lr_schedule constant" if not zero3 else "--lr_schedule linear --min_lr_ratio 0"
    assert refused(config) == told(
        f'"scheduler" is {wanted} --warmup_steps N: pass these, or remove it'
    )
    flags = {"lr_schedule": "linear", "min_lr_ratio": 0.0} if zero3 else {"lr_schedule": "constant"}
    assert "scheduler" not in settled(config, replace(ARGS, **flags))


def test_deepspeed_chats_dictionary_is_told_one_thing_after_the_other_until_it_runs():
    config, args = fixture("deepspeed_chat"), replace(ARGS, batch_size=4)
    assert refused(config) == told('remove "hybrid_engine": it generates text in RLHF')
    config["hybrid_engine"]["enabled"] = False
    for key in ("param_persistence_threshold", "max_live_parameters", "prefetch_bucket_size"):
        key = f"zero_optimization.stage3_{key}"
        assert refused(config) == told(f'remove "{key}": it does nothing at stage 2, only at 3')
        config = without(config, key)
    assert '"fp16.enabled": true, but --dtype bfloat16 gives false' in refused(config)
    fp16 = replace(args, dtype="float16")
    assert settled(config, fp16)["fp16"] == {"enabled": True, "loss_scale_window": 100}


def test_deepspeed_chats_dictionary_runs_at_stage_3():
    config = put(fixture("deepspeed_chat"), "zero_optimization.stage", 3)
    config["hybrid_engine"]["enabled"] = False
    zero = settled(config, replace(ARGS, dtype="float16"))["zero_optimization"]
    assert zero["memory_efficient_linear"] is False
    assert zero["stage3_prefetch_bucket_size"] == 3e7


def test_old_names_become_the_new_ones():
    config = settled(fixture("old_names_zero3"))
    zero = config["zero_optimization"]
    assert config["bf16"] == {"enabled": True}
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert zero["offload_param"] == {"device": "none"}
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    old = {"bfloat16", "cpu_offload", "cpu_offload_param"}
    assert not old & {*config, *zero}
    assert "stage3_gather_fp16_weights_on_model_save" not in zero


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
def test_what_an_old_name_becomes_is_what_deepspeed_makes_of_it(key):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    old = fixture("old_names_zero3")["zero_optimization"]
    old = {name: value for name, value in old.items() if value != "auto"}
    theirs = getattr(DeepSpeedZeroConfig(**old), key)
    ours = getattr(
        DeepSpeedZeroConfig(**settled({"zero_optimization": old})["zero_optimization"]), key
    )
    assert (theirs or ours).device == ours.device
    assert (theirs is None) == (ours.device == "none")


def test_a_name_beside_its_old_one_is_refused():
    message = refused({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}} | zero2())
    assert message == told('remove "bfloat16", the old name of "bf16"')


def test_the_template_for_nvme_is_told_where_its_section_belongs_and_then_runs():
    config = fixture("hugging_face_zero3_nvme")
    assert refused(config) == told('move "aio" out of "zero_optimization", to the top level')
    config["aio"] = config["zero_optimization"].pop("aio")
    assert settled(config)["aio"]["intra_op_parallelism"] == 1  # was thread_count
    assert refused(put(config, "aio.threads", 1)) == told(
        'DeepSpeed does not know "aio.threads": remove it'
    )


def test_the_file_for_a_teacher_runs_in_its_micro_batch():
    config = fixture("accelerate_zero3_teacher")
    assert "--batch_size gives 4" in refused(config)
    assert settled(config, replace(ARGS, batch_size=1))["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("name", [name for name in NAMES if name != "deepspeed_chat"])
def test_every_auto_is_filled_as_the_hugging_face_trainer_fills_it(name):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = fixture(name)
    config.pop("scheduler", None)
    if "aio" in config["zero_optimization"]:
        config["aio"] = config["zero_optimization"].pop("aio")
    if "bfloat16" in config:
        config["bf16"] = config.pop("bfloat16")
    args = replace(
        ARGS,
        batch_size=config["train_micro_batch_size_per_gpu"] if name.endswith("teacher") else 4,
        accumulation_steps=1 if config.get("gradient_accumulation_steps") == 1 else 4,
    )
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
    ours = settled(config, args)
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


@pytest.mark.parametrize(
    ("kind", "params", "flags"),
    [
        ("WarmupLR", {}, "--lr_schedule constant --warmup_steps 1000"),
        (
            "WarmupLR",
            {"warmup_max_lr": 3e-4, "warmup_num_steps": 7},
            "--lr_schedule constant --warmup_steps 7 --learning_rate 0.0003",
        ),
        (
            "WarmupDecayLR",
            {"warmup_num_steps": 7, "total_num_steps": 90},
            "--lr_schedule linear --min_lr_ratio 0 --warmup_steps 7 --learning_rate 0.001 "
            "--max_steps 90",
        ),
    ],
)
def test_the_flags_that_are_named_are_those_with_which_the_schedule_is_accepted(
    kind, params, flags
):
    config = zero2() | {"scheduler": {"type": kind, "params": {"warmup_type": "linear"} | params}}
    assert refused(config) == told(f'"scheduler" is {flags}: pass these, or remove it')
    words = flags.split()
    values = dict(zip(words[::2], words[1::2], strict=True))
    kinds = {f"--{item.name}": item.type for item in fields(TrainingArguments)}
    whole = {name for name, kind in kinds.items() if kind in (int, int | None)}
    typed = {
        name[2:]: value
        if name == "--lr_schedule"
        else int(value)
        if name in whole
        else float(value)
        for name, value in values.items()
    }
    settled(config, replace(ARGS, **typed))
    for name in typed:
        other = {"lr_schedule": "wsd"}.get(name, 11)
        if name == "min_lr_ratio":
            other = 0.5
        assert flags in refused(config, replace(ARGS, **typed | {name: other}))


def test_a_cosine_is_named_as_the_nearest():
    params = {"warmup_type": "linear", "warmup_num_steps": 7, "total_num_steps": 90}
    message = refused(zero2() | {"scheduler": {"type": "WarmupCosineLR", "params": params}})
    flags = "--lr_schedule cosine --warmup_steps 7 --min_lr_ratio 0.0001 --max_steps 90"
    assert f'remove "scheduler" and pass {flags}' in message
    assert "logarithm" not in message


@pytest.mark.parametrize("kind", ["OneCycle", "LRRangeTest", "nonsense", None, []])
def test_another_schedule_is_refused_with_those_that_there_are(kind):
    message = refused(zero2() | {"scheduler": {"type": kind}})
    assert 'remove "scheduler"' in message
    assert "constant as WarmupLR, linear as WarmupDecayLR" in message


@pytest.mark.parametrize("section", [None, "WarmupLR", [], {"type": "WarmupLR", "params": 3}])
def test_a_scheduler_that_is_no_section_is_refused(section):
    assert "sections in braces" in refused(zero2() | {"scheduler": section})


def test_a_warm_up_from_above_zero_is_refused():
    params = {"warmup_type": "linear", "warmup_min_lr": 1e-5, "warmup_num_steps": 7}
    message = refused(zero2() | {"scheduler": {"type": "WarmupLR", "params": params}})
    assert message.endswith("which warms up from 0 in a straight line")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offload_param", {"device": "cpu"}),
        ("offload_param", {"device": "nvme", "nvme_path": "/local_nvme"}),
        ("cpu_offload_param", True),
        *((key, 1) for key in OF_STAGE_3.split()),
        ("stage3_max_live_parameters", 1e9),
        ("stage3_gather_16bit_weights_on_model_save", True),
        ("stage3_gather_fp16_weights_on_model_save", True),
        ("stage3_prefetch_bucket_size", "auto"),
    ],
)
def test_what_only_stage_3_reads_is_refused_below_it_by_name(stage, key, value):
    message = refused(zero2(stage=stage, **{key: value}))
    named = {
        "cpu_offload_param": "offload_param",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    }.get(key, key)
    assert message == told(
        f'remove "zero_optimization.{named}": it does nothing at stage {stage}, only at 3'
    )


def test_the_keys_of_stage_3_are_keys_of_deepspeed():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert {*OF_STAGE_3.split()} <= DeepSpeedZeroConfig.model_fields.keys()


@pytest.mark.parametrize("stage", [1, 2])
def test_nvme_below_stage_3_is_refused_because_it_would_be_the_cpu(stage):
    offload = {"device": "nvme", "nvme_path": "/local_nvme"}
    message = refused(zero2(stage=stage, offload_optimizer=offload))
    assert f'"offload_optimizer" at stage {stage}' in message
    assert 'write "cpu"' in message
    settled(zero2(stage=stage, offload_optimizer={"device": "cpu"}))


@pytest.mark.parametrize(
    "section", [{"device": "none"}, {"device": "none", "pin_memory": True}, {}, None]
)
def test_what_is_switched_off_is_no_obstacle(section):
    off = {"offload_param": section, "stage3_gather_16bit_weights_on_model_save": False}
    assert settled(zero2(**off))["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("key", OF_NO_USE)
def test_a_section_that_would_do_nothing_is_refused_unless_it_is_off(key):
    message = refused(zero2() | {key: {"enabled": True}})
    assert message == told(f'remove "{key}": {OF_NO_USE[key]}')
    for off in ({"enabled": False, "max_out_tokens": 512}, {"profile": False}, False, None):
        assert key not in settled(zero2() | {key: off})


REASONS = {key: why for why, keys in NOT_FOLLOWED.items() for key in keys}


@pytest.mark.parametrize("key", REASONS)
def test_what_this_project_does_not_follow_is_refused_unless_it_is_off(key):
    base = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {}}
    base["fp16"] = {}
    on, off = {"zenflow": ({"topk_ratio": 0.1}, None), "ratio": (0.5, 1)}.get(
        key.rpartition(".")[2], (True, False)
    )
    assert refused(put(base, key, on)) == told(f'remove "{key}": {REASONS[key]}')
    settled(put(base, key, off))
    if off is not False:  # these are on, or off, by other values too
        assert key in refused(put(base, key, 0 if off else {}))


HARMLESS = """
    stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions
    use_multi_rank_bucket_allreduce allgather_bucket_size overlap_comm compute_grad_norm
    load_from_fp32_weights elastic_checkpoint offload_optimizer cpu_offload cpu_offload_param
    cpu_offload_use_pin_memory ignore_unused_parameters round_robin_gradients parameter_alignment
    pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks
    save_muon_momentum_buffer_in_memory device nvme_path buffer_count buffer_size max_in_cpu
    pin_memory pipeline_read pipeline_write fast_init cpuadam_cores_perc
"""


def test_every_field_of_deepspeeds_zero_is_one_that_was_judged():
    """What it brings anew may keep state of its own, which checkpoints would miss."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    judged = {
        *HARMLESS.split(),
        *OF_STAGE_3.split(),
        *(key.rpartition(".")[2] for key in REASONS),
    }
    found = {
        name
        for section in (
            DeepSpeedZeroConfig,
            DeepSpeedZeroOffloadOptimizerConfig,
            DeepSpeedZeroOffloadParamConfig,
        )
        for name, item in section.model_fields.items()
        if not (item.alias or name).startswith("stage3_")
    }
    assert found <= judged


@pytest.mark.parametrize(
    ("config", "key", "guess"),
    [
        ({"train_batchsize": 8}, "train_batchsize", 'did you mean "train_batch_size"?'),
        ({"zero_optim": {}}, "zero_optim", 'did you mean "zero_optimization"?'),
        ({"zzz": {"enabled": False}}, "zzz", "remove it"),
        ({"amp": {"enabled": True}}, "amp", "remove it"),  # DeepSpeed has none any more
        ({"aio": {"queue_dept": 8}}, "aio.queue_dept", 'did you mean "aio.queue_depth"?'),
        ({"data_types": {"x": 1}}, "data_types.x", "remove it"),
        ({"timers": {"x": 1}}, "timers.x", "remove it"),
        ({"flops_profiler": {"on": True}}, "flops_profiler.on", "remove it"),
        ({"optimizer": {"typ": "Adam"}}, "optimizer.typ", 'did you mean "optimizer.type"?'),
    ],
)
def test_a_key_that_deepspeed_would_pass_over_is_refused_with_a_guess(config, key, guess):
    assert refused(zero2() | config) == told(f'DeepSpeed does not know "{key}": {guess}')


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (zero2(overlap_com=True), "overlap_com"),
        (zero2(offload_optimizer={"device": "tape"}), "offload_optimizer.device"),
        (zero2() | {"fp16": {"loss_scale": -1}}, "loss_scale"),
        (zero2() | {"bf16": {"enable": True}}, "enable"),
        (zero2() | {"tensorboard": {"path": "x"}}, "path"),
        (zero2() | {"gradient_allreduce_op": "median"}, "median"),
        (zero2() | {"communication_data_type": "int4"}, "int4"),
    ],
)
def test_what_deepspeed_rejects_is_said_before_it_starts(config, named):
    message = refused(config)
    assert message.startswith("DeepSpeed rejects their.json: ")
    assert named in message


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"fused": True}, 'FusedAdam has no "optimizer.params.fused": remove it, or write "torch_'),
        (
            {"torch_adam": True, "bias_correction": True},
            'AdamW has no "optimizer.params.bias_correction": remove it',
        ),
        ({"max_grad_norm": 1.0}, '"optimizer.params.max_grad_norm": remove it'),
        ({"adam_w_mode": False}, 'remove "adam_w_mode"'),
    ],
)
def test_what_its_adam_does_not_take_is_refused(params, named):
    assert named in refused(zero2() | {"optimizer": {"type": "AdamW", "params": params}})


@pytest.mark.parametrize(
    "params",
    [
        {"torch_adam": True, "fused": True, "adam_w_mode": True},
        {"bias_correction": True},
        {"amsgrad": False},
    ],
)
def test_what_its_adam_takes_passes(params):
    for config in (zero2(), zero2(offload_optimizer={"device": "cpu"})):
        found = settled(config | {"optimizer": {"params": params}})
        assert params.items() <= found["optimizer"]["params"].items()


class Asked(dict):
    """A configuration that notes which keys it was asked for."""

    keys_asked: ClassVar[set[str]] = set()

    def get(self, key, default=None):
        self.keys_asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.keys_asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return self


def test_every_key_that_deepspeed_reads_has_its_place():
    from deepspeed.runtime import config as theirs

    theirs.DeepSpeedConfig(Asked(train_micro_batch_size_per_gpu=1, zero_optimization={}))
    ours = {*KNOWN[""].split(), *OF_NO_USE, "scheduler", "bfloat16"}
    assert Asked.keys_asked - ours - {*theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS} == set()
    assert ours - Asked.keys_asked == {"sequence_parallel_size"}  # asked for elsewhere


def test_every_flag_that_a_schedule_can_name_exists():
    assert {*FLAGS.values()} <= {item.name for item in fields(TrainingArguments)}


def test_500_damaged_files_of_each_kind_are_refused_in_words_or_run():
    dice, messages = random.Random(1), []
    for i in range(500 * len(NAMES)):
        name = NAMES[i % len(NAMES)]
        config = damage(damage(fixture(name), dice), dice)
        if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
            continue  # read_config refuses it
        args = replace(ARGS, dtype=dice.choice(["bfloat16", "float16"]), batch_size=4)
        if dice.random() < 0.5:
            config.pop("scheduler", None)
        try:
            settled(config, args)
        except UsageError as error:
            messages.append(str(error))
    assert len(messages) > 1000
    assert not any("\n" in message for message in messages)
