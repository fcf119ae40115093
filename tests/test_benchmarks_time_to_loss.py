import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY, clean_environment, processes_with

from benchmarks import time_to_loss
from benchmarks.time_to_loss import Race, Result, closing_line, main, read, run_folder

TINY_MODEL = "--dim 32 --n_layers 1 --n_heads 2 --max_seq_len 32 --sample_tokens 1"


def result(losses, step_seconds=1.0):
    return Result(losses, step_seconds, tokens_per_step=10)


def test_the_first_validated_step_at_or_below_the_loss_counts():
    run = result({5: 4.0, 10: 3.5, 15: 3.6, 20: 3.4})
    assert run.steps_to(3.5) == 10
    assert run.steps_to(3.45) == 20
    assert run.steps_to(3.0) is None
    assert run.final == 3.4


def test_shares_are_of_the_baselines_whole_schedule():
    race = Race(1, result({100: 3.0}, 2.0), result({10: 3.5, 20: 2.9, 30: 2.0}, 2.1))
    assert race.steps == 20
    assert race.share_of_steps == 0.2
    assert race.step_ratio == pytest.approx(1.05)
    assert race.share_of_time == pytest.approx(0.21)
    row = race.row()
    assert (row["its seconds"], row["seconds"], row["tokens"]) == ("200.0", "42.0", "200")


def test_a_loss_never_reached_is_said_and_no_share_is_made_up():
    race = Race(1, result({100: 3.0}), result({10: 3.5, 20: 3.1}))
    assert race.share_of_time is None
    row = race.row()
    assert row["challenger: steps to it"] == "not in 20"
    assert row["share of time"] == ""
    assert closing_line("text", [race]) == ""


def test_the_closing_line_names_the_worst_seed():
    races = [
        Race(seed, result({100: 3.0}), result({step: 2.9})) for seed, step in ((1, 20), (2, 30))
    ]
    shown = closing_line("text", races)
    assert "30.0% of AdamW's time in the worst of 2 seeds, 25.0% in the median" in shown


def test_reading_leaves_out_the_step_that_compiles(tmp_path):
    rows = [
        {"step": 1, "tokens": 8, "step_seconds": 90.0},
        {"step": 10, "tokens": 80, "step_seconds": 2.0},
        {"step": 10, "val_loss": 5.0},
        {"step": 20, "tokens": 160, "step_seconds": 4.0},
        {"step": 20, "val_loss": 4.0},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(metrics) == Result({10: 5.0, 20: 4.0}, step_seconds=3.0, tokens_per_step=8)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--datas", "x"], "did you mean --data?"),
        (["--data", "/no/such/data"], "/no/such/data"),
    ],
)
def test_nonsense_is_one_line_before_anything_runs(flags, said, capsys, monkeypatch):
    monkeypatch.setattr(time_to_loss, "train", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.time_to_loss: error: ")
    assert said in error
    assert error.count("\n") == 1


def test_runs_are_kept_apart_by_text_model_and_all_that_they_are_told(
    packed, tmp_path, monkeypatch
):
    first = run_folder("adamw", packed, "--max_steps 5", 1)
    assert run_folder("adamw", packed, "--max_steps 5", 1) == first
    found = {first, run_folder("adamw", packed, "--max_steps 6", 1)}
    found.add(run_folder("adamw", packed, "--max_steps 5", 2))
    other = tmp_path / packed.name
    shutil.copytree(packed, other)
    found.add(run_folder("adamw", other, "--max_steps 5", 1))
    (other / "dataset.json").write_text((other / "dataset.json").read_text() + "\n")
    found.add(run_folder("adamw", other, "--max_steps 5", 1))
    for name in ("MODEL", "QUIET"):
        monkeypatch.setattr(time_to_loss, name, TINY_MODEL)
        found.add(run_folder("adamw", packed, "--max_steps 5", 1))
    assert len(found) == 7


@pytest.mark.variant  # of the interrupted comparison below
def test_real_runs_make_a_table_and_are_not_repeated(packed, tmp_path, capsys, monkeypatch):
    settings = {
        "OUT": tmp_path,
        "MODEL": TINY_MODEL,
        "STEPS": 4,
        "SHORT_STEPS": 2,
        "SHORT_EVAL_INTERVAL": 1,
        "LEARNING_RATES": (1e-3,),
        "SEEDS": (1,),
        "CHALLENGER": "--learning_rate 1e-2",
        "QUIET": "--log_interval 2 --log_with none --compile off",
    }
    for name, value in settings.items():
        monkeypatch.setattr(time_to_loss, name, value)
    main(["--data", str(packed)])
    shown = capsys.readouterr()
    assert "| seed | AdamW's final loss |" in shown.out
    assert "by learning rate: 0.001: " in shown.out
    assert shown.err.count(" ...") == 2  # the learning rate and the challenger
    main(["--data", str(packed)])
    assert " ..." not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_is_one_line(packed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(time_to_loss, "OUT", tmp_path)
    monkeypatch.setattr(time_to_loss, "MODEL", "--dim 32 --n_heads 2 --max_seq_len 9999999")
    with pytest.raises(SystemExit) as ended:
        main(["--data", str(packed)])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"benchmarks.time_to_loss: error: {packed.name}-adamw-")
    assert "-seed1 failed: " in last


@pytest.mark.slow
def test_an_interrupted_comparison_takes_its_training_process_along(packed, tmp_path):
    program = f"""
from pathlib import Path
from benchmarks import time_to_loss
time_to_loss.OUT, time_to_loss.MODEL = Path({str(tmp_path)!r}), {TINY_MODEL!r}
time_to_loss.STEPS, time_to_loss.QUIET = 1000000, "--log_with none --compile off"
time_to_loss.main(["--data", {str(packed)!r}])
"""
    marker = f"TEST_MARKER={tmp_path}"
    running = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY,
        env=clean_environment() | dict([marker.split("=")]),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list(tmp_path.glob("*/metrics.jsonl")):
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    said = running.communicate()[1]
    assert running.returncode == 130
    assert "Traceback" not in said
    left = [line for line in processes_with(marker) if "train_pretrain_accelerate" in line]
    assert left == []
