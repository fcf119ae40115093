"""Models larger than a GPU: scripts.evaluate and scripts.generate under ZeRO-3."""

import json
import sys

import pytest
from conftest import Trained, run_warm, train

pytestmark = pytest.mark.slow

PROCESSES = 2
ALONE = [sys.executable]
DIVIDED = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(PROCESSES)]
DIVIDED += ["--config_file", "configs/zero3_offload.yaml", "--main_process_port", "0"]


@pytest.fixture(scope="module")
def trained(packed, tmp_path_factory) -> Trained:
    flags = "--max_steps 40 --batch_size 8 --learning_rate 1e-2 --dtype float32"
    return train("plain", 1, packed, tmp_path_factory.mktemp("trained") / "run", flags)


def said(launcher: list[str], *command: str) -> str:
    ended = run_warm([*launcher, "-m", *command])
    assert ended.code == 0, ended.out
    return ended.out


def test_evaluation_gives_the_numbers_of_one_process_that_has_the_model(trained, corpus, tmp_path):
    results = []
    for name, launcher in (("whole", ALONE), ("divided", DIVIDED)):
        path = tmp_path / f"{name}.json"
        flags = ("--data", str(corpus), "--limit", "33", "--batch_size", "8", "--json", str(path))
        out = said(launcher, "scripts.evaluate", str(trained.path), *flags)
        assert ("weights divided by ZeRO-3" in out) == (name == "divided")
        results.append(json.loads(path.read_text(encoding="utf-8")))
    whole, divided = results
    assert (whole["processes"], divided["processes"]) == (1, PROCESSES)
    assert divided["parameters"] == whole["parameters"] > 0
    for name, metric in whole["metrics"].items():
        assert divided["metrics"][name] == pytest.approx(metric, rel=1e-6), name


def test_the_same_texts_are_written_once(trained):
    """One is at its end sooner than the others."""
    flags = ["--prompt", "sum 1", "--prompt", "第", "--num_samples", "2", "--batch_size", "3"]
    flags += ["--max_new_tokens", "20", "--stop", ";", "--jsonl"]
    texts = []
    for launcher in (ALONE, DIVIDED):
        out = said(launcher, "scripts.generate", str(trained.path), *flags)
        texts.append([line for line in out.splitlines() if line.startswith('{"prompt"')])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 4
    assert len({len(line) for line in texts[0]}) > 1


def test_a_process_has_its_share_and_a_block_at_a_time(trained, tmp_path):
    said(DIVIDED, "tests.integration.divided_weights", str(trained.path), str(tmp_path))
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    for each in facts:
        assert each["held"] == 0
        assert each["where"] == ["cpu"]
        assert each["pos_cis"] == "torch.complex64"
        assert each["most together"] < each["parameters"]
    assert sum(each["share"] for each in facts) == pytest.approx(facts[0]["parameters"], rel=0.01)
