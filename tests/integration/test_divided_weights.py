"""ZeRO-3 divides a model among processes: what each holds, and what scripts.generate prints."""

import json

import pytest
from conftest import REPOSITORY, VOCAB_SIZE, launch_command, run_warm
from small_model import opinionated, save_model

from scripts import generate

pytestmark = pytest.mark.slow

# scripts.generate; each process writes to a file how many elements of the model it holds, and the
# most that loading gathers.
HOLDS = """
import json, os, sys
from lm.engine import zero_inference
from scripts import generate

sizes, gathered, load = [], zero_inference.gathered, zero_inference.load_divided
def noted(*parameters, **how):
    sizes.append(sum(p.ds_numel for p in parameters))
    return gathered(*parameters, **how)
def measured(*what):
    model = load(*what)
    facts = {
        "parameters": sum(p.ds_numel for p in model.parameters()),
        "in whole parameters": sum(p.numel() for p in model.parameters()),
        "share": sum(p.ds_tensor.numel() for p in model.parameters()),
        "most gathered": max(sizes),
    }
    with open(sys.argv[1] + os.environ["RANK"], "w") as file:
        json.dump(facts, file)
    return model
zero_inference.gathered, zero_inference.load_divided = noted, measured
generate.main(sys.argv[2:])
"""


def texts(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith('{"prompt"')]


def test_each_process_holds_its_share_of_the_weights_and_one_prints_the_texts_of_the_whole_model(
    packed, tmp_path, capsys
):
    """The texts have different lengths."""
    weights = save_model(tmp_path / "weights", opinionated(VOCAB_SIZE, 32), packed)
    flags = [str(weights), "--prompt", "sum 1", "--prompt", "第", "--num_samples", "2"]
    flags += ["--batch_size", "3", "--max_new_tokens", "20", "--stop", ";", "--jsonl"]
    generate.main(flags)
    whole = texts(capsys.readouterr().out)
    assert len(whole) == 4
    assert len({len(line) for line in whole}) > 1
    (tmp_path / "holds.py").write_text(HOLDS)
    program = [str(tmp_path / "holds.py"), f"{tmp_path}/", *flags]
    launch = launch_command("configs/zero3_offload.yaml", 2, *program)
    assert texts(run_warm(launch, PYTHONPATH=str(REPOSITORY)).worked()) == whole
    facts = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    for each in facts:
        assert each["in whole parameters"] == 0
        assert each["most gathered"] < each["parameters"]
    assert sum(each["share"] for each in facts) == pytest.approx(facts[0]["parameters"], rel=0.01)
