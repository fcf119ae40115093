"""Launcher and DeepSpeed file decide flags that are not typed; contradictions are refused."""

import json
import os
from types import SimpleNamespace

import pytest
import yaml
from conftest import error_of

from lm.engine import accelerate_flags
from lm.engine.accelerate_flags import chosen_precision, reading_notes, with_accelerate_flags

DEFAULT_FILE = "accelerate.commands.config.config_args.default_config_file"


@pytest.fixture(autouse=True)
def environ(monkeypatch, tmp_path):
    """An environment without a launcher, and without a default file of Accelerate."""
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    monkeypatch.setattr(DEFAULT_FILE, "none.yaml")
    return os.environ


@pytest.fixture
def file(tmp_path):
    """Writes a DeepSpeed file with these sections; returns its path."""

    def write(**sections) -> str:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | sections))
        return str(path)

    return write


def scheduler(kind: str, **params) -> dict:
    return {"scheduler": {"type": kind, "params": params}}


AUTO = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")


@pytest.mark.parametrize(
    ("section", "flags"),
    [
        (scheduler("WarmupLR", **AUTO), {"lr_schedule": "constant"}),
        (
            scheduler("WarmupLR", warmup_max_lr=3e-4, warmup_num_steps=7, warmup_type="log"),
            {"lr_schedule": "constant", "warmup_steps": 7, "learning_rate": 3e-4},
        ),
        (
            scheduler("WarmupDecayLR", warmup_num_steps="auto", total_num_steps=90),
            {"lr_schedule": "linear", "min_lr_ratio": 0, "learning_rate": 1e-3, "max_steps": 90},
        ),
        (
            scheduler("WarmupCosineLR", total_num_steps="auto", cos_min_ratio=0.2),
            {"lr_schedule": "cosine", "min_lr_ratio": 0.2, "warmup_steps": 1000},
        ),
        (
            scheduler("WarmupCosineLR") | {"optimizer": {"params": {"lr": 2e-4}}},
            {"lr_schedule": "cosine", "min_lr_ratio": 1e-4, "warmup_steps": 1000}
            | {"learning_rate": 2e-4},
        ),
        ({"bf16": {"enabled": True}}, {"dtype": "bfloat16"}),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, {"dtype": "float16"}),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {}),
    ],
)
def test_a_deepspeed_file_decides_flags_that_are_not_typed(environ, file, section, flags):
    typed = {"deepspeed": file(**section), "batch_size": 2}
    assert with_accelerate_flags(typed) == typed | flags
    assert with_accelerate_flags(typed | flags) == typed | flags  # the same values may be typed
    assert with_accelerate_flags({}) == {}
    environ |= {"ACCELERATE_DEEPSPEED_CONFIG_FILE": typed["deepspeed"]}
    assert with_accelerate_flags({}) == {}  # the launcher uses another engine
    environ |= {"ACCELERATE_USE_DEEPSPEED": "true"}
    assert with_accelerate_flags({}) == flags


@pytest.mark.parametrize(
    ("section", "typed", "says"),
    [
        (scheduler("WarmupLR"), {"lr_schedule": "wsd"}, "type --lr_schedule constant"),
        (scheduler("WarmupLR"), {"warmup_steps": 5}, "leave it out, or type --warmup_steps 1000"),
        (scheduler("WarmupDecayLR", total_num_steps=9), {"epochs": 2}, "--epochs contradicts"),
        (scheduler("WarmupLR", warmup_num_steps=0.1), {}, "0.1 steps, not a whole number"),
        (scheduler("OneCycle"), {}, "must be one of WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        ({"scheduler": {"type": "WarmupLR", "param": {}}}, {}, 'drop "scheduler.param"'),
        (scheduler("WarmupLR", warmup_min_lr=1e-6), {}, '"scheduler.params.warmup_min_lr"'),
        (scheduler("WarmupLR", warmup_steps=5), {}, '"scheduler.params.warmup_steps"'),
        (scheduler("WarmupLR", warmup_num_steps="5"), {}, '"scheduler.params.warmup_num_steps"'),
        ({"fp16": {"enabled": True}}, {"dtype": "bfloat16"}, "type --dtype float16"),
    ],
)
def test_a_file_that_contradicts_or_cannot_be_followed_is_refused(file, section, typed, says):
    line = error_of(with_accelerate_flags, {"deepspeed": file(**section)} | typed)
    assert says in line
    assert "ds.json" in line


def test_without_bf16_the_default_precision_is_fp32(file):
    typed = {"deepspeed": file(bfloat16={"enabled": False}, fp16={"enabled": "auto"})}
    assert with_accelerate_flags(typed) == typed | {"dtype": "float32"}
    half = {"dtype": "float16"}
    assert with_accelerate_flags(typed | half)["dtype"] == "float16"
    assert with_accelerate_flags(typed, saved=half)["dtype"] == "float16"  # of a resumed run
    assert '"bf16" is off, so the default of --dtype is float32' in reading_notes(typed)


def test_the_start_of_a_run_says_how_a_file_is_read(file):
    zero = {"stage": 2, "stage3_max_live_parameters": 1e7, "zero_hpz_partition_size": 2}
    sections = scheduler("WarmupLR", warmup_num_steps=20) | {"bfloat16": {"enabled": "auto"}}
    path = file(zero_optimization=zero, **sections)
    assert reading_notes({"deepspeed": path}) == (
        f'{path}: "bfloat16" is read as "bf16"; WarmupLR is --lr_schedule constant '
        "--warmup_steps 20, and its warm-up is linear here; at stage 2 these have no effect: "
        "stage3_max_live_parameters, zero_hpz_partition_size"
    )
    assert reading_notes({"deepspeed": file()}) is None
    assert reading_notes({}) is None


@pytest.fixture
def parent(monkeypatch):
    """Makes the parent process one with this command."""

    def start(command: str) -> None:
        process = SimpleNamespace(cmdline=command.split)
        child = SimpleNamespace(parent=lambda: process)
        monkeypatch.setattr(accelerate_flags.psutil, "Process", lambda: child)

    return start


@pytest.mark.parametrize(
    ("command", "precision"),
    [
        ("accelerate launch --multi_gpu train.py", None),  # Accelerate's default
        ("/usr/bin/python /venv/bin/accelerate launch --mixed_precision no train.py", "no"),
        ("python -m accelerate.commands.launch --mixed_precision=no train.py", "no"),
        ("/venv/bin/accelerate-launch --mixed_precision no train.py", "no"),
        ("python -m accelerate.commands.accelerate_cli launch --mixed_precision no train.py", "no"),
        ("accelerate launch train.py --mixed_precision no", None),  # the program's own flag
        ("bash launch --mixed_precision no train.sh", None),
    ],
)
def test_the_command_of_the_launcher_tells_no_precision_from_none(
    environ, parent, command, precision
):
    parent(command)
    assert chosen_precision() is None  # Accelerate sets a variable
    environ["ACCELERATE_MIXED_PRECISION"] = "no"
    assert chosen_precision() == precision


def test_the_launchers_file_tells_it_too(environ, parent, tmp_path, monkeypatch):
    environ["ACCELERATE_MIXED_PRECISION"] = "no"
    path = tmp_path / "launch.yaml"
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
    for mixed_precision in ("no", None):
        path.write_text(yaml.safe_dump(content | {"mixed_precision": mixed_precision}))
        parent(f"accelerate launch --config_file {path} train.py")
        assert chosen_precision() == mixed_precision
    path.write_text(yaml.safe_dump(content | {"mixed_precision": "no"}))
    monkeypatch.setattr(DEFAULT_FILE, str(path))
    parent("accelerate launch --cpu train.py")
    assert chosen_precision() == "no"


def test_a_compiler_that_accelerate_would_not_pass_to_deepspeed_is_noted(environ, parent):
    environ |= {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_DEEPSPEED": "true"}
    parent("accelerate launch --use_deepspeed --dynamo_backend inductor train.py")
    assert chosen_precision() == "bf16"
    assert environ["ACCELERATE_DYNAMO_BACKEND"] == "inductor"


def test_the_launchers_accumulation_and_clipping_count(environ):
    environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"
    environ["ACCELERATE_GRADIENT_CLIPPING"] = "0.5"
    flags = {"accumulation_steps": 2, "grad_clip": 0.5}
    assert with_accelerate_flags({}) == flags
    saved = {"accumulation_steps": 4, "seed": 7}  # of a resumed run
    assert with_accelerate_flags({}, saved=saved) == saved | flags
    line = error_of(with_accelerate_flags, {"accumulation_steps": 8})
    assert line.endswith("or type --accumulation_steps 2")
    environ |= {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}
    assert with_accelerate_flags({"accumulation_steps": 8})["accumulation_steps"] == 8


def test_a_typed_precision_must_be_the_launchers(environ):
    environ |= {"ACCELERATE_MIXED_PRECISION": "fp16"}
    assert with_accelerate_flags({}) == {"dtype": "float16"}
    assert "or type --dtype float16" in error_of(with_accelerate_flags, {"dtype": "float32"})
    assert with_accelerate_flags({}, "no") == {"dtype": "float32"}  # of a launcher that will start
    environ |= {"ACCELERATE_MIXED_PRECISION": "fp8"}
    said = "mixed_precision fp8 of the launcher: take bf16, fp16 or no"
    assert error_of(with_accelerate_flags, {}) == said
