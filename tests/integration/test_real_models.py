"""Import a model of another project, train it and export it. The model is a smaller SmolLM2
with random weights and a tokenizer.json."""

from pathlib import Path

import pytest
import torch
from conftest import Trained, launch_command, run_warm
from json_tokenizers import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from scripts import export_hf, import_weights, prepare_data

pytestmark = pytest.mark.slow

# SmolLM2-135M's settings, but 2 layers (not 30), 520 ids (not 49,152), 64 positions (not 8,192).
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 520,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def hub_folder(texts, tmp_path_factory) -> Path:
    """A folder with the files of SmolLM2 on the Hub, but with a smaller model."""
    folder = tmp_path_factory.mktemp("hub") / "SmolLM2-135M"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMOLLM2)).save_pretrained(folder)
    return write_tokenizer(folder, "smollm2", texts, vocab_size=500)  # fewer than the model's 520


@pytest.fixture(scope="module")
def imported(hub_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("imported") / "smol"
    import_weights.main([str(hub_folder), str(out)])
    return out


@pytest.fixture(scope="module")
def data(hub_folder, corpus, tmp_path_factory) -> Path:
    """Data prepared with the tokenizer of hub_folder, not with the imported tokenizer."""
    out = tmp_path_factory.mktemp("data") / "sums"
    flags = ["--out", str(out), "--val_fraction", "0.1", "--workers", "1"]
    prepare_data.main(["--data", str(corpus), "--tokenizer", str(hub_folder), *flags])
    return out


@pytest.fixture(scope="module")
def trained(imported, data, tmp_path_factory) -> Trained:
    path = tmp_path_factory.mktemp("runs") / "run"
    flags = "--max_steps 3 --batch_size 2 --learning_rate 1e-3 --sample_interval 2 --max_seq_len 48"
    flags += " --sample_tokens 8 --log_interval 1 --log_with none"
    where = ["--data", str(data), "--out_dir", str(path.parent), "--run_name", path.name]
    where += ["--init_from", str(imported)]
    return Trained(path, run_warm([*launch_command("zero2", 2), *where, *flags.split()]).worked())


def test_an_imported_model_is_trained_and_exported_with_its_tokenizer(trained, imported, data):
    losses = trained.column("loss")
    assert losses[0] == pytest.approx(6.3, abs=0.3)  # ln 520
    assert losses[-1] < losses[0] - 0.1
    assert f"starts from: {imported}" in trained.out
    assert trained.samples()[0]["prompt"].startswith("sum ")
    export_hf.main([str(trained.path), str(trained.path / "hf")])
    for folder in (data, trained.path, trained.path / "weights", trained.path / "hf"):
        copied = (folder / "tokenizer.json").read_bytes()
        assert copied == (imported / "tokenizer.json").read_bytes()
