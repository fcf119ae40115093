"""Import a model of another project, train it and export it. The model is a smaller SmolLM2
with random weights and a tokenizer.json."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Trained, launch_command, run_warm
from json_tokenizers import write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from scripts import export_hf, generate, import_weights, prepare_data

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
    ended = run_warm([*launch_command("zero2", 2), *where, *flags.split()])
    assert ended.code == 0, ended.out
    return Trained(path, ended.out)


def test_an_imported_model_continues_training_with_its_tokenizer(trained, imported, data):
    losses = trained.column("loss")
    assert losses[0] == pytest.approx(6.3, abs=0.3)  # ln 520
    assert losses[-1] < losses[0] - 0.1
    assert f"starts from: {imported}" in trained.out
    rows = (trained.path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[0])["prompt"].startswith("sum ")
    for folder in (data, trained.path, trained.path / "weights"):
        copied = (folder / "tokenizer.json").read_bytes()
        assert copied == (imported / "tokenizer.json").read_bytes()


def test_the_export_generates_the_same_text_in_transformers(trained, hub_folder, tmp_path, capsys):
    out = tmp_path / "hf"
    export_hf.main([str(trained.path), str(out)])
    capsys.readouterr()
    assert (out / "tokenizer.json").read_bytes() == (hub_folder / "tokenizer.json").read_bytes()
    prompts = ["sum 1: 1 +", "第"]
    flags = [part for prompt in prompts for part in ("--prompt", prompt)]
    flags += ["--greedy", "--max_new_tokens", "12", "--jsonl", "--dtype", "float32"]
    generate.main([str(trained.path), *flags])
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    model, tokenizer = (kind.from_pretrained(out) for kind in (AutoModelForCausalLM, AutoTokenizer))
    for prompt, text in zip(prompts, texts, strict=True):
        ids = [tokenizer.bos_token_id, *tokenizer(prompt).input_ids]
        written = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
        assert tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True) == text
