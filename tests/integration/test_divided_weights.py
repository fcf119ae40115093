"""ZeRO-3 divides a model among processes: what each holds, and what scripts.generate prints."""

import numpy as np
import pytest
from conftest import VOCAB_SIZE, injected, launch_command, run_warm
from small_model import opinionated, save_model

from scripts import generate

pytestmark = pytest.mark.slow

# Before a parameter is gathered, each process notes its elements: all, those in the share of the
# process, and those that are whole.
NOTE = """
(p,) = args
with open(os.environ["NOTE_TO"] + os.environ["RANK"], "a") as file:
    print(p.ds_numel, p.ds_tensor.numel(), p.numel(), file=file)
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
    place = "lm.engine.zero_inference.gathered"
    script = injected(tmp_path / "generate.py", place, NOTE, program="scripts.generate")
    launch = launch_command("configs/zero3_offload.yaml", 2, script, *flags)
    assert texts(run_warm(launch, NOTE_TO=f"{tmp_path}/rank-").worked()) == whole
    elements, shares, gathered = sum(np.loadtxt(tmp_path / f"rank-{i}").sum(0) for i in (0, 1))
    assert gathered == 0
    assert shares == pytest.approx(elements / 2, rel=0.01)
