"""Import a model of another project, train it and export it. The model is a smaller SmolLM2
with random weights and a tokenizer.json."""

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


def test_an_imported_model_is_trained_and_exported_with_its_tokenizer(texts, corpus, tmp_path):
    """The text is prepared with the tokenizer of the Hub's folder, not with the imported one."""
    hub = tmp_path / "hub" / "SmolLM2-135M"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMOLLM2)).save_pretrained(hub)
    write_tokenizer(hub, "smollm2", texts, vocab_size=500)  # fewer than the model's 520
    imported, data, path = (tmp_path / name for name in ("smol", "sums", "run"))
    import_weights.main([str(hub), str(imported)])
    flags = ["--out", str(data), "--val_fraction", "0.1", "--workers", "1"]
    prepare_data.main(["--data", str(corpus), "--tokenizer", str(hub), *flags])

    flags = "--max_steps 3 --batch_size 2 --learning_rate 1e-3 --sample_interval 2 --max_seq_len 48"
    flags += " --sample_tokens 8 --log_interval 1 --log_with none"
    where = ["--data", str(data), "--out_dir", str(tmp_path), "--run_name", "run"]
    command = [*launch_command("zero2", 2), *where, "--init_from", str(imported), *flags.split()]
    trained = Trained(path, run_warm(command).worked())
    losses = trained.column("loss")
    assert losses[0] == pytest.approx(6.3, abs=0.3)  # ln 520
    assert losses[-1] < losses[0] - 0.1
    assert f"starts from: {imported}" in trained.out
    assert trained.samples()[0]["prompt"].startswith("sum ")
    export_hf.main([str(path), str(path / "hf")])
    for folder in (data, path, path / "weights", path / "hf"):
        copied = (folder / "tokenizer.json").read_bytes()
        assert copied == (imported / "tokenizer.json").read_bytes()
