"""scripts.evaluate gives the same numbers on one and on two processes, also under ZeRO-3."""

import json
import sys
from pathlib import Path

import pytest
from conftest import LAUNCH, VOCAB_SIZE, run_warm
from small_model import opinionated, save_model

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"question": f"sum {i}: 1 + {i} =", "choices": [f" {i}", f" {1 + i};", " 第"], "answer": i % 3}
    for i in range(23)
]


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("weights"), opinionated(VOCAB_SIZE, 32), packed)


def result(launcher: list[str], source: Path, flags: list[str], path: Path) -> dict:
    """Run scripts.evaluate. Return what its --json file holds, and under "out" what it printed."""
    command = [*launcher, "-m", "scripts.evaluate", str(source), "--batch_size", "8", *flags]
    out = run_warm([*command, "--json", str(path)]).worked()
    assert out.count("interval:") == 1  # only one process prints the result
    return json.loads(path.read_text(encoding="utf-8")) | {"out": out}


@pytest.mark.parametrize(
    ("data", "limit", "launcher"),
    [  # 45, 69 and 99 rows: no multiple of 16, which is 2 processes × batch size 8
        ("packed", 45, "--multi_gpu"),
        ("questions", 0, "--config_file accelerate_config.yaml"),  # the file that training uses
        ("text", 33, "--config_file configs/zero3_offload.yaml"),
    ],
)
def test_two_processes_score_like_one(weights, packed, corpus, tmp_path, data, limit, launcher):
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    path = {"packed": packed, "questions": questions, "text": corpus}[data]
    flags = ["--data", str(path), "--limit", str(limit)]
    two = [*LAUNCH, "--num_processes", "2", *launcher.split()]
    one, two = (
        result(start, weights, flags, tmp_path / "result.json") for start in ([sys.executable], two)
    )
    assert (one["processes"], two["processes"]) == (1, 2)
    assert ("weights divided by ZeRO-3" in two["out"]) == (data == "text")
    for name in ("parameters", "units", "tokens"):
        assert one.get(name) == two.get(name)
    for name, metric in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(metric, rel=1e-6), name
