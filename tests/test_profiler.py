"""Where a step's time goes, by a clock that moves when a test says so."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from training import profiler as profiler_module
from training.arguments import TrainingArguments
from training.profiler import KEPT_TRACES, PHASES, StepProfiler

# Sums of powers of two: exact, and no two of them alike.
SECONDS = {"data": 0.25, "forward": 1.0, "backward": 2.0, "optimizer": 0.5}


class Clock:
    """In place of the module `time`: stands still until told otherwise."""

    def __init__(self):
        self.now, self.asked = 1000.0, 0

    def perf_counter(self) -> float:
        self.asked += 1
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profiler_module, "time", clock)
    return clock


class DeepSpeedEngine:
    """Steps inside backward, as DeepSpeed's engine does."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def get_global_grad_norm(self) -> float:
        return 1.0

    def step(self) -> str:
        self.clock.now += SECONDS["optimizer"]
        return "stepped"


def profiler_of(accelerator, folder: Path, model=None, **flags) -> StepProfiler:
    args = TrainingArguments(**{"profile": True, "profile_interval": 2} | flags)
    return StepProfiler(accelerator, model, folder, args)


def run_step(
    profiler: StepProfiler,
    clock: Clock,
    step: int,
    accumulation_steps: int = 1,
    engine: DeepSpeedEngine | None = None,
):
    """An optimizer step as `training.run` takes it; ends in end_step's answer.

    The clock moves by SECONDS in the first micro-batch, twice as much in the second and so on.
    """
    profiler.begin_step(step)
    profiler.phase("data")
    for i in range(accumulation_steps):
        profiler.phase("forward")
        clock.now += SECONDS["forward"] * (i + 1)
        profiler.phase("data")  # of the next one
        clock.now += SECONDS["data"] * (i + 1)
        profiler.phase("backward")
        clock.now += SECONDS["backward"] / 2 * (i + 1)
        if engine is not None and i == accumulation_steps - 1:
            assert engine.step() == "stepped"
        clock.now += SECONDS["backward"] / 2 * (i + 1)
    profiler.phase("optimizer")
    if engine is None:
        clock.now += SECONDS["optimizer"]
    return profiler.end_step(step)


def expected(accumulation_steps: int) -> dict[str, float]:
    """What `run_step` takes."""
    times = sum(range(1, accumulation_steps + 1))
    seconds = {phase: SECONDS[phase] * times for phase in PHASES}
    seconds["optimizer"] = SECONDS["optimizer"]
    return seconds | {"step": sum(seconds.values())}


def events(trace: Path) -> list[str]:
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


def test_between_measured_steps_nothing_is_measured(accelerator, tmp_path, clock):
    """The clock is not even looked at."""
    engine = DeepSpeedEngine(clock)
    profiler = profiler_of(accelerator, tmp_path / "profile", engine, profile_interval=3)
    measured = []
    for step in range(1, 7):
        before = clock.asked
        measured.append(run_step(profiler, clock, step, engine=engine) is not None)
        assert (clock.asked > before) == measured[-1]
    assert measured == [False, False, True, False, False, True]


def test_without_the_flag_there_is_no_profile_at_all(accelerator, tmp_path, clock):
    profiler = profiler_of(accelerator, tmp_path / "profile", profile=False, profile_interval=1)
    assert run_step(profiler, clock, 1) is None
    assert clock.asked == 0
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_phases_take_the_time_they_took_and_add_up_to_the_step(
    accelerator, tmp_path, clock, accumulation_steps
):
    profiler = profiler_of(accelerator, tmp_path, accumulation_steps=accumulation_steps)
    for step in (2, 4):  # and nothing of the one is counted in the other
        seconds, _ = run_step(profiler, clock, step, accumulation_steps)
        assert seconds == expected(accumulation_steps)
        assert sum(seconds[phase] for phase in PHASES) == seconds["step"]
        clock.now += 100  # between two steps


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_the_step_that_deepspeed_takes_inside_backward_counts_as_optimizer(
    accelerator, tmp_path, clock, accumulation_steps
):
    engine = DeepSpeedEngine(clock)
    profiler = profiler_of(accelerator, tmp_path, engine, accumulation_steps=accumulation_steps)
    seconds, _ = run_step(profiler, clock, 2, accumulation_steps, engine)
    assert seconds == expected(accumulation_steps)
    assert sum(seconds[phase] for phase in PHASES) == seconds["step"]


def test_starting_the_trace_is_part_of_the_step_and_of_no_phase(
    accelerator, tmp_path, clock, monkeypatch
):
    started, profile = [], accelerator.profile

    def slow(handler):
        clock.now += 8
        started.append(clock.now)
        return profile(handler)

    monkeypatch.setattr(accelerator, "profile", slow)
    seconds, _ = run_step(profiler_of(accelerator, tmp_path), clock, 2)
    assert len(started) == 1
    assert seconds == expected(1) | {"step": expected(1)["step"] + 8}


def test_a_gpus_work_belongs_to_the_phase_that_asked_for_it(
    accelerator, tmp_path, clock, monkeypatch
):
    """A GPU works later than it is asked to: each phase waits for it before it ends."""
    waiting = []

    def synchronize() -> None:
        clock.now += sum(waiting)
        waiting.clear()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    on_gpu = SimpleNamespace(
        device=torch.device("cuda"), process_index=0, profile=accelerator.profile
    )
    profiler = profiler_of(on_gpu, tmp_path)
    waiting.append(64.0)  # of the step before
    profiler.begin_step(2)
    for phase in PHASES:
        profiler.phase(phase)
        waiting.append(SECONDS[phase])
    seconds, _ = profiler.end_step(2)
    assert seconds == expected(1)


def test_deepspeeds_engine_is_left_as_it_was(accelerator, tmp_path, clock):
    engine = DeepSpeedEngine(clock)
    profiler = profiler_of(accelerator, tmp_path, engine)
    run_step(profiler, clock, 2, engine=engine)
    assert vars(engine) == {"clock": clock}
    assert engine.step() == "stepped"
    seconds, _ = run_step(profiler, clock, 4, engine=engine)
    assert seconds == expected(1)


def test_the_trace_can_be_opened_and_names_the_phases(accelerator, tmp_path, clock):
    run_step(profiler_of(accelerator, tmp_path / "profile"), clock, 2)
    (trace,) = (tmp_path / "profile").glob("*.gz")
    assert trace.name == "step-00000002-rank0.json.gz"
    assert set(PHASES) <= set(events(trace))


def test_the_trace_holds_the_last_micro_batch_alone(accelerator, tmp_path, clock):
    profiler = profiler_of(accelerator, tmp_path, accumulation_steps=4)
    run_step(profiler, clock, 2, accumulation_steps=4)
    (trace,) = tmp_path.glob("*.gz")
    assert events(trace).count("forward") == 1
    assert events(trace).count("optimizer") == 1


def test_only_the_newest_traces_of_a_process_are_kept(accelerator, tmp_path, clock):
    for step in range(KEPT_TRACES + 1):
        (tmp_path / f"step-{step:08d}-rank0.json.gz").touch()
        (tmp_path / f"step-{step:08d}-rank0.txt").touch()
    (tmp_path / "step-00000000-rank1.json.gz").touch()
    run_step(profiler_of(accelerator, tmp_path), clock, 100)
    for kind in ("json.gz", "txt"):
        kept = sorted(path.name for path in tmp_path.glob(f"*-rank0.{kind}"))
        assert kept[0] == f"step-00000002-rank0.{kind}"
        assert kept[-1] == f"step-00000100-rank0.{kind}"
        assert len(kept) == KEPT_TRACES
    assert (tmp_path / "step-00000000-rank1.json.gz").exists()


def test_a_trace_that_cannot_be_written_is_said_and_the_seconds_are_there(
    accelerator, tmp_path, clock
):
    (tmp_path / "profile").touch()  # where the folder would be
    seconds, report = run_step(profiler_of(accelerator, tmp_path / "profile"), clock, 2)
    assert seconds == expected(1)
    assert "TRACE NOT WRITTEN: " in report


def test_one_line_names_the_phases_and_the_files_of_operators_and_trace(
    accelerator, tmp_path, clock
):
    _, line = run_step(profiler_of(accelerator, tmp_path), clock, 2)
    table, trace = (tmp_path / f"step-00000002-rank0.{kind}" for kind in ("txt", "json.gz"))
    assert line == (
        "profile of step 2: 3.750 s  data 0.250 s (6.7%)  forward 1.000 s (26.7%)  "
        f"backward 2.000 s (53.3%)  optimizer 0.500 s (13.3%)  operators: {table}  trace: {trace}"
    )
    first, *rest = table.read_text(encoding="utf-8").splitlines()
    assert first.startswith("Step 2, its last micro-batch and the optimizer alone")
    assert "Self CPU" in "\n".join(rest)
    assert trace.exists()
