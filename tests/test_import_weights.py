"""Hugging Face folders and state dicts of other projects become this project's weights."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE
from safetensors.torch import load_file, save_file
from test_export_hf import some_tokens, write_weights
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from lm.formats.config_json import read_config_json
from lm.formats.portable import load_portable
from lm.storage.weights import load_trained
from scripts import export_hf, import_weights

SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 10}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
SHAPE |= {"vocab_size": VOCAB_SIZE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "w", packed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_theirs(tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture(scope="module")
def state(weights) -> dict[str, torch.Tensor]:
    """A state dict with Meta's names, the output matrix, and tables that other projects save."""
    model = load_portable(weights)
    tables = {"freqs_cis": model.pos_cis, "layers.0.attention.mask": torch.zeros(1, 1, 4, 4)}
    return dict(model.state_dict()) | tables | {"rope.freqs": torch.ones(4)}


def write_theirs(folder: Path, kind: str = "llama", **changes) -> Path:
    """Write a model of random weights with transformers alone. Its norms are not all one."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | changes))
    for p in model.parameters():
        p.data.normal_(0, 0.1) if p.dim() > 1 else p.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def assert_same_model(ours: Path, theirs: Path, atol: float = 1e-5) -> None:
    """Compare logits in fp64: rounding in fp32 alone makes a difference of 1e-5 on some CPUs. The
    grouped products of experts need fp32."""
    tokens, model = some_tokens(), load_portable(ours)
    dtype = torch.float32 if model.config.use_moe else torch.float64
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(theirs).to(dtype)(tokens).logits
        logits = model.to(dtype)(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=atol, rtol=0)


def assert_same_weights(ours: Path, source: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (ours, source))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def edited(folder: Path, copy: Path, **values) -> Path:
    """Copy a Hugging Face folder and change values in config.json. None removes a key."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_minimind_experts_are_imported_but_shared_experts_not_exported(packed, tmp_path, refusal):
    experts = {"use_moe": True, "num_experts_per_tok": 2, "moe_hidden_dim": 24}
    source = write_weights(tmp_path / "w", packed, **experts, norm_topk_prob=True)
    export_hf.main([str(source), str(tmp_path / "hf")])
    said = {"model_type": "minimind", "use_moe": True, "n_routed_experts": 3, "num_experts": None}
    said |= {"n_shared_experts": 1, "moe_intermediate_size": None, "intermediate_size": 24}
    folder = edited(tmp_path / "hf", tmp_path / "minimind", **said)
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if ".mlp.gate." in name:
            tensors[name] = tensors[name][:3].clone()
        tensors[name.replace(".experts.3.", ".shared_experts.0.")] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    import_weights.main([str(folder), str(tmp_path / "out")])
    theirs, ours = (load_portable(tmp_path / name) for name in ("w", "out"))
    assert ours.config.num_experts_per_tok == 2
    assert (ours.config.n_shared_experts, ours.config.norm_topk_prob) == (1, True)
    first, second = (model.layers[0].feed_forward for model in (theirs, ours))
    assert torch.equal(first.w2, second.w2)
    assert torch.equal(first.router[:3], second.router)
    assert "shared experts" in refusal(export_hf, tmp_path / "out", tmp_path / "b")


@pytest.mark.parametrize("version", [4, 5])
def test_llama_3s_rope_scaling_and_head_dim_are_imported_and_exported(packed, tmp_path, version):
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 60, "rope_theta": 500.0}
    llama = write_theirs(tmp_path / "llama", head_dim=16, rope_parameters=rope)
    if version == 4:  # keys of config.json as transformers 4 writes them
        base = rope.pop("rope_theta")
        old = {"rope_parameters": None, "rope_scaling": rope, "rope_theta": base}
        llama = edited(llama, tmp_path / "old", rms_norm_eps=None, **old)
    import_weights.main([str(llama), str(tmp_path / "out")])
    # Both models round frequencies to fp32. The effect of a different last bit grows with position.
    assert_same_model(tmp_path / "out", llama, atol=1e-4)
    config = load_portable(tmp_path / "out").config
    assert (config.head_dim, config.rope_theta, config.rope_scaling.factor) == (16, 500, 4)
    assert config.norm_eps == 1e-6  # transformers' default

    shutil.copy(packed / "tokenizer.model", tmp_path / "out")
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "hf")])
    assert_same_model(tmp_path / "out", tmp_path / "hf", atol=1e-4)
    import_weights.main([str(tmp_path / "hf"), str(tmp_path / "back")])
    assert_same_weights(tmp_path / "back", tmp_path / "out")
    assert load_portable(tmp_path / "back").config == config


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral', only llama"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        # transformers prefers rope_scaling to rope_parameters
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"num_hidden_layers": 3}, "layers.2.attention.wk.weight is missing"),
        ({"tie_word_embeddings": True}, "ties the embeddings, but lm_head differs"),
    ],
)
def test_a_model_unlike_llama_or_its_config_is_refused(llama, tmp_path, refusal, values, expected):
    source = edited(llama, tmp_path / "other", **values)
    assert expected in refusal(import_weights, source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_tokenizer_is_taken_from_the_source_folder(packed, llama, tmp_path, refusal):
    source = shutil.copytree(llama, tmp_path / "llama")
    shutil.copy(packed / "tokenizer.model", source)
    import_weights.main([str(source), str(tmp_path / "a")])
    trained = load_trained(str(tmp_path / "a"))
    assert (trained.tokenizer.vocab_size, trained.chats) == (VOCAB_SIZE, False)
    (source / "tokenizer.model").write_text("IQ== 0\n")  # tiktoken's format, which Llama 3 uses
    assert "not a SentencePiece model" in refusal(import_weights, source, tmp_path / "b")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_only_the_shards_of_the_index_are_read_and_a_whole_file_comes_first(
    llama, tmp_path, refusal, name
):
    """A folder may hold shards of an older version, or lack one that is not downloaded yet. Older
    versions of transformers write pytorch_model.bin."""
    state = load_file(llama / "model.safetensors")
    new, old = {"1-of-2": sorted(state)[:9], "2-of-2": sorted(state)[9:]}, {"1-of-1": state}
    save, (stem, end) = (save_file if name == "model.safetensors" else torch.save), name.split(".")
    (folder := tmp_path / "llama").mkdir()
    shutil.copy(llama / "config.json", folder)
    save(state, folder / name)
    for parts, factor in ((new, 1.0), (old, 0.5)):
        for part, names in parts.items():
            tensors = {key: state[key] * factor for key in names}
            save(tensors, folder / f"{stem}-{part}.{end}")
    import_weights.main([str(folder), str(tmp_path / "whole")])
    assert_same_model(tmp_path / "whole", llama)
    (folder / name).unlink()
    line = refusal(import_weights, folder, tmp_path / "out")
    assert "no model.safetensors and no model.safetensors.index.json: download" in line
    shards = {key: f"{stem}-{part}.{end}" for part in new for key in new[part]}
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": shards}))
    import_weights.main([str(folder), str(tmp_path / "named")])
    assert_same_model(tmp_path / "named", llama)
    (folder / f"{stem}-2-of-2.{end}").unlink()
    assert f"{stem}-2-of-2.{end}" in refusal(import_weights, folder, tmp_path / "out")


@pytest.mark.parametrize("add", ["module.", "transformer.model.", None])
def test_prefixes_of_names_are_left_out(llama, tmp_path, add):
    """AutoModel saves names without "model." (None here)."""
    state = load_file(llama / "model.safetensors")
    named = {
        (add or "") + name.removeprefix("" if add else "model."): state[name] for name in state
    }
    folder = shutil.copytree(llama, tmp_path / "llama")
    save_file(named, folder / "model.safetensors")
    import_weights.main([str(folder), str(tmp_path / "a")])
    flags = ["--n_heads", "8", "--norm_eps", "1e-6", "--rope_theta", "1e6"]
    import_weights.main([str(folder / "model.safetensors"), str(tmp_path / "b"), *flags])
    for name in ("a", "b"):
        assert_same_model(tmp_path / name, llama)


def test_quantised_weights_and_adapters_are_refused_by_name_with_the_remedy(
    llama, tmp_path, refusal
):
    state = load_file(llama / "model.safetensors")
    layer = "model.layers.0.self_attn.q_proj."
    weight = state.pop(f"{layer}weight")
    scale = torch.ones(1)
    cases = {
        "weight_scale_inv is of a qu": {"weight": weight.bfloat16(), "weight_scale_inv": scale},
        "qweight is of a quantised": {"qweight": (weight * 9).to(torch.int8)},
        "is not floating point of 16 bits or more": {"weight": weight.to(torch.float8_e4m3fn)},
        "is an adapter: merge it": {"weight": weight, "lora_A.weight": scale},
    }
    folder = shutil.copytree(llama, tmp_path / "llama")
    for says, tensors in cases.items():
        named = {layer + name: tensor for name, tensor in tensors.items()}
        save_file(state | named, folder / "model.safetensors")
        assert says in refusal(import_weights, folder, tmp_path / "out")
        file = folder / "model.safetensors"
        assert says in refusal(import_weights, file, tmp_path / "out", "--n_heads", "8")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "config.json").unlink()
    assert "merge_and_unload() of PEFT" in refusal(import_weights, folder, tmp_path / "out")


def test_a_qwen3_without_head_dim_has_heads_of_128_channels(tmp_path):
    Qwen3Config(hidden_size=48).save_pretrained(tmp_path / "qwen3")
    folder = edited(tmp_path / "qwen3", tmp_path / "without", head_dim=None)
    assert read_config_json(folder).head_dim == 128


def test_only_an_older_import_is_replaced_and_only_with_overwrite(llama, tmp_path, refusal, capsys):
    out = tmp_path / "out"
    import_weights.main([str(llama), str(out)])
    written = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == written
    assert "no tokenizer (to use text, pass --tokenizer FILE)" in capsys.readouterr().out
    assert "pass --overwrite" in refusal(import_weights, llama, out)
    import_weights.main([str(llama), str(out), "--overwrite", "--max_seq_len", "9"])
    assert load_portable(out).config.max_seq_len == 9
    said = "n_heads 8, norm_eps 1e-06, rope_theta 1e+06, max_seq_len 9\n"
    assert said in capsys.readouterr().out
    assert "is no import" in refusal(import_weights, llama, llama, "--overwrite")
    (out / "notes.md").touch()
    assert "is no import" in refusal(import_weights, llama, out, "--overwrite")
    line = refusal(import_weights, llama, tmp_path / "b", "--n_heads", "3")
    assert "drop --n_heads: " in line


def test_a_training_checkpoint_gives_weights_and_settings_which_flags_may_not_contradict(
    weights, state, tmp_path, refusal
):
    """llama2.c writes such files; Meta writes params.json beside the weights."""
    named = {f"_orig_mod.{name}": weight for name, weight in state.items()}
    said = {"n_heads": 6, "norm_eps": 1e-6, "dropout": 0.1}
    content = {"model": named, "model_args": said, "optimizer": {"state": {0: torch.ones(1)}}}
    torch.save(content, tmp_path / "m.pth")
    (tmp_path / "params.json").write_text('{"rope_theta": 500000.0, "dim": 48}')
    import_weights.main([str(tmp_path / "m.pth"), str(tmp_path / "out")])
    assert_same_weights(tmp_path / "out", weights)
    config = load_portable(tmp_path / "out").config
    assert (config.n_heads, config.norm_eps, config.rope_theta) == (6, 1e-6, 500000.0)
    refused = refusal(import_weights, tmp_path / "m.pth", tmp_path / "other", "--n_heads", "3")
    assert "drop --n_heads: " in refused
    assert "m.pth say 6" in refused
    (tmp_path / "params.json").write_text('{"use_scaled_rope": true}')
    refused = refusal(import_weights, tmp_path / "m.pth", tmp_path / "other")
    assert "use_scaled_rope is set: import the Hugging Face folder" in refused


def test_missing_settings_are_assumed_and_printed(state, tmp_path, capsys):
    torch.save(state, tmp_path / "m.pth")
    import_weights.main([str(tmp_path / "m.pth"), str(tmp_path / "out"), "--n_heads", "6"])
    assumed = "norm_eps 1e-05 (assumed), rope_theta 10000 (assumed), max_seq_len 2048 (assumed)"
    assert f"n_heads 6, {assumed}\n" in capsys.readouterr().out


class Malicious:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("change", "flags", "says"),
    [
        (lambda s: s, "", "pass --n_heads"),
        (lambda s: s, "--n_heads 7", "--n_heads 7 does not divide the 48 rows of wq"),
        (lambda s: {"step": 2}, "--n_heads 6", "step is not a tensor"),
        (lambda s: s | {"layers.0.x.bias": torch.ones(4)}, "--n_heads 6", "x.bias has no counter"),
        (lambda s: {"norm.weight": s["norm.weight"]}, "--n_heads 6", "not a Llama: a matrix of"),
        (lambda s: {"model": s, "x": Malicious()}, "--n_heads 6", "holds code, which is not run"),
    ],
)
def test_a_wrong_n_heads_other_state_dicts_and_code_are_refused(
    state, tmp_path, refusal, monkeypatch, change, flags, says
):
    monkeypatch.chdir(tmp_path)
    torch.save(change(state), "m.pth")
    assert says in refusal(import_weights, "m.pth", "out", *flags.split())
    assert [path.name for path in tmp_path.iterdir()] == ["m.pth"]
