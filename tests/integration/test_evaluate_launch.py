"""scripts.evaluate gives the same numbers on one and on two processes, also under ZeRO-3."""

import json
from pathlib import Path

import pytest
from conftest import VOCAB_SIZE, launch_command, run_warm
from small_model import opinionated, save_model

from scripts import evaluate

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"question": f"sum {i}: 1 + {i} =", "choices": [f" {i}", f" {1 + i};", " 第"], "answer": i % 3}
    for i in range(23)
]


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("weights"), opinionated(VOCAB_SIZE, 32), packed)


@pytest.mark.parametrize(
    ("data", "limit", "engine"),
    [  # 45, 69 and 99 rows: no multiple of 16, which is 2 processes × batch size 8
        ("packed", 45, "ddp"),
        ("questions", 0, "zero2"),  # the file that training uses
        ("text", 33, "configs/zero3_offload.yaml"),
    ],
)
def test_two_processes_score_like_one(
    weights, packed, corpus, tmp_path, accelerator, data, limit, engine
):
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    path = {"packed": packed, "questions": questions, "text": corpus}[data]
    result = tmp_path / "result.json"
    flags = [str(weights), "--batch_size", "8", "--json", str(result), "--data", str(path)]
    flags += ["--limit", str(limit)]
    evaluate.main(flags)
    one = json.loads(result.read_text(encoding="utf-8"))
    out = run_warm(launch_command(engine, 2, "-m", "scripts.evaluate", *flags)).worked()
    two = json.loads(result.read_text(encoding="utf-8"))
    assert out.count("interval:") == 1  # only one process prints the result
    assert (one["processes"], two["processes"]) == (1, 2)
    assert ("weights divided by ZeRO-3" in out) == (data == "text")
    for name in ("parameters", "units", "tokens"):
        assert one.get(name) == two.get(name)
    for name, metric in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(metric, rel=1e-6), name
