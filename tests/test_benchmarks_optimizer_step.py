from types import SimpleNamespace

import pytest
import torch

from benchmarks import optimizer_step

SHAPE = ["--dim", "32", "--n_layers", "1", "--n_heads", "2", "--max_seq_len", "16"]


class FakeStep:
    """Forward and backward take as many seconds of a fake clock, the update half a second."""

    device = torch.device("cpu")

    def __init__(self, name, seconds, clock, order):
        self.name, self.seconds, self.clock, self.order = name, seconds, clock, order

    def step(self):
        self.forward_backward()
        self.update()

    def forward_backward(self):
        self.order.append(self.name)
        self.clock[0] += self.seconds

    def update(self):
        self.clock[0] += 0.5


@pytest.fixture
def clock(monkeypatch):
    time = [0.0]
    fake = SimpleNamespace(perf_counter=lambda: time[0])
    monkeypatch.setattr(optimizer_step, "time", fake)
    return time


def test_turns_are_taken_one_after_the_other_and_the_update_is_part_of_a_step(clock):
    order = []
    steps = {name: FakeStep(name, n, clock, order) for name, n in (("adamw", 1), ("muon", 2))}
    seconds = optimizer_step.measure(steps, 2)
    assert seconds == {"adamw": [(1.5, 0.5)] * 2, "muon": [(2.5, 0.5)] * 2}
    assert order == ["adamw", "muon"] * (optimizer_step.WARMUP + 2)


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    # The machine is three times as slow in the last round, for both.
    seconds = {"adamw": [(1.0, 0.1), (1.0, 0.1), (3.0, 0.3)]}
    seconds["muon"] = [(1.1, 0.2), (1.2, 0.2), (3.3, 0.6)]
    said = optimizer_step.describe(seconds)
    assert "adamw: 1000.0 ms per step, 100.0 ms of it the update" in said
    assert "a step with Muon takes 1.100 as long as one with AdamW" in said


def test_both_optimizers_are_measured_on_the_work_that_was_asked_for(capsys, monkeypatch):
    made = []

    def our_step(work, compiled, optimizer):
        made.append((work.dim, work.seq_len, work.batch_size, compiled, optimizer))
        return FakeStep(optimizer, 1, [0], [])

    monkeypatch.setattr(optimizer_step, "OurStep", our_step)
    monkeypatch.setattr(optimizer_step, "obstacle", lambda device: None)
    turns = {"adamw": [(1.0, 0.5)], "muon": [(2.0, 1.0)]}
    monkeypatch.setattr(optimizer_step, "measure", lambda steps, rounds: turns)
    optimizer_step.main([*SHAPE, "--batch_size", "1", "--rounds", "2"])
    assert made == [(32, 16, 1, True, "adamw"), (32, 16, 1, True, "muon")]
    assert "a step with Muon takes 2.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dim 7", "dim 7 is not divisible"),
        ("--batch_size 0", "--batch_size: whole numbers from 1 on, not '0'"),
        ("--rounds 0", "--rounds: whole numbers from 1 on, not '0'"),
        ("--accumulation_steps 8", "unrecognized argument --accumulation_steps"),
        ("--optimizer muon", "unrecognized argument --optimizer"),
    ],
)
def test_a_flag_that_is_wrong_or_would_be_ignored_is_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        optimizer_step.main(flags.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.optimizer_step: error: ")
    assert said in error
    assert error.count("\n") == 1


def test_without_a_working_compiler_nothing_runs_uncompiled_in_silence(monkeypatch, capsys):
    monkeypatch.setattr(optimizer_step, "obstacle", lambda device: "no compiler")
    with pytest.raises(SystemExit) as ended:
        optimizer_step.main([*SHAPE, "--batch_size", "1"])
    assert ended.value.code == 2
    assert "cannot compile: no compiler" in capsys.readouterr().err


def test_help_is_its_own(capsys):
    with pytest.raises(SystemExit) as ended:
        optimizer_step.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "benchmarks.optimizer_step" in shown
    assert "--resume" not in shown
