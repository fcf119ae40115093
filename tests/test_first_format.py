"""A checkpoint of the first format, in which the model's shape stood among the parts of "identity".

It and the weights of step 4 were written by the version of this project before "model" came into
state.json, with FLAGS on a CPU; the run takes steps 3 and 4 again. Other processors may round the
last digits of the matrix products otherwise.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runs.checkpoint import read_state
from runs.weights import load_trained
from train_pretrain_accelerate import main

FIXTURE = Path(__file__).parent / "fixtures" / "first_format"
LOSSES = [5.592276573181152, 5.538970470428467]
FLAGS = (
    "--dim 16 --n_layers 1 --n_heads 2 --n_kv_heads 1 --max_seq_len 16 --batch_size 8 "
    "--max_steps 4 --save_interval 2 --log_interval 1 --eval_interval 0 --dropout 0.1 "
    "--dtype float32 --learning_rate 1e-2 --log_with none --sample_tokens 4"
)


@pytest.fixture
def run(tmp_path) -> Path:
    shutil.copytree(FIXTURE / "checkpoints", tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def test_a_run_goes_on_from_it_as_the_version_that_wrote_it_did(run):
    main([*FLAGS.split(), "--data", str(FIXTURE / "data"), "--resume", str(run)])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(LOSSES, rel=1e-6)
    expected = load_file(FIXTURE / "weights-of-step-4.safetensors")
    weights = load_file(run / "checkpoints" / "step-00000004" / "weights.safetensors")
    assert weights.keys() == expected.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-6)
    state = read_state(run / "checkpoints" / "step-00000004")
    assert state["model"]["dim"] == 16
    assert "dim" not in state["identity"]


def test_another_shape_is_refused_with_both(run, capfd):
    flags = FLAGS.replace("--dim 16", "--dim 32").split()
    with pytest.raises(SystemExit) as end:
        main([*flags, "--data", str(FIXTURE / "data"), "--resume", str(run)])
    assert end.value.code == 2
    assert "dim: 16 in the checkpoint, 32 now" in capfd.readouterr().err


def test_its_weights_can_be_opened(run):
    shutil.copy(FIXTURE / "data" / "tokenizer.model", run)
    model = load_trained(str(run)).model
    assert (model.config.dim, model.config.n_layers, model.config.vocab_size) == (16, 1, 300)
