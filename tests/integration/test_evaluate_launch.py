"""scripts.evaluate gives the same numbers on one and on two processes, also under ZeRO-3."""

import json
import sys
from pathlib import Path

import pytest
from conftest import LAUNCH, Trained, run_warm, train

pytestmark = pytest.mark.slow

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
    """Flags for each kind of data. The numbers of rows are not divisible by 2 × 8."""
    questions = tmp_path_factory.mktemp("questions") / "q.jsonl"
    questions.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    return {
        "packed": ["--data", str(packed), "--limit", "45"],
        "choice": ["--data", str(questions)],
        "text": ["--data", str(corpus), "--limit", "33"],
    }


def result(launcher: list[str], source: Path, flags: list[str], path: Path) -> dict:
    """Return the contents of the JSON file, with the text on the terminal as "out"."""
    command = [*launcher, "-m", "scripts.evaluate", str(source), "--batch_size", "8", *flags]
    ended = run_warm([*command, "--json", str(path)])
    assert ended.code == 0, ended.out
    assert ended.out.count("interval:") == 1  # only one process prints the result
    return json.loads(path.read_text(encoding="utf-8")) | {"out": ended.out}


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        ("packed", ["--multi_gpu"]),
        ("choice", ["--config_file", "accelerate_config.yaml"]),  # the file that training uses
        ("text", ["--config_file", "configs/zero3_offload.yaml"]),
    ],
)
def test_two_processes_give_the_numbers_of_one(trained, data, tmp_path, kind, launcher):
    launcher = [*LAUNCH, "--num_processes", "2", *launcher]
    two = result(launcher, trained.path, data[kind], tmp_path / "two.json")
    one = result([sys.executable], trained.path, data[kind], tmp_path / "one.json")
    assert (one["processes"], two["processes"]) == (1, 2)
    assert ("weights divided by ZeRO-3" in two["out"]) == (kind == "text")
    for name in ("parameters", "units", "tokens"):
        assert one.get(name) == two.get(name)
    for name, metric in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(metric, rel=1e-6), name


def test_a_launcher_that_starts_one_process_for_two_is_refused(trained):
    """On a CPU `accelerate launch` without --multi_gpu, or with --cpu, ignores --num_processes. It
    sets the variables of this test."""
    environ = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}
    ended = run_warm([sys.executable, "-m", "scripts.evaluate", str(trained.path)], **environ)
    assert ended.code != 0
    (line,) = [line for line in ended.out.splitlines() if line.startswith("evaluate: error: ")]
    assert "pass --multi_gpu" in line
