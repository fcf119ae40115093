"""Checkpoints that older versions of this project wrote, and runs that resume from them.

In the first format, "identity" in state.json has the model's shape; in the second, "model" has it.
The first run used AdamW, the second Muon. An old version wrote each checkpoint after step 2, with
FLAGS and OWN_FLAGS on a CPU. The same version computed the LOSSES of steps 3 and 4 and the weights
of step 4. The test allows small differences, because CPUs round products differently.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import Trained
from safetensors.torch import load_file

from storage.checkpoint import read_state
from train_pretrain_accelerate import main

FIXTURES = Path(__file__).parent / "fixtures"
DATA = str(FIXTURES / "first_format" / "data")
FLAGS = (
    "--n_layers 1 --n_heads 2 --n_kv_heads 1 --max_seq_len 16 --batch_size 8 "
    "--max_steps 4 --save_interval 2 --log_interval 1 --eval_interval 0 --dropout 0.1 "
    "--dtype float32 --learning_rate 1e-2 --log_with none --sample_tokens 4 "
)
OWN_FLAGS = {"first_format": "--dim 16", "second_format": "--dim 8 --optimizer muon"}
LOSSES = {
    "first_format": [5.592276573181152, 5.538970470428467],
    "second_format": [5.654646396636963, 5.625202655792236],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_resumes_from_an_old_checkpoint_with_the_losses_of_the_old_version(tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / name / "checkpoints", run / "checkpoints")
    main([*FLAGS.split(), *OWN_FLAGS[name].split(), "--data", DATA, "--resume", str(run)])
    resumed = Trained(run, "")
    assert resumed.column("loss") == pytest.approx(LOSSES[name], rel=1e-6)
    expected = load_file(FIXTURES / name / "weights-of-step-4.safetensors")
    weights = resumed.tensors(step=4)
    assert weights.keys() == expected.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-6)
    state = read_state(resumed.checkpoint(4))
    assert state["model"]["n_layers"] == 1
    assert "dim" not in state["identity"]
