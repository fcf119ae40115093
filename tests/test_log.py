import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from training import log as log_module
from training.engine.usage import seconds_without_core
from training.log import TrainingLog

FLOPS_PER_TOKEN = 1000


class Clock:
    """In place of the module `time`: stands still until told otherwise."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def waited(monkeypatch) -> SimpleNamespace:
    """How long threads have waited for a core, as the log asks for it."""
    waited = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(log_module, "seconds_without_core", lambda: waited.seconds)
    return waited


@pytest.fixture
def start(accelerator, tmp_path):
    """Makes a TrainingLog; closes it in the end."""
    made = []

    def start(accelerator=accelerator, **changes) -> TrainingLog:
        settings = {
            "log_interval": 1,
            "tokens_per_step": 640,
            "flops_per_token": FLOPS_PER_TOKEN,
            "total_steps": 100,
            "first_step": 1,
        }
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


def feed(log: TrainingLog, step: int, losses: list[float], grad_norm=0.5) -> None:
    for loss in losses:
        log.micro_batch(torch.tensor(loss))
    log.step(step, learning_rate=1e-3, grad_norm=grad_norm, epoch=step / 100)


def test_the_logged_loss_is_the_mean_over_every_micro_batch_since_the_last_line(
    start, clock, tmp_path
):
    log = start(log_interval=2)
    losses = [[1.0, 2.0], [3.0, 5.0], [6.0, 8.0], [1.0, 1.0], [4.0, 8.0]]
    for step, micro_batches in enumerate(losses, 1):
        clock.now += 1
        feed(log, step, micro_batches)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        (1, 1.5),  # the first step reports too
        (2, 4.0),
        (4, 4.0),
    ]


def test_parts_of_the_loss_are_means_over_the_same_targets(start, clock, tmp_path, capsys):
    log = start(log_interval=2, parts=("hard_loss", "agreement"), first_step=2)
    log.load_state(torch.tensor([6.0, 2.0, 0.0, 4.0, 1.0]))  # of two micro-batches before
    for weight, loss in ((1.0, 2.0), (0.5, 8.0)):
        parts = {"agreement": torch.tensor(loss / 16), "hard_loss": torch.tensor(loss / 2)}
        log.micro_batch(torch.tensor(loss), weight=weight, **parts)
    state = log.state()
    clock.now += 1
    log.step(2, learning_rate=1e-3, grad_norm=0.5, epoch=0.1)
    (row,) = rows(tmp_path)
    expected = {"loss": 12 / 3.5, "hard_loss": 7 / 3.5, "agreement": 1.375 / 3.5}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert "loss 3.4286  hard_loss 2.0000  agreement 0.3929  lr" in capsys.readouterr().out
    assert state.tolist() == [6.0, 2.0, 0.0, 4.0, 1.0]  # the step under way is no part of it


def test_weights_that_are_no_whole_numbers_come_back_as_they_were(start):
    """Those of conversations: how many targets count, as a share."""
    log = start(log_interval=4, first_step=2)
    for step, weight in ((2, 0.1), (3, 0.7)):
        log.micro_batch(torch.tensor(2.7), weight=weight)
        log.step(step, learning_rate=1e-3, grad_norm=0.5, epoch=0.1)
    assert log.state()[1].item() == 0.1 + 0.7
    resumed = start(log_interval=4, first_step=4)
    resumed.load_state(log.state())
    assert torch.equal(resumed.state(), log.state())


def test_where_every_step_was_skipped_no_part_is_known(start, clock, tmp_path):
    log = start(parts=("soft_loss",))
    log.micro_batch(torch.tensor(1.0), soft_loss=torch.tensor(2.0))
    log.step(1, learning_rate=1e-3, grad_norm=float("nan"), epoch=0.1)
    (row,) = rows(tmp_path)
    assert row["loss"] is row["soft_loss"] is None


@pytest.mark.parametrize(("first_step", "reported"), [(1, [1, 4, 8, 11]), (3, [4, 8, 11])])
def test_first_last_and_every_interval_report(start, clock, tmp_path, first_step, reported):
    """The first step of the run, that is: a resume adds no line of its own."""
    log = start(log_interval=4, total_steps=11, first_step=first_step)
    for step in range(first_step, 12):
        clock.now += 1
        feed(log, step, [1.0])
    assert [row["step"] for row in rows(tmp_path)] == reported


def test_a_resumed_run_goes_on_in_the_middle_of_a_log_interval(start, clock, tmp_path):
    interrupted = start(log_interval=4)
    for step, loss in ((1, 9.0), (2, 1.0), (3, 2.0)):
        clock.now += 1
        feed(interrupted, step, [loss])
    state = interrupted.state()
    feed(interrupted, 4, [100.0])  # lost with the process, and its row as well
    interrupted.close()
    resumed = start(log_interval=4, first_step=4)
    resumed.load_state(state)
    clock.now += 1
    feed(resumed, 4, [3.0])
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(1, 9.0), (4, 2.0)]


def test_lines_that_a_full_disk_refused_are_written_when_there_is_room(
    start, clock, tmp_path, capsys
):
    log = start()
    whole = log._file

    class Full:
        name = whole.name

        def write(self, data):
            raise OSError(28, "No space left on device")

    log._file = Full()
    clock.now += 1
    feed(log, 1, [1.0])
    assert "NOT WRITTEN: [Errno 28] No space left on device" in capsys.readouterr().out
    log._file = whole
    clock.now += 1
    feed(log, 2, [2.0])
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_bytes_that_are_no_text_do_not_keep_a_run_from_going_on(start, clock, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe{"step": 2}\n')
    log = start(first_step=3)
    clock.now += 1
    feed(log, 3, [1.0])
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]


def test_a_line_cut_short_by_a_kill_is_dropped(start, clock, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    log = start(first_step=3)
    clock.now += 1
    feed(log, 3, [1.0])
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]


class TwoProcesses:
    """An accelerator of two processes, of which the other one has collected this much."""

    is_main_process, num_processes, device = True, 2, torch.device("cpu")
    mixed_precision = "no"

    def __init__(self, losses: list[float], weight: float = 1.0):
        self.loss_sum, self.weight = weight * sum(losses), weight * len(losses)
        self.asked = []

    def reduce(self, mine: torch.Tensor, how: str) -> torch.Tensor:
        """Of the weights first, and then of the losses by the mean weight."""
        assert how == "mean"
        theirs = self.loss_sum / self.asked[0] if self.asked else self.weight
        self.asked.append((mine + theirs) / 2)
        return self.asked[-1]

    def log(self, values: dict, step: int) -> None:
        pass


def test_losses_of_other_processes_are_averaged_in(start, clock, tmp_path):
    log = start(accelerator=TwoProcesses([6.0, 8.0]))
    clock.now += 1
    feed(log, 1, [1.0, 3.0])
    assert rows(tmp_path)[0]["loss"] == pytest.approx((2.0 + 7.0) / 2)


def test_a_process_with_fewer_targets_counts_for_less(start, clock, tmp_path):
    log = start(accelerator=TwoProcesses([6.0, 8.0], weight=0.25))
    clock.now += 1
    feed(log, 1, [1.0, 3.0])
    assert rows(tmp_path)[0]["loss"] == pytest.approx((2 * 2.0 + 0.5 * 7.0) / 2.5)


def test_a_process_without_any_target_counts_for_nothing(start, clock, tmp_path):
    log = start(accelerator=TwoProcesses([6.0, 8.0], weight=0.0))
    clock.now += 1
    feed(log, 1, [1.0, 3.0])
    assert rows(tmp_path)[0]["loss"] == 2.0


def test_the_logged_loss_is_the_mean_over_targets_that_count(start, clock, tmp_path):
    """However few of a micro-batch's do."""
    log = start(log_interval=2)
    collected = [[(1.0, 0.25), (3.0, 1.0)], [(5.0, 0.5), (7.0, 1.0)], [(2.0, 0.0), (4.0, 0.125)]]
    for step, micro_batches in enumerate(collected, 1):
        clock.now += 1
        for loss, weight in micro_batches:
            log.micro_batch(torch.tensor(loss), weight=weight)
        log.step(step, learning_rate=1e-3, grad_norm=0.5, epoch=0.0)
    clock.now += 1
    feed(log, 4, [9.0])
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        (1, pytest.approx((0.25 * 1 + 3) / 1.25)),
        (2, pytest.approx((0.5 * 5 + 7) / 1.5)),
        (4, pytest.approx((0.125 * 4 + 9) / 1.125)),
    ]


def test_where_no_target_counts_there_is_no_loss(start, clock, tmp_path, capsys):
    log = start()
    clock.now += 1
    log.micro_batch(torch.tensor(0.0), weight=0.0)
    log.step(1, learning_rate=1e-3, grad_norm=0.5, epoch=0.0)
    assert rows(tmp_path)[0]["loss"] is None
    assert "loss n/a" in capsys.readouterr().out


@pytest.mark.parametrize(("accumulation_steps", "log_interval"), [(1, 1), (3, 1), (3, 7), (8, 10)])
def test_where_every_target_counts_it_is_the_plain_mean_to_the_bit(
    start, clock, tmp_path, accumulation_steps, log_interval
):
    """Summed step by step in fp32, and divided by how many micro-batches there were."""
    log = start(log_interval=log_interval, total_steps=20)
    generator = torch.Generator().manual_seed(0)
    total, count, expected = torch.zeros(()), 0, []
    for step in range(1, 21):
        clock.now += 1
        losses = 4 * torch.rand(accumulation_steps, generator=generator)
        for loss in losses:
            log.micro_batch(loss)
        log.step(step, learning_rate=1e-3, grad_norm=0.5, epoch=0.0)
        of_step = torch.zeros(())
        for loss in losses:
            of_step += loss
        total, count = total + of_step, count + accumulation_steps
        if step % log_interval == 0 or step in (1, 20):
            expected.append((total / count).item())
            total, count = torch.zeros(()), 0
    assert [row["loss"] for row in rows(tmp_path)] == expected


def test_weights_are_kept_through_a_resume(start, clock, tmp_path):
    interrupted = start(log_interval=4, first_step=2)
    for step, loss, weight in ((2, 1.0, 0.25), (3, 2.0, 1.0)):
        interrupted.micro_batch(torch.tensor(loss), weight=weight)
        interrupted.step(step, learning_rate=1e-3, grad_norm=0.5, epoch=0.0)
    resumed = start(log_interval=4, first_step=4)
    resumed.load_state(interrupted.state())
    clock.now += 1
    feed(resumed, 4, [3.0])
    assert rows(tmp_path)[0]["loss"] == pytest.approx((0.25 * 1 + 2 + 3) / 2.25)


def test_other_processes_write_nothing(start, accelerator, clock, tmp_path, capsys):
    other = SimpleNamespace(
        device=accelerator.device,
        is_main_process=False,
        num_processes=2,
        mixed_precision="no",
        reduce=lambda mine, how: mine,
    )
    log = start(accelerator=other)
    clock.now += 1
    feed(log, 1, [1.0])
    log.validation(1, {"loss": 1.0, "perplexity": 2.7, "bits_per_byte": 0.5, "samples": 3})
    log.say("hello")
    assert not (tmp_path / "metrics.jsonl").exists()
    assert capsys.readouterr().out == ""


def test_throughput_counts_all_tokens_of_all_steps_since_the_last_line(start, clock, tmp_path):
    log = start(log_interval=3, tokens_per_step=8 * 4 * 2 * 64)
    for step in range(1, 7):
        clock.now += 2
        feed(log, step, [1.0] * 4)
    seconds = [row["step_seconds"] for row in rows(tmp_path)]
    rates = [row["tokens_per_second"] for row in rows(tmp_path)]
    assert seconds == [2.0, 2.0, 2.0]
    assert rates == [None, 8 * 4 * 2 * 64 / 2, 8 * 4 * 2 * 64 / 2]  # the first step's is no speed


def test_pauses_do_not_count_as_training(start, clock, tmp_path):
    log = start(log_interval=2, tokens_per_step=100)
    clock.now += 1
    feed(log, 1, [1.0])
    with log.pause():  # after the line of step 1: belongs to the next one
        clock.now += 50
    clock.now += 1
    with log.pause():
        clock.now += 7
    clock.now += 1
    feed(log, 2, [1.0])
    clock.now += 1
    feed(log, 3, [1.0])
    with log.pause():
        clock.now += 30
    clock.now += 3
    feed(log, 4, [1.0])
    assert [row["step_seconds"] for row in rows(tmp_path)] == [1.0, 2.0, 2.0]
    assert [row["tokens_per_second"] for row in rows(tmp_path)] == [None, 50.0, 50.0]


def test_the_turns_of_other_models_count_in_the_time_left_alone(start, clock, tmp_path, capsys):
    log = start(log_interval=2, tokens_per_step=100, total_steps=12)
    clock.now += 500  # others are built
    for step in range(1, 5):
        with log.turn():
            clock.now += 3
            with log.pause():
                clock.now += 7
            feed(log, step, [1.0])
        clock.now += 11  # others are trained
    assert [row["step_seconds"] for row in rows(tmp_path)] == [3.0, 3.0, 3.0]
    assert [row["tokens_per_second"] for row in rows(tmp_path)] == [None, 33.3, 33.3]
    left = (3 + 11) * (12 - 4)
    assert f"left {left // 60}:{left % 60:02d}" in capsys.readouterr().out


def test_lines_of_one_of_several_runs_begin_with_its_name(start, capsys):
    log = start()
    log.prefix = "small  "
    feed(log, 1, [1.0])
    assert capsys.readouterr().out.startswith("small  step 1/100  loss 1.0000")


def test_the_time_left_leaves_pauses_out(start, clock, capsys):
    log = start(total_steps=12, log_interval=1)
    feed(log, 1, [1.0])
    clock.now += 6
    with log.pause():
        clock.now += 1000
    feed(log, 2, [1.0])
    assert "left 1:00" in capsys.readouterr().out


@pytest.mark.parametrize("first_step", [1, 4])
def test_the_first_step_of_a_start_which_compiles_counts_neither_as_speed_nor_as_time_left(
    start, clock, capsys, tmp_path, first_step
):
    log = start(total_steps=12, log_interval=2, first_step=first_step)
    clock.now += 1000
    feed(log, first_step, [1.0])
    said = capsys.readouterr().out
    assert "left" not in said
    assert "tokens/s" not in said
    assert "1000.0 s for the first step" in said
    for step in range(first_step + 1, first_step + 3):
        clock.now += 6
        feed(log, step, [1.0])
    last = rows(tmp_path)[-1]
    assert last["step_seconds"] == 6.0
    left = 6 * (12 - last["step"])
    assert f"left {left // 60}:{left % 60:02d}" in capsys.readouterr().out


def feed_losses(log: TrainingLog, clock: Clock, losses: list[float], step: int = 1) -> None:
    for number, loss in enumerate(losses, step):
        clock.now += 1
        feed(log, number, [loss])


def test_a_loss_that_stays_above_where_it_began_is_said_once_with_the_rates(start, clock, capsys):
    log = start()
    feed_losses(log, clock, [6.0, 7.0, 5.0, 7.0, 8.0])
    assert "WARNING" not in capsys.readouterr().out
    feed_losses(log, clock, [9.0, 10.0], step=6)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert line == log.divergence
    assert all(word in line for word in ("9.0000", "6.0000", "--learning_rate"))


def test_a_short_run_that_ends_above_where_it_began_is_said_too(start, clock, capsys):
    log = start(total_steps=2)
    feed_losses(log, clock, [6.0, 2613.0])
    assert "WARNING: the loss is 2613.0000 at step 2" in capsys.readouterr().out


def test_a_loss_that_falls_is_no_reason_for_a_warning(start, clock, capsys):
    log = start(total_steps=5)
    feed_losses(log, clock, [6.0, 5.0, 6.5, 6.5, 4.0])
    assert log.divergence is None
    assert "WARNING" not in capsys.readouterr().out


def test_between_two_reports_the_bar_shows_the_last_step(start, clock):
    log = start(log_interval=4)
    for step in (1, 2, 3):
        clock.now += 2
        log.micro_batch(torch.tensor(float(step)))
        log.micro_batch(torch.tensor(float(step + 1)))
        log.step(step, learning_rate=1e-3, grad_norm=0.5, epoch=0.0)
        assert log.bar.postfix == f"loss {step + 0.5:.3f}, 320 tokens/s"


def test_mfu_is_reported_against_the_peak_of_all_devices(start, clock, tmp_path, capsys):
    log = start()
    log.peak = 1e6
    feed_losses(log, clock, [1.0, 1.0])
    assert rows(tmp_path)[1]["mfu"] == pytest.approx(640 * FLOPS_PER_TOKEN / 1e6)
    assert "MFU 64.0%" in capsys.readouterr().out


@pytest.mark.parametrize(("precision", "peak"), [("fp16", 65e12), ("no", 8.1e12), ("bf16", None)])
def test_the_peak_is_that_of_the_precision_in_use(start, accelerator, monkeypatch, precision, peak):
    monkeypatch.setattr(log_module, "device_name", lambda device: "Tesla T4")
    used = {"device": accelerator.device, "is_main_process": False, "mixed_precision": precision}
    assert start(accelerator=SimpleNamespace(**used)).peak == peak


def test_mfu_of_an_unknown_device_is_left_out(start, clock, tmp_path, capsys):
    log = start()
    clock.now += 1
    feed(log, 1, [1.0])
    assert rows(tmp_path)[0]["mfu"] is None
    assert "MFU" not in capsys.readouterr().out


def test_a_line_holds_every_number_a_plot_needs(start, clock, tmp_path):
    log = start()
    clock.now += 1
    feed(log, 1, [2.5], grad_norm=0.25)
    (row,) = rows(tmp_path)
    assert row["memory_gib"] > 0
    for key, value in {
        "step": 1,
        "epoch": 0.01,
        "tokens": 640,
        "loss": 2.5,
        "learning_rate": 1e-3,
        "grad_norm": 0.25,
    }.items():
        assert row[key] == value


def test_training_validation_and_profile_lines_all_parse(start, clock, tmp_path):
    log = start()
    clock.now += 1
    feed(log, 1, [2.5])
    log.validation(1, {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 0.9, "samples": 3})
    log.profile(1, {"data": 0.1, "forward": 0.2, "step": 0.3}, "report")
    train, validation, profile = rows(tmp_path)
    assert "val_loss" not in train
    assert validation == {
        "step": 1,
        "val_loss": 2.0,
        "val_perplexity": 7.4,
        "val_bits_per_byte": 0.9,
        "val_samples": 3,
    }
    assert profile == {
        "step": 1,
        "data_seconds": 0.1,
        "forward_seconds": 0.2,
        "step_seconds": 0.3,
    }


@pytest.mark.parametrize("grad_norm", [float("inf"), float("nan")])
def test_a_step_without_a_finite_gradient_is_counted_and_its_loss_left_out(
    start, clock, tmp_path, grad_norm
):
    """Its loss is not finite either, and other programs reject Infinity and NaN in JSON."""
    log = start(log_interval=2)
    for step, loss, norm in ((1, 5.0, 1.0), (2, float("nan"), grad_norm), (3, 2.0, 1.0)):
        clock.now += 1
        feed(log, step, [loss], grad_norm=norm)
    assert log.bad_in_row == 0
    feed(log, 4, [float("nan")], grad_norm=grad_norm)
    assert log.bad_in_row == 1
    assert [row["loss"] for row in rows(tmp_path)] == [5.0, None, 2.0]
    assert [row["skipped_steps"] for row in rows(tmp_path)] == [0, 1, 2]
    assert rows(tmp_path)[1]["grad_norm"] is None


@pytest.fixture
def read_late(monkeypatch) -> list[list[float]]:
    """What a GPU's log has asked for: the norm of a step's gradient, and its loss."""
    asked = []

    def copied(numbers: torch.Tensor):
        return lambda: (asked.append(numbers.tolist()), numbers.tolist())[1]

    monkeypatch.setattr(log_module, "copied", copied)
    return asked


def test_on_a_gpu_a_step_is_judged_when_the_next_one_has_been_queued(
    start, clock, capsys, read_late
):
    log = start(log_interval=100)
    log._late = True
    norms = (1.0, float("inf"), 0.5, float("nan"), float("nan"), 0.25)
    judged = []
    for step, norm in enumerate(norms, 1):
        clock.now += 1
        feed(log, step, [2.0], grad_norm=torch.tensor(norm) if step % 2 else norm)
        judged.append((len(read_late), log.bad_in_row, log.last_bad))
    # The first step reports, and so asks at once.
    assert judged == [(1, 0, 0), (1, 0, 0), (2, 1, 2), (3, 0, 2), (4, 1, 4), (5, 2, 5)]
    assert [norm for norm, _ in read_late] == pytest.approx(norms[:5], nan_ok=True)
    assert capsys.readouterr().out.count("SKIPPED") == 3


def test_a_log_that_asks_late_says_and_keeps_the_same(start, clock, tmp_path, capsys, read_late):
    norms = (1.0, 0.5, float("inf"), 0.5, 0.25, float("nan"), 2.0, float("nan"), 1.0)
    told = []
    for late in (False, True):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        log = start(log_interval=4, total_steps=9)
        log._late, states = late, []
        for step, norm in enumerate(norms, 1):
            clock.now += 1
            loss = step / 3 if norm < 9 else float("nan")
            feed(log, step, [loss, loss / 7], grad_norm=norm)
            if step in (3, 6, 7):  # a checkpoint
                states.append(log.state().tolist())
        told.append((rows(tmp_path), states, log.skipped_steps, log.bad_in_row))
        told[-1] += (capsys.readouterr().out,)
    assert len(read_late) == len(norms)
    assert told[0] == told[1]


def test_every_line_is_on_disk_when_it_has_been_said(start, clock, tmp_path):
    log = start()
    for step in (1, 2):
        clock.now += 1
        feed(log, step, [1.0])
        assert len(rows(tmp_path)) == step


def test_a_resumed_run_goes_on_in_the_same_file(start, clock, tmp_path):
    for first_step in (1, 2):
        log = start(first_step=first_step)
        clock.now += 1
        feed(log, first_step, [1.0])
        log.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_numbers_reach_the_trackers(start, accelerator, clock, monkeypatch):
    logged = []
    monkeypatch.setattr(accelerator, "log", lambda values, step: logged.append((step, values)))
    log = start()
    clock.now += 1
    feed(log, 1, [2.5])
    log.validation(1, {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 0.9, "samples": 3})
    assert logged[0][0] == 1
    assert logged[0][1]["train/loss"] == 2.5
    assert logged[1][1]["val/loss"] == 2.0
    assert None not in logged[0][1].values()


def test_a_log_line_tells_what_people_watch(start, clock, capsys):
    log = start()
    feed_losses(log, clock, [3.5, 2.5])
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"step 2/100  loss 2\.5000  lr 1\.00e-03  grad_norm 0\.500  640 tokens/s  "
        r"left 1:38",
        line,
    )


def one_second_each(start, clock, waited, seconds: list[float]) -> TrainingLog:
    log = start()
    for step, added in enumerate(seconds, 1):
        clock.now += 1
        waited.seconds += added
        log.micro_batch(torch.tensor(1.0))
        log.step(step, 1e-3, 1.0, 0.1)
    return log


def test_other_programs_on_the_cores_are_said_once(start, clock, waited, monkeypatch, capsys):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    one_second_each(start, clock, waited, [2.0, 0.1, 2.0, 2.0])
    said = capsys.readouterr().out.splitlines()
    warnings = [i for i, line in enumerate(said) if "taskset -c 0-2" in line]
    assert warnings == [3]  # behind the line of step 3


def test_a_process_of_one_thread_has_nobody_to_wait_for(start, clock, waited, monkeypatch, capsys):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one_second_each(start, clock, waited, [2.0, 2.0])
    assert "taskset" not in capsys.readouterr().out


def test_the_seconds_without_a_core_are_those_of_all_threads_that_live(tmp_path):
    for thread, waited in (("7", 1_500_000_000), ("8", 500_000_000)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"9000000000 {waited} 12\n", encoding="ascii")
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "schedstat").mkdir()  # reading it fails, as that of a thread that has ended
    assert seconds_without_core(tmp_path) == 2.0
    assert seconds_without_core(tmp_path / "none") == 0.0
    assert isinstance(seconds_without_core(), float)  # in the form that this system has
