import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE
from safetensors.torch import load_file, save_file
from test_export_hf import some_tokens, write_weights
from transformers import LlamaConfig, LlamaForCausalLM

from formats.portable import load_portable
from runs.weights import load_trained
from scripts import export_hf, import_weights

FILES = {"config.json", "model.safetensors"}


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "w", packed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "llama")


def write_llama(folder: Path, **changes) -> Path:
    """A folder as transformers saves it, of a Llama that this project has never seen."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=64,
        initializer_range=0.2,
        **changes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def error_line(capsys, *argv) -> str:
    """The one line that the command ends with; nothing is written where it should have."""
    with pytest.raises(SystemExit) as ended:
        import_weights.main(list(map(str, argv)))
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("import_weights: error: ")
    assert not list(Path(argv[1]).parent.glob("*.partial-*"))
    return lines[0]


def assert_same_model(ours: Path, llama: Path, atol: float = 1e-5) -> None:
    """In fp64: rounding in fp32 comes to 1e-5 by itself on some CPUs."""
    tokens = some_tokens()
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(llama).double()(tokens).logits
        logits = load_portable(ours).double()(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=atol, rtol=0)


def assert_same_weights(ours: Path, source: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (ours, source))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def edited(folder: Path, copy: Path, **values) -> Path:
    """A copy of a Hugging Face folder with other values in config.json."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | values))
    return copy


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
def test_an_export_comes_back_bit_for_bit(packed, tmp_path, tie_embeddings):
    weights = write_weights(tmp_path / "w", packed, tie_embeddings=tie_embeddings)
    export_hf.main([str(weights), str(tmp_path / "hf"), "--no-check"])
    import_weights.main([str(tmp_path / "hf"), str(tmp_path / "back")])
    assert_same_weights(tmp_path / "back", weights)
    back, trained = load_trained(str(tmp_path / "back")), load_trained(str(weights))
    assert back.model.config == trained.model.config
    assert Path(back.tokenizer.path).read_bytes() == Path(trained.tokenizer.path).read_bytes()


def test_a_llama_of_transformers_computes_the_same_here(llama, tmp_path, capsys):
    import_weights.main([str(llama), str(tmp_path / "out")])
    assert_same_model(tmp_path / "out", llama)
    config = load_portable(tmp_path / "out").config
    assert (config.norm_eps, config.rope_theta, config.n_kv_heads) == (1e-6, 10000, 3)
    assert not config.tie_embeddings
    out = capsys.readouterr().out
    assert "n_heads 6 (from the files), norm_eps 1e-06 (from the files)" in out
    assert "tokenizer: none: there is no" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES


@pytest.mark.parametrize("version", [4, 5])
def test_llama_3s_scaling_and_heads_of_its_own_come_and_go(packed, tmp_path, version):
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 60, "rope_theta": 500.0}
    llama = write_llama(tmp_path / "llama", head_dim=16, rope_parameters=rope)
    if version == 4:
        base = rope.pop("rope_theta")
        old = {"rope_parameters": None, "rope_scaling": rope, "rope_theta": base}
        llama = edited(llama, tmp_path / "old", **old)
    import_weights.main([str(llama), str(tmp_path / "out")])
    # Frequencies are fp32 in both, and the last bit of one grows with the position.
    assert_same_model(tmp_path / "out", llama, atol=1e-4)
    config = load_portable(tmp_path / "out").config
    assert (config.head_dim, config.rope_theta, config.rope_scaling.factor) == (16, 500, 4)

    shutil.copy(packed / "tokenizer.model", tmp_path / "out")
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "hf")])  # compares logits
    import_weights.main([str(tmp_path / "hf"), str(tmp_path / "back")])
    assert_same_weights(tmp_path / "back", tmp_path / "out")
    assert load_portable(tmp_path / "back").config == config


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_may_lie_in_shards_and_in_either_format(llama, tmp_path, name, shards):
    source = tmp_path / "llama"
    shutil.copytree(llama, source)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    where = {key: f"part-{i % shards}{Path(name).suffix}" for i, key in enumerate(weights)}
    if shards == 1:
        where = dict.fromkeys(weights, name)
    else:
        (source / f"{name}.index.json").write_text(json.dumps({"weight_map": where}))
    for file in set(where.values()):
        part = {key: weights[key] for key in weights if where[key] == file}
        save = save_file if name.endswith("safetensors") else torch.save
        save(part, source / file)
    import_weights.main([str(source), str(tmp_path / "out")])
    assert_same_model(tmp_path / "out", llama)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_parameters": None, "rope_theta": 5000.0},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 5000},
    ],
    ids=["version 5", "version 4", "an older one"],
)
def test_the_rotary_base_is_read_from_either_place(llama, tmp_path, values):
    source = edited(llama, tmp_path / "other", **values)
    import_weights.main([str(source), str(tmp_path / "out")])
    assert load_portable(tmp_path / "out").config.rope_theta == 5000


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral': only 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
            "rope_scaling: factor is missing",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling is 'linear'"),
        # transformers lets rope_scaling win where both are there
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is 'linear'"),
        ({"rope_parameters": 3}, "rope_parameters must be an object"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "this model has 'llama3' only"),
        ({"head_dim": 16}, "wq.weight is (48, 48), the model has (96, 48)"),
        ({"hidden_size": "48"}, "dim must be a positive whole number, not '48'"),
        ({"max_position_embeddings": 10**12}, "max_seq_len must be at most 16,777,216"),
        ({"num_attention_heads": 7}, "n_heads 7 is not divisible by n_kv_heads 3"),
        ({"num_hidden_layers": 3}, "layers.2.attention.wk.weight is missing"),
        ({"num_hidden_layers": 1}, "is not in this model"),
        ({"intermediate_size": 81}, "w1.weight is (80, 48), the model has (81, 48)"),
        ({"num_key_value_heads": 6}, "wk.weight is (24, 48), the model has (48, 48)"),
        ({"tie_word_embeddings": True}, "says that the embeddings are tied, but they differ"),
    ],
)
def test_a_llama_that_this_model_cannot_be_is_refused(llama, tmp_path, capsys, values, expected):
    source = edited(llama, tmp_path / "other", **values)
    line = error_line(capsys, source, tmp_path / "out")
    assert expected in line
    assert str(source) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_config_that_leaves_out_the_shape_is_refused(llama, tmp_path, capsys, missing):
    source = edited(llama, tmp_path / "other")
    config = json.loads((source / "config.json").read_text())
    del config[missing]
    (source / "config.json").write_text(json.dumps(config))
    assert f"{missing} is missing" in error_line(capsys, source, tmp_path / "out")


def test_weights_of_another_architecture_are_named(llama, tmp_path, capsys):
    source = edited(llama, tmp_path / "other")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.q_norm.weight"
    save_file(tensors | {name: torch.ones(8)}, source / "model.safetensors")
    assert f"{name} is in no Llama" in error_line(capsys, source, tmp_path / "out")


def damage(source: Path, kind: str) -> None:
    weights, index = source / "model.safetensors", source / "model.safetensors.index.json"
    if kind == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif kind == "config":
        (source / "config.json").write_text('{"model_type": ')
    elif kind == "list":
        (source / "config.json").write_text("[1]")
    else:
        weights.unlink()
    if kind == "shard":
        index.write_text('{"weight_map": {"lm_head.weight": "part-7.safetensors"}}')
    elif kind == "map":
        index.write_text('{"weight_map": [1]}')
    elif kind == "noise":
        (source / "pytorch_model.bin").write_bytes(b"\x80\x02noise" * 50)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cut", "model.safetensors: damaged"),
        ("config", "no readable config.json"),
        ("list", "config.json: not a JSON object"),
        ("gone", "no weights (model.safetensors or pytorch_model.bin)"),
        ("shard", "part-7.safetensors: no such file"),
        ("map", "index.json: no weight_map"),
        ("noise", "pytorch_model.bin: not a file of torch.save, or damaged"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(llama, tmp_path, capsys, kind, expected):
    shutil.copytree(llama, tmp_path / "llama")
    damage(tmp_path / "llama", kind)
    line = error_line(capsys, tmp_path / "llama", tmp_path / "out")
    assert expected in line
    assert str(tmp_path / "llama") in line


def test_a_tokenizer_is_taken_from_the_flag_or_from_beside_the_weights(
    weights, llama, tmp_path, capsys
):
    named = str(weights / "tokenizer.model")
    import_weights.main([str(llama), str(tmp_path / "a"), "--tokenizer", named])
    assert "400 pieces" in capsys.readouterr().out
    shutil.copytree(llama, tmp_path / "llama")
    shutil.copy(named, tmp_path / "llama")
    import_weights.main([str(tmp_path / "llama"), str(tmp_path / "b")])
    for name in ("a", "b"):
        assert load_trained(str(tmp_path / name)).tokenizer.vocab_size == VOCAB_SIZE


def test_a_tokenizer_that_cannot_serve_is_said(weights, llama, tmp_path, capsys):
    source = tmp_path / "llama"
    shutil.copytree(llama, source)
    (source / "tokenizer.model").write_text("IQ== 0\n")  # as Llama 3's, which is none
    import_weights.main([str(source), str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "not a SentencePiece model; text needs one: pass --tokenizer FILE" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    flags = ("--tokenizer", source / "tokenizer.model")
    assert "not a SentencePiece model" in error_line(capsys, source, tmp_path / "b", *flags)
    tensors = load_file(source / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = tensors[name][:300].contiguous()
    save_file(tensors, source / "model.safetensors")
    source = edited(source, tmp_path / "small", vocab_size=300)
    flags = ("--tokenizer", weights / "tokenizer.model")
    line = error_line(capsys, source, tmp_path / "b", *flags)
    assert "has 400 pieces, the model only 300" in line


def test_only_an_older_import_is_replaced_and_only_if_asked(weights, llama, tmp_path, capsys):
    out = tmp_path / "out"
    import_weights.main([str(llama), str(out)])
    assert "pass --overwrite" in error_line(capsys, llama, out)
    import_weights.main([str(llama), str(out), "--overwrite", "--max_seq_len", "9"])
    assert load_portable(out).config.max_seq_len == 9
    (out / "notes.txt").touch()
    assert "is no import" in error_line(capsys, llama, out, "--overwrite")
    before = sorted(llama.iterdir())
    assert "is no import" in error_line(capsys, llama, llama, "--overwrite")
    assert sorted(llama.iterdir()) == before
    assert "in this project's form already" in error_line(capsys, weights, tmp_path / "b")


def test_the_context_may_be_another_than_in_training(llama, tmp_path):
    import_weights.main([str(llama), str(tmp_path / "out"), "--max_seq_len", "128"])
    assert load_portable(tmp_path / "out").config.max_seq_len == 128
    assert_same_model(tmp_path / "out", llama)
