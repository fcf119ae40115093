import gzip
import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from training.arguments import TrainingArguments
from training.profiler import PHASES, StepProfiler

MILLISECONDS = {"data": 10, "forward": 30, "backward": 60, "optimizer": 20}


class DeepSpeedEngine:
    """Steps inside backward, as DeepSpeed's engine does."""

    def get_global_grad_norm(self) -> float:
        return 1.0

    def step(self) -> str:
        time.sleep(MILLISECONDS["optimizer"] / 1000)
        return "stepped"


def profiler_of(accelerator, folder: Path, model=None, **flags) -> StepProfiler:
    args = TrainingArguments(**{"profile": True, "profile_interval": 2} | flags)
    return StepProfiler(accelerator, model, folder, args)


def run_step(profiler: StepProfiler, step: int, accumulation_steps: int = 1, engine=None):
    """An optimizer step whose phases sleep for known times; ends in end_step's answer."""
    profiler.begin_step(step)
    for i in range(accumulation_steps):
        last = i == accumulation_steps - 1
        for phase in PHASES:
            with profiler.phase(phase):
                if phase != "optimizer" or (engine is None and last):
                    time.sleep(MILLISECONDS[phase] / 1000)
                if phase == "backward" and engine is not None and last:
                    engine.step()
    return profiler.end_step(step)


def events(trace: Path) -> list[str]:
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


def test_between_measured_steps_nothing_is_measured(accelerator, tmp_path):
    profiler = profiler_of(accelerator, tmp_path / "profile", profile_interval=3)
    assert [run_step(profiler, step) is not None for step in range(1, 7)] == [
        *(False, False, True),
        *(False, False, True),
    ]
    profiler.begin_step(1)
    assert isinstance(profiler.phase("forward"), nullcontext)


def test_without_the_flag_there_is_no_profile_at_all(accelerator, tmp_path):
    profiler = profiler_of(accelerator, tmp_path / "profile", profile=False, profile_interval=1)
    assert run_step(profiler, 1) is None
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_phases_take_the_time_they_took_and_add_up_to_the_step(
    accelerator, tmp_path, accumulation_steps
):
    profiler = profiler_of(accelerator, tmp_path, accumulation_steps=accumulation_steps)
    seconds, _ = run_step(profiler, 2, accumulation_steps)
    for phase, milliseconds in MILLISECONDS.items():
        times = 1 if phase == "optimizer" else accumulation_steps
        assert seconds[phase] >= times * milliseconds / 1000
    total = sum(seconds[phase] for phase in PHASES)
    assert total <= seconds["step"]


def test_the_step_that_deepspeed_takes_inside_backward_counts_as_optimizer(accelerator, tmp_path):
    engine = DeepSpeedEngine()
    profiler = profiler_of(accelerator, tmp_path, model=engine)
    seconds, _ = run_step(profiler, 2, engine=engine)
    assert seconds["optimizer"] >= MILLISECONDS["optimizer"] / 1000
    assert seconds["backward"] >= MILLISECONDS["backward"] / 1000
    assert seconds["backward"] + seconds["optimizer"] <= seconds["step"]


def test_deepspeeds_engine_is_left_as_it_was(accelerator, tmp_path):
    engine = DeepSpeedEngine()
    profiler = profiler_of(accelerator, tmp_path, model=engine)
    run_step(profiler, 2, engine=engine)
    assert vars(engine) == {}
    assert engine.step() == "stepped"
    assert run_step(profiler, 4, engine=engine) is not None


def test_the_trace_can_be_opened_and_names_the_phases(accelerator, tmp_path):
    run_step(profiler_of(accelerator, tmp_path / "profile"), 2)
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "step-00000002-rank0.json.gz"
    assert set(PHASES) <= set(events(trace))


def test_the_trace_holds_the_last_micro_batch_alone(accelerator, tmp_path):
    run_step(profiler_of(accelerator, tmp_path, accumulation_steps=4), 2, accumulation_steps=4)
    (trace,) = tmp_path.iterdir()
    assert events(trace).count("forward") == 1


def test_the_report_names_phases_operators_and_the_trace(accelerator, tmp_path):
    _, report = run_step(profiler_of(accelerator, tmp_path), 2)
    assert report.startswith("profile of step 2: ")
    assert all(phase in report.splitlines()[0] for phase in PHASES)
    assert "Self CPU" in report
    assert str(next(tmp_path.iterdir())) in report
