"""A checkpoint that an older version of this project wrote, and a run that resumes from it.

The version of 2026-11-27 wrote it after step 2, with FLAGS on a CPU, and computed the LOSSES of
steps 3 and 4 and the weights of step 4. Only "equal_rows" in state.json is from a later version.
The test allows small differences, because CPUs round products differently.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import Trained
from safetensors.torch import load_file

from lm.storage.checkpoint import read_state
from train_pretrain_accelerate import main

OLD = Path(__file__).parent / "fixtures" / "old_run"
FLAGS = (
    "--dim 8 --n_layers 1 --n_heads 2 --n_kv_heads 1 --max_seq_len 16 --batch_size 8 "
    "--max_steps 4 --save_interval 2 --log_interval 1 --eval_interval 0 --dropout 0.1 "
    "--optimizer muon --dtype float32 --learning_rate 1e-2 --log_with none --sample_tokens 4 "
)
LOSSES = [5.654646396636963, 5.625202655792236]


def test_a_run_resumes_from_an_old_checkpoint_and_loses_nothing_of_its_state(tmp_path):
    """The old version left the rows of Muon's updates as they were; so does the resumed run."""
    run = tmp_path / "run"
    shutil.copytree(OLD / "checkpoints", run / "checkpoints")
    main([*FLAGS.split(), "--data", str(OLD / "data"), "--resume", str(run)])
    resumed = Trained(run, "")
    assert resumed.column("loss") == pytest.approx(LOSSES, rel=1e-6)
    expected = load_file(OLD / "weights-of-step-4.safetensors")
    weights = resumed.tensors(step=4)
    assert weights.keys() == expected.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-6)
    assert read_state(resumed.checkpoint())["equal_rows"] is False
