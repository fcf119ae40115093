import logging
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY
from torch.distributed import ReduceOp

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine import launch
from training.engine.launch import (
    Engine,
    _check_launch,
    _name,
    build_engine,
    deepspeed_plugin,
    deepspeed_plugins,
    spare_overflow_check,
)

BF16, FP16, FP32 = (TrainingArguments(dtype=d) for d in ("bfloat16", "float16", "float32"))


@pytest.fixture(autouse=True)
def environ(monkeypatch) -> dict:
    """An environment without launcher, restored after the test."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("ACCELERATE_", "MASTER_")) and k not in launcher
    }
    monkeypatch.setattr(os, "environ", clean)
    return clean


def refused(args: TrainingArguments, deepspeed: bool = False, has_gpu: bool = False) -> str:
    with pytest.raises(UsageError) as error:
        _check_launch(args, deepspeed, has_gpu)
    assert "\n" not in str(error.value)
    return str(error.value)


def fake_gpu(
    monkeypatch,
    has_bf16: bool = True,
    devices: int = 1,
    capability: tuple[int, int] = (8, 0),
    cuda: str | None = "13.0",
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)


@pytest.mark.parametrize("deepspeed", [True, False])
@pytest.mark.parametrize("args", [BF16, FP32])
def test_nothing_to_say_about_a_plain_launch(args, deepspeed):
    _check_launch(args, deepspeed, has_gpu=False)


@pytest.mark.parametrize(
    ("launched", "args"), [("fp16", BF16), ("bf16", FP32), ("fp8", BF16), ("fp16", FP32)]
)
def test_a_precision_of_the_launcher_that_contradicts_the_flag_is_refused(environ, launched, args):
    environ["ACCELERATE_MIXED_PRECISION"] = launched
    message = refused(args)
    assert f"--mixed_precision {launched}" in message
    assert f"--dtype is {args.dtype}" in message


@pytest.mark.parametrize("launched", ["no", "bf16"])
def test_a_precision_of_the_launcher_that_agrees_or_is_silent_passes(environ, launched):
    environ["ACCELERATE_MIXED_PRECISION"] = launched
    _check_launch(BF16, deepspeed=False, has_gpu=False)


def test_float16_is_refused_on_a_cpu():
    message = refused(FP16)
    assert "float16" in message
    assert "bfloat16 or float32" in message


def test_bfloat16_is_refused_on_a_gpu_without_it(monkeypatch):
    fake_gpu(monkeypatch, has_bf16=False)
    message = refused(BF16, has_gpu=True)
    assert "Tesla V100" in message
    assert "--dtype float16" in message
    _check_launch(FP16, deepspeed=False, has_gpu=True)


@pytest.mark.parametrize("value", ["true", "True", "1", "yes"])
def test_a_cpu_launch_that_would_switch_deepspeed_off_is_refused(environ, value):
    environ["ACCELERATE_USE_CPU"] = value
    assert "DeepSpeed" in refused(BF16, deepspeed=True)


def test_a_cpu_launch_that_starts_one_process_whatever_was_asked_is_refused(environ):
    environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "29500"}
    message = refused(BF16)
    assert "--num_processes" in message
    assert "--multi_gpu" in message


def test_a_cpu_launch_of_real_processes_passes(environ):
    environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "29500", "RANK": "0"}
    _check_launch(BF16, deepspeed=False, has_gpu=False)


def test_accumulation_of_the_launcher_that_contradicts_the_flag_is_refused(environ):
    environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "8"
    message = refused(TrainingArguments(accumulation_steps=4))
    assert "--gradient_accumulation_steps 8" in message
    assert "--accumulation_steps is 4" in message


@pytest.mark.parametrize("value", ["auto", "4"])
def test_accumulation_of_the_launcher_that_agrees_passes(environ, value):
    environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = value
    _check_launch(TrainingArguments(accumulation_steps=4), deepspeed=True, has_gpu=False)


def test_more_processes_than_gpus_are_refused(environ, monkeypatch):
    fake_gpu(monkeypatch, devices=2)
    environ["LOCAL_WORLD_SIZE"] = "4"
    message = refused(BF16, has_gpu=True)
    assert "4 processes for 2 GPUs" in message
    assert "--num_processes 2" in message
    environ["LOCAL_WORLD_SIZE"] = "2"
    _check_launch(BF16, deepspeed=False, has_gpu=True)


@pytest.mark.parametrize(
    ("processes", "zero_stage", "says"),
    [
        (1, 2, "DeepSpeed ZeRO-2"),
        (4, 1, "DeepSpeed ZeRO-1"),
        (2, None, "DDP, not DeepSpeed"),
        (1, None, "single process, no engine"),
    ],
)
def test_the_engine_has_a_name_for_people(processes, zero_stage, says):
    deepspeed = zero_stage and {"zero_optimization": {"stage": zero_stage}}
    assert _name(deepspeed, processes) == says


def test_an_engine_answers_for_its_own_configuration():
    deepspeed = {
        "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 8,
    }
    accelerator = SimpleNamespace(
        num_processes=2, is_main_process=False, gradient_accumulation_steps=1
    )
    engine = Engine(accelerator, "DeepSpeed ZeRO-1", deepspeed)
    assert (engine.zero_stage, engine.processes, engine.is_main) == (1, 2, False)
    assert Engine(accelerator, "DDP", None).zero_stage is None
    engine.set_accumulation(3)
    assert accelerator.gradient_accumulation_steps == 3
    assert deepspeed["gradient_accumulation_steps"] == 3
    assert deepspeed["train_batch_size"] == 24


def test_a_process_that_is_alone_agrees_with_itself(accelerator):
    engine = Engine(accelerator, "single process", None)
    assert engine.largest(7) == engine.total(7) == 7


@pytest.mark.parametrize(("question", "expected"), [("largest", 9), ("total", 17)])
def test_processes_ask_each_other_in_their_group_on_the_cpu(monkeypatch, question, expected):
    others, group = torch.tensor([3, 9]), object()

    def all_reduce(tensor, op, asked) -> None:
        assert asked is group
        everyone = torch.cat([tensor, others])
        tensor.fill_(everyone.sum() if op == ReduceOp.SUM else everyone.max())

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    engine = Engine(SimpleNamespace(num_processes=3), "DDP", None, cpu_group=group)
    answer = getattr(engine, question)(5)
    assert answer == expected
    assert type(answer) is int


@pytest.mark.parametrize(("args", "precision"), [(BF16, "bf16"), (FP32, "no")])
def test_without_a_launcher_one_process_trains_in_the_precision_asked(accelerator, args, precision):
    type(accelerator.state)._reset_state(reset_partial_state=True)
    engine = build_engine(args)
    assert engine.name.startswith("single process")
    assert engine.zero_stage is None
    assert engine.accelerator.mixed_precision == precision
    assert engine.accelerator.num_processes == 1
    assert engine.cpu_group is None


def test_ddp_does_not_copy_gradients_into_its_buckets(accelerator):
    type(accelerator.state)._reset_state(reset_partial_state=True)
    assert build_engine(FP32).accelerator.ddp_handler.gradient_as_bucket_view


@pytest.mark.parametrize("deepspeed", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
def test_on_a_gpu_the_cores_are_divided_as_well_and_tf32_is_as_the_flag_says(
    environ, monkeypatch, tf32, deepspeed
):
    fake_gpu(monkeypatch)
    done = []
    matmul = SimpleNamespace(allow_tf32=not tf32)
    environ |= {"RANK": "0", "ACCELERATE_USE_DEEPSPEED": str(deepspeed).lower()}
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(launch, "require_usable_gpus", lambda: None)
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: done.append("memory"))
    monkeypatch.setattr(launch, "deepspeed_plugins", lambda models: [plugin])
    monkeypatch.setattr(launch, "Accelerator", lambda **_: SimpleNamespace(num_processes=1))
    monkeypatch.setattr(launch, "use_all_cores", lambda: done.append("cores"))
    build_engine(TrainingArguments(dtype="float32", tf32=tf32))
    assert done == ["cores"]
    assert matmul.allow_tf32 is tf32


def test_tf32_is_refused_where_it_would_do_nothing(monkeypatch):
    fake_gpu(monkeypatch)
    tf32 = TrainingArguments(dtype="float32", tf32=True)
    assert "--tf32 needs an NVIDIA GPU" in refused(tf32)  # a CPU
    _check_launch(tf32, deepspeed=False, has_gpu=True)
    message = refused(TrainingArguments(dtype="bfloat16", tf32=True), has_gpu=True)
    assert message == "--tf32 is a way to compute in --dtype float32, not in bfloat16"
    fake_gpu(monkeypatch, capability=(7, 5))
    assert "Ampere" in refused(tf32, has_gpu=True)
    fake_gpu(monkeypatch, cuda=None)  # AMD's
    assert "NVIDIA" in refused(tf32, has_gpu=True)


def test_the_plugin_carries_the_flags_into_deepspeeds_configuration(environ):
    environ |= {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(REPOSITORY / "ds_config.json"),
        "WORLD_SIZE": "2",
        "ACCELERATE_GRADIENT_CLIPPING": "0.7",
    }
    plugin = deepspeed_plugin(TrainingArguments(batch_size=4, accumulation_steps=3, grad_clip=0.7))
    assert plugin.zero_stage == 2
    assert plugin.deepspeed_config["gradient_clipping"] == 0.7
    assert plugin.deepspeed_config["train_batch_size"] == 24
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 3
    assert plugin.deepspeed_config["bf16"]["enabled"] is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GRADIENT_CLIPPING", "9.0"),
        ("DEEPSPEED_ZERO_STAGE", "1"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"),
    ],
)
def test_a_flag_of_the_launcher_that_the_file_would_win_over_is_refused(environ, name, value):
    environ |= {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(REPOSITORY / "ds_config.json"),
        "WORLD_SIZE": "1",
        f"ACCELERATE_{name}": value,
    }
    with pytest.raises(UsageError, match=value):
        deepspeed_plugin(TrainingArguments(grad_clip=0.7))


def test_the_launchers_own_zero_flags_make_a_configuration(environ):
    environ |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "WORLD_SIZE": "1"}
    plugin = deepspeed_plugin(TrainingArguments(batch_size=4, grad_clip=0.7))
    assert plugin.zero_stage == 2
    assert plugin.deepspeed_config["gradient_clipping"] == 0.7


def test_what_accelerate_rejects_is_said_in_one_line(environ, tmp_path):
    environ |= {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(REPOSITORY / "ds_config.json"),
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero_stage",
    }
    with pytest.raises(UsageError, match=r"ds_config\.json.*zero_stage") as error:
        deepspeed_plugin(BF16)
    assert "\n" not in str(error.value)


def test_deepspeed_s_warning_about_an_optimizer_that_is_tested_is_left_out(caplog):
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)
    logger.warning("**** You are using ZeRO with an untested optimizer, proceed with caution *****")
    logger.warning("something else")
    logger.removeHandler(caplog.handler)
    assert caplog.messages == ["something else"]


class Zero:
    """As much of DeepSpeed's optimizer as it takes."""

    compute_grad_norm, cpu_offload = True, False
    looked = 0

    def check_overflow(self, partition_gradients: bool = True) -> None:
        self.looked += 1


def test_the_norm_alone_tells_of_gradients_that_are_not_finite():
    zero = Zero()
    spare_overflow_check(zero)
    zero.check_overflow(partition_gradients=True)
    assert zero.looked == 0


@pytest.mark.parametrize("change", [{"cpu_offload": True}, {"compute_grad_norm": False}])
def test_where_no_norm_would_tell_in_time_deepspeed_looks_itself(change):
    zero = Zero()
    vars(zero).update(change)
    spare_overflow_check(zero)
    zero.check_overflow()
    assert zero.looked == 1


@pytest.mark.parametrize(("asked", "given"), [(50_000_000, 1000), (10, 10), (None, 1000)])
def test_buckets_are_no_larger_than_all_gradients(asked, given):
    zero = {"stage": 2} | ({} if asked is None else {"reduce_bucket_size": asked})
    engine = Engine(None, "DeepSpeed ZeRO-2", {"zero_optimization": zero})
    engine.fit_to(64, n_parameters=1000)
    assert zero["reduce_bucket_size"] == given
    Engine(None, "DDP", None).fit_to(64, n_parameters=1000)  # has none


def test_each_of_several_models_has_the_file_that_it_names_or_the_launchers(environ):
    environ |= {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(REPOSITORY / "ds_config.json"),
        "ACCELERATE_GRADIENT_CLIPPING": "0.7",
        "WORLD_SIZE": "2",
    }
    own = TrainingArguments(
        batch_size=4, deepspeed=str(REPOSITORY / "configs/zero3.json"), grad_clip=0.7
    )
    plugins = deepspeed_plugins([own, TrainingArguments(batch_size=4, grad_clip=0.7)])
    assert [plugin.zero_stage for plugin in plugins] == [3, 2]
    assert [plugin.deepspeed_config["gradient_clipping"] for plugin in plugins] == [0.7, 0.7]


def test_what_a_launcher_says_is_held_against_every_model(environ):
    environ |= {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(REPOSITORY / "ds_config.json"),
        "ACCELERATE_GRADIENT_CLIPPING": "0.7",
        "WORLD_SIZE": "1",
    }
    with pytest.raises(UsageError, match=r"--gradient_clipping 0\.7, but .*0\.9"):
        deepspeed_plugins([TrainingArguments(grad_clip=clip) for clip in (0.7, 0.9)])
