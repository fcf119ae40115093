"""ZeRO-3 divides a model among processes: what each holds, and what scripts.generate prints."""

import json
import sys

import pytest
from conftest import LAUNCH, REPOSITORY, Trained, run_warm, train

pytestmark = pytest.mark.slow

PROCESSES = 2
ONE_PROCESS = [sys.executable]
DIVIDED = [*LAUNCH, "--num_processes", str(PROCESSES)]
DIVIDED += ["--config_file", "configs/zero3_offload.yaml"]
# Each process writes to a file how many elements it holds, and the most that loading gathers.
HOLDS = """
import json, os, sys
from lm.storage.weights import load_trained
from lm.engine import zero_inference

sizes, gathered = [], zero_inference.gathered
def noted(*parameters, **how):
    sizes.append(sum(p.ds_numel for p in parameters))
    return gathered(*parameters, **how)
zero_inference.gathered = noted
zero = zero_inference.config_of_launch(None, None)
model = load_trained(sys.argv[1], lambda f: zero_inference.load_divided(zero, f)).model
shares = [p.ds_tensor for p in model.parameters()]
facts = {
    "parameters": sum(p.ds_numel for p in model.parameters()),
    "in whole parameters": sum(p.numel() for p in model.parameters()),
    "share": sum(share.numel() for share in shares),
    "most gathered": max(sizes),
}
with open(sys.argv[2] + os.environ["RANK"], "w") as file:
    json.dump(facts, file)
"""


@pytest.fixture(scope="module")
def trained(packed, tmp_path_factory) -> Trained:
    flags = "--max_steps 40 --batch_size 8 --learning_rate 1e-2 --dtype float32"
    return train("plain", 1, packed, tmp_path_factory.mktemp("trained") / "run", flags)


def said(launcher: list[str], *command: str) -> str:
    return run_warm([*launcher, *command], PYTHONPATH=str(REPOSITORY)).worked()


def test_divided_and_whole_weights_generate_the_same_texts(trained):
    """The texts have different lengths. Only one process prints them."""
    flags = ["--prompt", "sum 1", "--prompt", "第", "--num_samples", "2", "--batch_size", "3"]
    flags += ["--max_new_tokens", "20", "--stop", ";", "--jsonl"]
    texts = []
    for launcher in (ONE_PROCESS, DIVIDED):
        out = said(launcher, "-m", "scripts.generate", str(trained.path), *flags)
        texts.append([line for line in out.splitlines() if line.startswith('{"prompt"')])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 4
    assert len({len(line) for line in texts[0]}) > 1


def test_a_process_holds_its_share_of_the_weights_and_loads_them_in_parts(trained, tmp_path):
    script = tmp_path / "holds.py"
    script.write_text(HOLDS)
    said(DIVIDED, str(script), str(trained.path), f"{tmp_path}/")
    facts = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(PROCESSES)]
    for each in facts:
        assert each["in whole parameters"] == 0
        assert each["most gathered"] < each["parameters"]
    assert sum(each["share"] for each in facts) == pytest.approx(facts[0]["parameters"], rel=0.01)
