"""The seconds of each phase of a step, with a clock that only the tests change."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm.training import profiler as profiler_module
from lm.training.arguments import TrainingArguments
from lm.training.profiler import KEPT_TRACES, StepProfiler

# Powers of two: sums of different phases are exact and different.
SECONDS = {"data": 0.25, "forward": 1.0, "backward": 2.0, "optimizer": 0.5}
TIMED = profiler_module  # `clock` replaces its time


def profiler_of(accelerator, folder: Path, **flags) -> StepProfiler:
    args = TrainingArguments(**{"profile": True, "profile_interval": 2} | flags)
    return StepProfiler(accelerator, folder, args)


def run_step(profiler: StepProfiler, work: Callable[[float], None], step: int):
    """Take an optimizer step as `lm.training.run` does. Each phase takes SECONDS in the first
    micro-batch, twice SECONDS in the second and so on; the optimizer takes SECONDS once."""
    profiler.begin_step(step)
    for i in range(1, profiler.args.accumulation_steps + 1):
        for phase in ("data", "forward", "backward"):
            profiler.phase(phase)
            work(SECONDS[phase] * i)
    profiler.phase("optimizer")
    work(SECONDS["optimizer"])
    return profiler.end_step(step)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_phase_gets_its_seconds_and_the_phases_add_up_to_the_step(
    accelerator, tmp_path, clock, monkeypatch, device
):
    """A GPU works asynchronously: its seconds pass when the profiler waits for it."""
    waiting = []

    def synchronize() -> None:
        clock.now += sum(waiting)
        waiting.clear()

    def work(seconds: float) -> None:
        waiting.append(seconds)
        if device == "cpu":
            synchronize()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    place = {"device": torch.device(device), "process_index": 0}
    here = SimpleNamespace(**place, profile=accelerator.profile)
    profiler = profiler_of(here, tmp_path, accumulation_steps=3)
    assert run_step(profiler, work, 1) is None
    for step in (2, 4):  # step 4 contains nothing of step 2
        seconds, _ = run_step(profiler, work, step)
        phases = {"data": 1.5, "forward": 6.0, "backward": 12.0, "optimizer": 0.5}
        assert seconds == phases | {"step": 20.0}
        work(100)  # between two steps


def test_a_line_names_the_trace_and_each_process_keeps_the_newest(accelerator, tmp_path, clock):
    for step in range(KEPT_TRACES + 1):
        (tmp_path / f"step-{step:08d}-rank0.json.gz").touch()
    (tmp_path / "step-00000000-rank1.json.gz").touch()

    def work(seconds: float) -> None:
        clock.now += seconds

    _, line = run_step(profiler_of(accelerator, tmp_path, accumulation_steps=4), work, 100)
    trace = tmp_path / "step-00000100-rank0.json.gz"
    assert line == (
        "profile of step 100: 33.000 s  data 2.500 s (7.6%)  forward 10.000 s (30.3%)  "
        f"backward 20.000 s (60.6%)  optimizer 0.500 s (1.5%)  trace: {trace}"
    )
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("forward") == names.count("optimizer") == 1  # the last micro-batch
    kept = sorted(path.name for path in tmp_path.glob("*-rank0.json.gz"))
    assert (kept[0], len(kept)) == ("step-00000002-rank0.json.gz", KEPT_TRACES)
    assert (tmp_path / "step-00000000-rank1.json.gz").exists()
    (tmp_path / "file").touch()  # a file where the folder should be
    _, report = run_step(profiler_of(accelerator, tmp_path / "file"), work, 2)
    assert "TRACE NOT WRITTEN: " in report
