import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY, clean_environment, processes_with

from benchmarks import time_to_loss
from benchmarks.time_to_loss import Race, Result, main, parse_options, read, table

TINY_MODEL = ("--dim", "32", "--n_layers", "1", "--n_heads", "2", "--max_seq_len", "32")


def result(losses, step_seconds=1.0):
    return Result("run", losses, step_seconds, tokens_per_step=10)


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


def test_a_loss_never_reached_is_said_and_no_share_is_made_up():
    race = Race(1, result({100: 3.0}), result({10: 3.5, 20: 3.1}))
    assert race.share_of_time is None
    shown = table(time_to_loss.OUT, {1e-3: 3.0}, 1e-3, [race], parse_options([]))
    assert "not in 20" in shown
    assert "% of AdamW's time" not in shown


def test_the_closing_line_names_the_worst_seed():
    races = [
        Race(seed, result({100: 3.0}), result({step: 2.9})) for seed, step in ((1, 20), (2, 30))
    ]
    shown = table(time_to_loss.OUT, {1e-3: 3.0}, 1e-3, races, parse_options([]))
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
    run = read("run", metrics)
    assert run.losses == {10: 5.0, 20: 4.0}
    assert run.step_seconds == 3.0
    assert run.tokens_per_step == 8


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "0"], "--steps cannot be 0"),
        (["--share", "1.5"], "--share cannot be 1.5"),
        (["--steps", "2", "--share", "0.5"], "less than the two steps"),
        (["--eval_interval", "0"], "--eval_interval cannot be 0"),
        (["--model", "'x"], '--model: "\'x": No closing quotation'),
        (["--model", "--dim 7"], "--model: dim 7 is not divisible"),
        (["--challenger=--help"], "--challenger: python train_pretrain_accelerate.py --help"),
        (["--challenger", "--muon_learning_rat 1"], "did you mean --muon_learning_rate?"),
        (["--json", "/no/such/x"], "--json: no file can be written at '/no/such/x'"),
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


def test_runs_are_kept_apart_by_text_model_and_what_all_are_told(packed, tmp_path, monkeypatch):
    def folder(data=packed, *flags):
        return time_to_loss.runs_folder(data, parse_options(flags))

    first = folder()
    assert folder() == first
    assert folder(packed, "--model", "--dim 32 --n_heads 2") != first
    other = tmp_path / packed.name
    shutil.copytree(packed, other)
    elsewhere = folder(other)
    assert elsewhere != first
    (other / "dataset.json").write_text((other / "dataset.json").read_text() + "\n")
    assert folder(other) not in (elsewhere, first)
    monkeypatch.setattr(time_to_loss, "QUIET", "--log_with none")
    assert folder() != first


def test_real_runs_make_a_table_and_are_not_repeated(packed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(time_to_loss, "QUIET", "--log_interval 2 --log_with none --compile off")
    tiny = " ".join([*TINY_MODEL, "--sample_tokens", "1"])
    words = ["--data", str(packed), "--out", str(tmp_path), "--model", tiny, "--steps", "4"]
    words += ["--share", "0.5", "--learning_rates", "1e-3", "2e-3", "--seeds", "1"]
    words += ["--challenger", "--learning_rate 1e-2", "--eval_interval", "1"]
    main([*words, "--json", str(tmp_path / "figures.json")])
    shown = capsys.readouterr()
    assert "| seed | AdamW's final loss |" in shown.out
    assert shown.err.count(" ...") == 3  # two learning rates and the challenger
    (figures,) = json.loads((tmp_path / "figures.json").read_text()).values()
    assert set(figures["learning_rates"]) == {"0.001", "0.002"}
    assert set(figures["races"][0]["challenger"]["losses"]) == {"1", "2"}
    main(words)
    assert " ..." not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_is_one_line(packed, tmp_path, capsys):
    words = ["--data", str(packed), "--out", str(tmp_path), "--steps", "6"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--model", "--dim 32 --n_heads 2 --max_seq_len 9999999"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("benchmarks.time_to_loss: error: adamw-0.001-6-seed1 failed: ")


@pytest.mark.slow
def test_an_interrupted_comparison_takes_its_training_process_along(packed, tmp_path):
    command = [sys.executable, "-m", "benchmarks.time_to_loss", "--data", str(packed)]
    command += ["--out", str(tmp_path), "--steps", "100000", "--model", " ".join(TINY_MODEL)]
    marker = f"TEST_MARKER={tmp_path}"
    running = subprocess.Popen(
        command, cwd=REPOSITORY, env=clean_environment() | dict([marker.split("=")]),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("*/*/metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=120)[1]
    assert running.returncode == 1
    assert said.splitlines()[-1] == "stopped; the same command goes on"
    assert "Traceback" not in said
    left = [line for line in processes_with(marker) if "train_pretrain_accelerate" in line]
    assert left == []
