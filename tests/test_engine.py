import os
import re
import socket
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY, error_of
from warm_ranks import without_launcher

from lm.engine import engine
from lm.engine.engine import (
    Engine,
    announced_wait,
    build_engines,
    deepspeed_plugin,
    set_launch_variables,
)
from lm.training.arguments import TrainingArguments

OURS = str(REPOSITORY / "ds_config.json")
NAMED = TrainingArguments(deepspeed=OURS)
BF16, FP16 = (TrainingArguments(dtype=dtype) for dtype in ("bfloat16", "float16"))


@pytest.fixture(autouse=True)
def environ(monkeypatch) -> dict:
    """A copy of os.environ without a launcher's variables; each test uses it as os.environ."""
    clean = without_launcher(os.environ)
    monkeypatch.setattr(os, "environ", clean)
    return clean


def fake_gpu(monkeypatch, has_bf16=True, devices=1, capability=(8, 0), cuda="13.0") -> None:
    """Pretend that there are GPUs. An object with num_processes 1 replaces the Accelerator."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=None))
    monkeypatch.setattr(engine, "require_usable_gpu", lambda: None)
    monkeypatch.setattr(engine, "set_threads", lambda typed: None)
    monkeypatch.setattr(engine, "set_gloo_interface", lambda: None)
    monkeypatch.setattr(engine, "Accelerator", lambda **_: SimpleNamespace(num_processes=1))


def test_a_process_that_waits_for_the_others_says_so_once(environ, monkeypatch, capsys):
    environ["RANK"] = "3"
    with announced_wait():
        assert capsys.readouterr().out == ""
    monkeypatch.setattr(engine, "FIRST_WAIT", 0)
    said = ""
    with announced_wait():
        while not said.endswith("\n"):
            said += capsys.readouterr().out
    assert re.fullmatch(
        r"rank 3 on \S+ has waited 0 s for the other processes to begin: .*\n", said
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("variables", "args", "named"),
    [
        ({}, FP16, "--dtype float16 needs a GPU; on a CPU use bfloat16 or float32"),
        ({"USE_DEEPSPEED": "true", "USE_CPU": "yes"}, BF16, "switches DeepSpeed off"),
        ({"USE_CPU": "yes"}, BF16, "accelerate launch --cpu starts one process"),
        ({}, TrainingArguments(dtype="float32", tf32=True), "--tf32 needs an NVIDIA GPU"),
        ({"DYNAMO_BACKEND": "INDUCTOR"}, BF16, "use --compile on"),
        ({"DYNAMO_BACKEND": "NO", "DYNAMO_MODE": "default", "USE_FSDP": "true"}, BF16, "ENGINE=ze"),
    ],
)
def test_a_launch_that_cannot_work_is_refused_with_the_reason(environ, variables, args, named):
    environ |= {f"ACCELERATE_{k}": v for k, v in variables.items()} | {"MASTER_PORT": "29500"}
    assert named in error_of(build_engines, [args])


def test_a_port_in_use_is_an_error_of_one_line(environ):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert f"the processes cannot meet at 127.0.0.1:{port}: " in error_of(build_engines, [BF16])


def test_flags_and_processes_that_do_not_suit_the_gpus_are_refused(environ, monkeypatch):
    tf32 = TrainingArguments(dtype="float32", tf32=True)
    for gpu, args, named in (
        ({"has_bf16": False}, BF16, "Tesla V100 has no bfloat16: pass --dtype float16"),
        ({"capability": (7, 5)}, tf32, "Ampere"),
        ({"cuda": None}, tf32, "NVIDIA"),  # an AMD GPU
        ({}, TrainingArguments(tf32=True), "--tf32 is for --dtype float32, not bfloat16"),
        ({"devices": 2}, BF16, "4 processes for 2 GPUs: start 2 on each machine"),
    ):
        fake_gpu(monkeypatch, **gpu)
        environ["LOCAL_WORLD_SIZE"] = "4" if "devices" in gpu else "1"
        assert named in error_of(build_engines, [args])
    environ["LOCAL_WORLD_SIZE"] = "2"
    for args in (tf32, FP16):
        build_engines([args])
        assert torch.backends.cuda.matmul.allow_tf32 is args.tf32


def test_setting_the_accumulation_changes_deepspeeds_configuration_too():
    deepspeed = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4}
    accelerator = SimpleNamespace(num_processes=2)
    Engine(accelerator, "DeepSpeed ZeRO-1", deepspeed).set_accumulation(3)
    assert accelerator.gradient_accumulation_steps == 3
    assert deepspeed["gradient_accumulation_steps"] == 3
    assert deepspeed["train_batch_size"] == 24


def test_without_a_launcher_one_process_has_the_precision_of_dtype(accelerator):
    type(accelerator.state)._reset_state(reset_partial_state=True)
    (engine,) = build_engines([BF16])
    assert engine.name.startswith("single process")
    assert engine.accelerator.ddp_handler.gradient_as_bucket_view
    assert engine.accelerator.mixed_precision == "bf16"
    assert engine.accelerator.num_processes == 1
    assert engine.cpu_group is None


def test_a_launchers_flag_that_contradicts_its_file_is_refused(environ):
    environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = OURS
    line = f"the launcher says --zero_stage 3, but {OURS} gives 2"
    assert error_of(deepspeed_plugin, BF16) == line


def test_the_deepspeed_flag_sets_the_variables_of_accelerate_launch(environ):
    theirs = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    environ |= theirs  # set by DeepSpeed's launcher (deepspeed/launcher/launch.py)
    ours = {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}
    ours["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = OURS
    for named in (os.path.relpath(OURS), "none"):
        environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = named
        set_launch_variables(NAMED)
        assert environ.items() >= (theirs | ours).items()
    environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = "other.json"
    line = f"drop --deepspeed {OURS}: the launcher's DeepSpeed file is other.json"
    assert error_of(set_launch_variables, NAMED) == line


def test_a_model_that_names_no_deepspeed_file_uses_the_launchers_file(environ):
    models = TrainingArguments(deepspeed=str(REPOSITORY / "configs/zero3.json")), BF16
    assert "all models or none" in error_of(set_launch_variables, *models)
    environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2"}
    environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = OURS
    set_launch_variables(*models)
    assert environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == OURS
    assert [deepspeed_plugin(args).zero_stage for args in models] == [3, 2]
