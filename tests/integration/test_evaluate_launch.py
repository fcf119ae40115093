"""scripts.evaluate after a run, alone and on two processes."""

import json
import sys
from pathlib import Path

import pytest
from conftest import Finished, Trained, run_warm, train

pytestmark = pytest.mark.slow

LAUNCHES = {
    "DDP": ["--multi_gpu"],
    "the configuration file of training": ["--config_file", "accelerate_config.yaml"],
}
QUESTIONS = [
    {"question": f"sum {i}: 1 + {i} =", "choices": [f" {i}", f" {1 + i};", " 第"], "answer": i % 3}
    for i in range(23)
]


@pytest.fixture(scope="module")
def trained(packed, tmp_path_factory) -> Trained:
    flags = "--max_steps 40 --batch_size 8 --learning_rate 1e-2 --dtype float32 --eval_samples 50"
    path = tmp_path_factory.mktemp("trained") / "run"
    return train("plain", 1, packed, path, flags)


@pytest.fixture(scope="module")
def data(packed, corpus, tmp_path_factory) -> dict[str, list[str]]:
    """Flags for each kind of data; no number of rows is divisible by 2 × 8."""
    questions = tmp_path_factory.mktemp("questions") / "q.jsonl"
    questions.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    return {
        "packed": ["--data", str(packed), "--limit", "45"],
        "text": ["--data", str(corpus), "--limit", "33"],
        "choice": ["--data", str(questions)],
    }


def launch(*flags: str, processes: int = 2) -> list[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    return [*command, "--num_processes", str(processes), "--main_process_port", "0"]


def evaluate(launcher: list[str], trained: Trained, *flags: str, **environ: str) -> Finished:
    command = [*launcher, "-m", "scripts.evaluate", str(trained.path), "--batch_size", "8", *flags]
    return run_warm(command, **environ)


def result(launcher: list[str], trained: Trained, flags: list[str], path: Path) -> dict:
    ended = evaluate(launcher, trained, *flags, "--json", str(path))
    assert ended.code == 0, ended.out
    assert ended.out.count("interval:") == 1  # one process speaks for all
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        ("packed", "DDP"),
        ("text", "DDP"),
        ("choice", "the configuration file of training"),
    ],
)
def test_two_processes_give_the_numbers_of_one(trained, data, tmp_path, kind, launcher):
    two = result(launch(*LAUNCHES[launcher]), trained, data[kind], tmp_path / "two.json")
    one = result([sys.executable], trained, data[kind], tmp_path / "one.json")
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["units"] == two["units"]
    assert next(iter(one["metrics"].values()))["value"] > 0
    assert one.get("tokens") == two.get("tokens")
    for name, metric in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(metric, rel=1e-6), name


def test_the_packed_loss_is_the_last_validation_loss_of_the_run(trained, packed, tmp_path):
    flags = ["--data", str(packed), "--limit", "50"]
    (last,) = trained.rows("val_loss")[-1:]
    found = result([sys.executable], trained, flags, tmp_path / "r.json")
    assert found["sequences"] == last["val_samples"]
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert found["metrics"][name]["value"] == pytest.approx(last[f"val_{name}"], rel=1e-6)


@pytest.mark.variant  # of tests/test_evaluate.py, by a real model
def test_text_like_that_of_the_training_is_likelier_than_other_text(trained, corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("zebras cross where nobody counts them " * 9, encoding="utf-8")
    known = result([sys.executable], trained, ["--data", str(corpus)], tmp_path / "a.json")
    strange = result([sys.executable], trained, ["--data", str(other)], tmp_path / "b.json")
    bits = [found["metrics"]["bits_per_byte"]["value"] for found in (known, strange)]
    assert bits[0] < bits[1] / 2


def test_a_launcher_that_starts_one_process_for_two_is_refused(trained, packed):
    """Without --multi_gpu, or with --cpu, accelerate launch ignores --num_processes on a CPU, and
    leaves this environment."""
    environ = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}
    ended = evaluate([sys.executable], trained, "--data", str(packed), **environ)
    assert ended.code != 0
    (line,) = [line for line in ended.out.splitlines() if line.startswith("evaluate: error: ")]
    assert "pass --multi_gpu" in line


def test_a_checkpoint_of_a_run_is_scored_with_the_data_of_the_run(trained, tmp_path):
    whole = result([sys.executable], trained, [], tmp_path / "whole.json")
    command = [sys.executable, "-m", "scripts.evaluate", str(trained.checkpoint())]
    ended = run_warm([*command, "--json", str(tmp_path / "checkpoint.json")])
    assert ended.code == 0, ended.out
    found = json.loads((tmp_path / "checkpoint.json").read_text(encoding="utf-8"))
    assert found["data"] == whole["data"]
    assert found["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-6)
