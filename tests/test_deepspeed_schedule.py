"""The scheduler of a DeepSpeed file becomes the schedule of a run that types none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine.deepspeed_config import take_schedule

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
ARGS = TrainingArguments(learning_rate=3e-4)


def scheduler(kind, **params) -> dict:
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("hugging_face_zero2", "constant"),
        ("hugging_face_zero3", "linear"),
    ],
)
def test_the_autos_of_the_guides_leave_numbers_to_the_flags(name, schedule):
    config = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    args, said = take_schedule(config, ARGS, "their.json")
    min_lr_ratio = 0 if schedule == "linear" else ARGS.min_lr_ratio
    assert args == replace(ARGS, lr_schedule=schedule, min_lr_ratio=min_lr_ratio)
    assert said.startswith(config["scheduler"]["type"] + " of their.json")
    assert f"--lr_schedule {schedule}" in said
    assert said.endswith("the warm-up is linear here")


@pytest.mark.parametrize(
    ("config", "taken"),
    [
        (scheduler("WarmupLR"), {"lr_schedule": "constant", "warmup_steps": 1000}),
        (
            scheduler("WarmupLR", warmup_num_steps=7, warmup_max_lr=3e-4, last_batch_iteration=-1),
            {"lr_schedule": "constant", "warmup_steps": 7},
        ),
        (
            scheduler("WarmupDecayLR", warmup_num_steps=7, total_num_steps=90),
            {"lr_schedule": "linear", "warmup_steps": 7, "max_steps": 90, "min_lr_ratio": 0},
        ),
        (
            scheduler("WarmupCosineLR", warmup_num_steps="auto", total_num_steps="auto"),
            {"lr_schedule": "cosine", "min_lr_ratio": 0.0001},
        ),
    ],
)
def test_the_numbers_of_a_file_are_those_of_the_run(config, taken):
    args, said = take_schedule(config, ARGS)
    assert args == replace(ARGS, **taken)
    assert all(f"--{flag} {value}" in said for flag, value in taken.items())
    again, _ = take_schedule(config, args)  # typed as well, and the same
    assert again == args


def test_without_a_scheduler_the_flag_decides_and_a_cosine_is_the_default():
    for config in (None, {"zero_optimization": {"stage": 2}}):
        assert take_schedule(config, ARGS) == (replace(ARGS, lr_schedule="cosine"), None)
        wsd = replace(ARGS, lr_schedule="wsd")
        assert take_schedule(config, wsd) == (wsd, None)


@pytest.mark.parametrize(
    ("config", "typed", "named"),
    [
        (scheduler("WarmupLR"), {"lr_schedule": "cosine"}, "--lr_schedule constant"),
        (scheduler("WarmupLR", warmup_num_steps=7), {"warmup_steps": 8}, "the flags say 8"),
        (scheduler("WarmupLR", warmup_max_lr=1e-3), {}, "--learning_rate 0.001"),
        (scheduler("WarmupDecayLR", total_num_steps=9), {"max_steps": 8}, "--max_steps 9"),
        (scheduler("WarmupDecayLR"), {"min_lr_ratio": 0.5}, "--min_lr_ratio 0"),
        (scheduler("WarmupLR", warmup_min_lr=1e-5), {}, "begins at 0 here"),
        (scheduler("WarmupLR", warmup_nun_steps=1), {}, "warmup_num_steps"),
        (scheduler("OneCycle"), {}, "WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        ({"scheduler": {"type": "WarmupLR", "params": 3}}, {}, "must be a section"),
    ],
)
def test_another_curve_and_a_flag_that_contradicts_are_refused(config, typed, named):
    with pytest.raises(UsageError, match=r"my\.json") as error:
        take_schedule(config, replace(ARGS, **typed), "my.json")
    assert named in str(error.value)
