"""What a run reports; the mean loss itself is in test_meter.py."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from training import log as log_module
from training.log import TrainingLog, as_time

NAN = float("nan")
VALIDATION = {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 0.9, "samples": 3}


class Clock:
    """In place of the module `time`: stands still until told otherwise."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(log_module, "time", Clock())
    return log_module.time


@pytest.fixture
def start(accelerator, tmp_path, clock):
    """Makes an open TrainingLog; closes it in the end."""
    made = []

    def start(accelerator=accelerator, **changes) -> TrainingLog:
        settings = {"log_interval": 1, "tokens_per_step": 640, "flops_per_token": 1000}
        settings |= {"total_steps": 100, "first_step": 1}
        made.append(TrainingLog(accelerator, tmp_path / "metrics.jsonl", **settings | changes))
        made[-1].open()
        return made[-1]

    yield start
    for log in made:
        log.close()


def no_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def rows(path: Path) -> list[dict]:
    text = (path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


@pytest.fixture
def feed(clock):
    """Takes a step of one micro-batch, of 640 tokens."""

    def feed(log, step: int, loss: float = 1.0, grad_norm: float = 0.5, seconds=1.0) -> None:
        clock.now += seconds
        log.meter.add(1.0, loss=torch.tensor(loss))
        log.clock.tokens += 640
        log.step(step, learning_rate=1e-3, grad_norm=grad_norm, epoch=step / 100)

    return feed


@pytest.mark.parametrize(("first_step", "reported"), [(1, [1, 4, 8, 11]), (3, [4, 8, 11])])
def test_first_last_and_every_interval_report(start, feed, tmp_path, first_step, reported):
    """The first step of the run, that is: a resume adds no line of its own."""
    log = start(log_interval=4, total_steps=11, first_step=first_step)
    for step in range(first_step, 12):
        feed(log, step, float(step))
    assert [row["step"] for row in rows(tmp_path)] == reported
    assert rows(tmp_path)[-1]["loss"] == (9 + 10 + 11) / 3


@pytest.mark.parametrize("first_step", [1, 4])
def test_speed_leaves_out_pauses_and_the_first_step_and_time_left_does_not(
    start, feed, clock, tmp_path, capsys, first_step
):
    log = start(log_interval=2, total_steps=12, first_step=first_step)
    feed(log, first_step, seconds=1000)  # it compiles
    said = capsys.readouterr().out
    assert "left" not in said
    assert "tokens/s" not in said
    with log.clock.pause():
        clock.now += 50
    for step in (first_step + 1, first_step + 2):
        with log.clock.pause():
            clock.now += 2
        feed(log, step, seconds=6)
    last = next(row for row in rows(tmp_path) if row["step"] > first_step)
    steps = last["step"] - first_step
    assert last["step_seconds"] == 6.0
    assert last["tokens_per_second"] == pytest.approx(640 / 6, abs=0.1)
    left = (50 + 8 * steps) / steps * (12 - last["step"])
    assert f"left {as_time(left)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "1:00:00"), (72000, "20:00:00")],
)
def test_a_time_is_said_in_hours_minutes_and_seconds(seconds, said):
    assert as_time(seconds) == said


def test_a_line_tells_what_people_watch(start, feed, capsys):
    log = start(name="small")
    for step, loss in ((1, 3.5), (2, 2.5)):
        feed(log, step, loss)
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"small  step 2/100  loss 2\.5000  lr 1\.00e-03  grad_norm 0\.500  640 tokens/s  left 1:38",
        line,
    )


def test_rows_of_training_validation_and_profile(start, feed, tmp_path, capsys, monkeypatch):
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


def test_where_every_step_was_skipped_there_is_no_loss(start, feed, tmp_path, capsys):
    """Other programs reject Infinity and NaN in JSON."""
    log = start()
    feed(log, 1, NAN, grad_norm=NAN)
    assert rows(tmp_path)[0]["loss"] is rows(tmp_path)[0]["grad_norm"] is None
    assert rows(tmp_path)[0]["skipped_steps"] == 1
    said = capsys.readouterr().out
    assert "loss n/a" in said
    assert said.rstrip().endswith("  skipped 1")


def test_other_processes_write_nothing_and_their_tokens_count(start, feed, accelerator, tmp_path):
    both = {"device": accelerator.device, "num_processes": 2, "mixed_precision": "no"}
    both |= {"reduce": lambda mine: 2 * mine, "log": lambda values, step: None}
    for is_main in (False, True):
        log = start(accelerator=SimpleNamespace(is_main_process=is_main, **both))
        for step in (1, 2):
            feed(log, step)
        log.validation(2, VALIDATION)
        assert (tmp_path / "metrics.jsonl").exists() == is_main
    assert rows(tmp_path)[1]["tokens_per_second"] == 1280


def test_a_full_disk_loses_no_line(start, feed, tmp_path, capsys):
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


def test_a_resumed_run_drops_the_lines_that_it_writes_again(start, feed, tmp_path):
    """And those that a kill cut short, or that are no text."""
    begun = (
        b'{"step": 1, "loss": 3.0}\n\xff\xfe{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 1, "lo'
    )
    (tmp_path / "metrics.jsonl").write_bytes(begun)
    feed(start(first_step=2), 2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    feed(start(first_step=1), 1)
    assert [row["step"] for row in rows(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("losses", "warned_at"),
    [
        ([6.0, 7.0, 5.0, 7.0, 8.0, 9.0, 10.0], [6]),
        ([6.0, NAN, 7.0, NAN, 5.0], [4]),
        ([6.0, 5.0, 6.5, 6.5, 4.0], []),
        ([6.0, 6.0, 6.0, 6.0, 6.0], []),
    ],
)
def test_a_loss_that_stays_above_where_it_began_makes_a_warning(start, capsys, losses, warned_at):
    log = start()
    for step, loss in enumerate(losses, 1):
        log._warn(step, None if loss is NAN else loss)
    said = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert [int(re.search(r"at step (\d+) and was 6\.0000", line)[1]) for line in said] == warned_at


def test_a_resumed_run_knows_its_first_loss(start, feed, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 9, "loss": 1.0}\n')
    log = start(first_step=9)
    for step in (9, 10, 11):
        feed(log, step, 4.0)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    assert "4.0000 at step 11 and was 3.0000" in warnings[0]
