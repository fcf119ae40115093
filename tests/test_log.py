"""The log of a run: mean losses, speed, lines and rows."""

import json
import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm.storage.folder import RunFolder
from lm.training import log as log_module
from lm.training.arguments import TrainingArguments
from lm.training.log import TrainingLog
from lm.training.loss_meter import LossMeter
from lm.training.starting_point import StartingPoint
from model import LMConfig

NAN, INF = float("nan"), float("inf")
VALIDATION = {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 0.9, "samples": 3}


def take_step(meter: LossMeter, *losses: float, weight: float = 1.0, norm=0.5) -> None:
    """Take a step with a micro-batch for each loss."""
    for loss in losses:
        meter.add(weight, loss=torch.tensor(loss))
    meter.end_step(norm)


def test_means_are_over_every_target_of_all_processes_since_the_last_report(
    accelerator, monkeypatch
):
    others = torch.tensor((3.5, 0.5))  # the sums of weighted losses and of weights
    meter = LossMeter(accelerator)
    monkeypatch.setattr(accelerator, "reduce", others.add)
    take_step(meter, 1.0, weight=0.5)
    take_step(meter, 3.0)
    assert meter.take()["loss"] == pytest.approx((0.5 + 3 + 3.5) / (0.5 + 1 + 0.5))
    monkeypatch.undo()
    meter = LossMeter(accelerator, ("hard_loss", "agreement"))
    for weight, loss in ((1.0, 2.0), (0.5, 8.0)):
        parts = {"agreement": torch.tensor(loss / 16), "hard_loss": torch.tensor(loss / 2)}
        meter.add(weight, loss=torch.tensor(loss), **parts)
    meter.end_step(0.5)
    expected = {"loss": 6 / 1.5, "hard_loss": 3 / 1.5, "agreement": 0.375 / 1.5}
    assert meter.take() == pytest.approx(expected)
    take_step(meter)  # without any target
    assert meter.take()["loss"] is None


@pytest.mark.parametrize("bad", [NAN, torch.tensor(INF)])
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(accelerator, bad):
    meter, counts = LossMeter(accelerator), []
    for loss, norm in [(5.0, 1.0), (NAN, bad), (7.0, bad), (2.0, torch.tensor(1.0))]:
        take_step(meter, loss, norm=norm)
        counts.append((int(meter.skipped_steps), int(meter.bad_in_row)))
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 0)]
    assert meter.worst_in_row == 2
    assert meter.take()["loss"] == 3.5


def test_a_resumed_meter_gives_the_same_means_without_the_unfinished_step(accelerator):
    meter, resumed = (LossMeter(accelerator, ("soft_loss",)) for _ in range(2))
    for weight in (0.1, 0.7):
        meter.add(weight, loss=torch.tensor(2.7), soft_loss=torch.tensor(0.9))
        meter.end_step(0.5)
    meter.add(1.0, loss=torch.tensor(9.0), soft_loss=torch.tensor(9.0))
    state = meter.state()
    assert state.keys() == {"log.loss", "log.soft_loss", "log.weight", "log.skipped_steps"}
    resumed.load_state([state], rank=0)
    assert resumed.state() == state
    meter.end_step(INF)
    assert resumed.take() == meter.take()


TIMED = log_module  # `clock` replaces its time


@pytest.fixture
def start(accelerator, tmp_path, clock):
    """Makes and opens a TrainingLog; closes it after the test."""
    made = []

    def start(log_interval=1, total_steps=100, first_step=1, name="") -> TrainingLog:
        inputs = SimpleNamespace(
            args=TrainingArguments(batch_size=8, log_interval=log_interval, log_with="none"),
            start=StartingPoint(RunFolder(tmp_path), state={"step": first_step - 1}),
            train_set=SimpleNamespace(tokens_per_sample=80, samples_per_epoch=800),
            config=LMConfig(),
            flops_per_token=1000,
            total_steps=total_steps,
        )
        made.append(TrainingLog(inputs, accelerator, name))
        made[-1].open()
        return made[-1]

    yield start
    for log in made:
        log.close()


def rows(path: Path) -> list[dict]:
    text = (path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n") or not text
    # Other programs reject constants such as NaN, which are not JSON.
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


@pytest.fixture
def feed(clock):
    """Takes a step with one micro-batch of 640 tokens."""

    def feed(log, step: int, loss: float = 1.0, grad_norm: float = 0.5, seconds=1.0) -> None:
        clock.now += seconds
        log.meter.add(1.0, loss=torch.tensor(loss))
        log.end_step(step, 1e-3, grad_norm=grad_norm)

    return feed


@pytest.mark.parametrize(("first_step", "reported"), [(1, [1, 4, 8, 11]), (3, [4, 8, 11])])
def test_first_last_and_every_nth_step_are_reported(start, feed, tmp_path, first_step, reported):
    """A resume's first step is reported only if it is the last or a multiple of log_interval."""
    log = start(log_interval=4, total_steps=11, first_step=first_step)
    for step in range(first_step, 12):
        feed(log, step, float(step))
    assert [row["step"] for row in rows(tmp_path)] == reported
    assert rows(tmp_path)[-1]["loss"] == (9 + 10 + 11) / 3


@pytest.mark.parametrize("first_step", [1, 3, 4])
def test_speed_excludes_the_first_step_and_pauses_but_time_left_includes_pauses(
    start, feed, clock, tmp_path, capsys, first_step
):
    log = start(log_interval=2, total_steps=12, first_step=first_step)
    feed(log, first_step, seconds=1000)  # it compiles
    said = capsys.readouterr().out
    assert "left" not in said
    assert "tokens/s" not in said
    with log.pause():
        clock.now += 50
    for step in (first_step + 1, first_step + 2):
        with log.pause():
            clock.now += 2
        feed(log, step, seconds=6)
    last = next(row for row in rows(tmp_path) if row["step"] > first_step)
    steps = last["step"] - first_step
    assert last["step_seconds"] == 6.0
    assert last["tokens_per_second"] == pytest.approx(640 / 6, abs=0.1)
    left = (50 + 8 * steps) / steps * (12 - last["step"])
    assert f"left {timedelta(seconds=int(left))}" in capsys.readouterr().out


def test_a_log_line_has_loss_learning_rate_norm_speed_and_time_left(start, feed, tmp_path, capsys):
    log = start(name="small")
    for step, loss, norm in ((1, 3.5, 0.5), (2, 2.5, 0.5), (3, NAN, NAN)):
        feed(log, step, loss, norm)
    _, line, skipped = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"small  step 2/100  loss 2\.5000  lr 1\.00e-03  grad_norm 0\.500  640 tokens/s  "
        r"left 0:01:38",
        line,
    )
    assert "loss n/a" in skipped
    assert skipped.endswith("  skipped 1")
    row = rows(tmp_path)[2]  # other programs reject NaN in JSON
    assert (row["loss"], row["grad_norm"], row["skipped_steps"]) == (None, None, 1)


def test_training_validation_and_profile_write_rows(start, feed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log_module, "peak_flops", lambda *device: 1e6)
    log = start()
    for step in (1, 2):
        feed(log, step, 2.5, grad_norm=0.25)
    log.validation(2, VALIDATION)
    log.profile(2, {"data": 0.1, "step": 0.3}, "a report")
    first, train, validation, profile = rows(tmp_path)
    assert train.pop("memory_gib") > 0
    assert train == {
        **{"step": 2, "epoch": 0.02, "tokens": 1280, "loss": 2.5, "learning_rate": 1e-3},
        **{"grad_norm": 0.25, "skipped_steps": 0, "tokens_per_second": 640.0},
        **{"step_seconds": 1.0, "mfu": 0.64},
    }
    assert first["tokens_per_second"] is first["mfu"] is None
    assert validation == {"step": 2} | {f"val_{name}": value for name, value in VALIDATION.items()}
    assert profile == {"step": 2, "data_seconds": 0.1, "step_seconds": 0.3}
    assert "MFU 64.0%" in capsys.readouterr().out


def test_a_full_disk_loses_no_row(start, feed, tmp_path, capsys):
    log = start()
    whole = log._file

    def refuse(data):
        raise OSError(28, "No space left on device")

    log._file = SimpleNamespace(write=refuse, close=whole.close)
    feed(log, 1)
    assert "NOT WRITTEN: [Errno 28] No space left on device" in capsys.readouterr().out
    log._file = whole
    feed(log, 2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_a_resumed_run_drops_the_rows_that_it_writes_again(start, feed, tmp_path):
    """It also drops lines that a kill has cut short, and lines that are not UTF-8."""
    begun = (
        b'{"step": 1, "loss": 3.0}\n\xff\xfe{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 1, "lo'
    )
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_bytes(begun)
    feed(start(first_step=2), 2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1, "loss": 3.0}\n'
    feed(start(first_step=1), 1)
    assert [row["step"] for row in rows(tmp_path)] == [1]
