import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import run
from safetensors.torch import load_file
from test_export_hf import SHAPE, some_tokens, write_weights
from test_import_weights import assert_same_model, assert_same_weights, error_line, write_llama

from formats.portable import load_portable
from runs.weights import load_trained
from scripts import import_weights


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "w", packed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture(scope="module")
def state(weights) -> dict[str, torch.Tensor]:
    """The state dict as Meta names it, with the output matrix and the tables that others save."""
    model = load_portable(weights)
    tables = {"freqs_cis": model.pos_cis, "layers.0.attention.mask": torch.zeros(1, 1, 4, 4)}
    return dict(model.state_dict()) | tables | {"rope.freqs": torch.ones(4)}


WRAPPINGS = {
    "bare": lambda state: state,
    "llama2.c": lambda state: {
        "model": {f"_orig_mod.{name}": weight for name, weight in state.items()},
        "model_args": {"n_heads": 6, "max_seq_len": 40, "dropout": 0.0},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}},
        "config": {"n_heads": 1, "compile": True},
        "iter_num": 7,
    },
    "distributed": lambda state: {f"module.{name}": weight for name, weight in state.items()},
    "state_dict": lambda state: {"state_dict": state, "args": {"n_heads": 6}},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_state_dict_is_read_however_it_is_wrapped(weights, state, tmp_path, wrapping):
    torch.save(WRAPPINGS[wrapping](state), tmp_path / "model.pth")
    flags = ["--n_heads", "6", "--rope_theta", "1e6"]
    import_weights.main([str(tmp_path / "model.pth"), str(tmp_path / "out"), *flags])
    assert_same_weights(tmp_path / "out", weights)
    with torch.no_grad():
        ours, source = load_portable(tmp_path / "out"), load_portable(weights)
        assert torch.equal(ours(some_tokens()).logits, source(some_tokens()).logits)


def test_a_state_dict_with_transformers_names_has_its_rotation_undone(llama, tmp_path):
    torch.save(load_file(llama / "model.safetensors"), tmp_path / "mini.pth")
    flags = ["--n_heads", "6", "--norm_eps", "1e-6"]
    import_weights.main([str(tmp_path / "mini.pth"), str(tmp_path / "out"), *flags])
    assert_same_model(tmp_path / "out", llama)


def test_half_precision_becomes_fp32_without_rounding(state, tmp_path):
    halves = {n: w if w.is_complex() else w.bfloat16() for n, w in state.items()}
    torch.save(halves, tmp_path / "half.pth")
    import_weights.main([str(tmp_path / "half.pth"), str(tmp_path / "out"), "--n_heads", "6"])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float32}
    assert all(torch.equal(stored[name], halves[name].float()) for name in stored)


def test_what_the_file_does_not_say_is_assumed_aloud(state, tmp_path, capsys):
    torch.save(state, tmp_path / "m.pth")
    flags = ["--n_heads", "6", "--max_seq_len", "50"]
    import_weights.main([str(tmp_path / "m.pth"), str(tmp_path / "out"), *flags])
    assert (
        "n_heads 6 (as asked), norm_eps 1e-05 (assumed, --norm_eps for another), "
        "rope_theta 10000 (assumed, --rope_theta for another), max_seq_len 50 (as asked)"
    ) in capsys.readouterr().out
    config = load_portable(tmp_path / "out").config
    assert (config.rope_theta, config.max_seq_len, config.n_kv_heads) == (10000, 50, 2)
    assert config.tie_embeddings


def test_a_missing_or_contradictory_number_of_heads_is_refused(state, llama, tmp_path, capsys):
    torch.save(state, tmp_path / "m.pth")
    out = tmp_path / "out"
    assert "pass --n_heads" in error_line(capsys, tmp_path / "m.pth", out)
    for heads in (0, -1, 7, 100):
        line = error_line(capsys, tmp_path / "m.pth", out, "--n_heads", heads)
        assert str(heads) in line
        assert "heads" in line
    assert "--n_heads 3, but" in error_line(capsys, llama, out, "--n_heads", "3")
    assert "--rope_theta 5.0, but" in error_line(capsys, llama, out, "--rope_theta", "5")
    torch.save({"model": state, "args": {"n_heads": "six"}}, tmp_path / "odd.pth")
    assert "must be a number, not 'six'" in error_line(capsys, tmp_path / "odd.pth", out)
    assert not out.exists()


def write_meta(folder: Path, state: dict, shards: int, embedding_along: int, **params) -> Path:
    """Meta's release: params.json and consolidated.NN.pth, cut as its parallel layers are."""
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps({"n_heads": 6, "vocab_size": -1} | params))
    for i in range(shards):
        part = {}
        for name, weight in state.items():
            along = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
            along = embedding_along if name == "tok_embeddings.weight" else along
            whole = weight.dim() != 2
            part[name] = weight if whole else weight.chunk(shards, along)[i].clone()
        torch.save(part, folder / f"consolidated.{i:02d}.pth")
    return folder


@pytest.mark.parametrize(("shards", "along"), [(1, 0), (2, 1), (2, 0)])
def test_metas_folder_is_read_and_its_shards_put_together(weights, state, tmp_path, shards, along):
    tables = ("freqs_cis", "layers.0.attention.mask")
    state = {name: weight for name, weight in state.items() if name not in tables}
    source = write_meta(tmp_path / "meta", state, shards, along, rope_theta=1e6)
    shutil.copy(weights / "tokenizer.model", source)
    import_weights.main([str(source), str(tmp_path / "out")])
    assert_same_weights(tmp_path / "out", weights)
    assert load_trained(str(tmp_path / "out")).model.config.rope_theta == 1e6


def test_shards_that_do_not_belong_together_are_refused(state, tmp_path, capsys):
    source = write_meta(tmp_path / "meta", state, 2, 1)
    part = torch.load(source / "consolidated.01.pth", weights_only=True)
    torch.save(part | {"norm2.weight": torch.ones(2)}, source / "consolidated.01.pth")
    assert "not shards of one model" in error_line(capsys, source, tmp_path / "out")
    torch.save(part | {"output.weight": torch.ones(2, 3)}, source / "consolidated.01.pth")
    line = error_line(capsys, source, tmp_path / "out")
    assert "the shards of output.weight do not fit together" in line
    write_meta(tmp_path / "3.1", state, 1, 0, use_scaled_rope=True)
    assert "use_scaled_rope" in error_line(capsys, tmp_path / "3.1", tmp_path / "out")


class Malicious:
    """Unpickling it writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Shell(Malicious):
    """The same through a module that PyTorch forbids by name, which it says in other words."""

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", [Malicious, Shell])
def test_a_file_that_would_run_code_is_refused_and_runs_none(state, tmp_path, capsys, kind):
    torch.save({"model": state, "x": kind(tmp_path / "ran")}, tmp_path / "m.pth")
    line = error_line(capsys, tmp_path / "m.pth", tmp_path / "out", "--n_heads", "6")
    assert "besides tensors, and loading that could run code" in line
    assert not (tmp_path / "ran").exists()


def test_files_that_hold_no_llama_are_refused(state, tmp_path, capsys):
    out, flags = tmp_path / "out", ("--n_heads", "6")

    def line_for(content) -> str:
        torch.save(content, tmp_path / "m.pth")
        return error_line(capsys, tmp_path / "m.pth", out, *flags)

    assert "no state dict" in line_for([1, 2])
    assert "x is int, not a tensor" in line_for({"x": 3})
    assert "torch.int8, not a tensor" in line_for({"x": torch.ones(2, dtype=torch.int8)})
    assert "tok_embeddings.weight is missing" in line_for({})
    assert "tok_embeddings.weight is missing" in line_for({"fc.weight": torch.ones(2, 2)})
    far = {"layers.7.attention.wq.weight": torch.ones(48, 48)}
    assert "layers.3.attention.wk.weight is missing" in line_for(state | far)
    assert "wq.weight is missing" in line_for(
        {n: w for n, w in state.items() if n != "layers.1.attention.wq.weight"}
    )
    assert "gate.weight is not in this model" in line_for(
        state | {"layers.0.gate.weight": torch.ones(2, 2)}
    )
    (tmp_path / "m.onnx").write_bytes(b"1")
    assert "neither .safetensors nor" in error_line(capsys, tmp_path / "m.onnx", out, *flags)
    (tmp_path / "empty").mkdir()
    assert "has neither config.json" in error_line(capsys, tmp_path / "empty", out)
    assert "no such file or folder" in error_line(capsys, tmp_path / "absent", out)
    assert not out.exists()


@pytest.mark.slow
def test_the_command_imports_what_load_trained_opens(weights, state, tmp_path):
    torch.save({"model": state, "model_args": {"n_heads": 6}}, tmp_path / "ckpt.pt")
    command = [sys.executable, "-m", "scripts.import_weights", str(tmp_path / "ckpt.pt")]
    where = [str(tmp_path / "out"), "--tokenizer", str(weights / "tokenizer.model")]
    ended = run([*command, *where])
    assert ended.code == 0, ended.out
    assert "0.09 million parameters" in ended.out
    assert load_trained(str(tmp_path / "out")).model.config.n_layers == SHAPE["n_layers"]


@pytest.mark.parametrize("odd", [torch.zeros(3, 3).to_sparse(), torch.zeros(3, 3).int()])
def test_what_is_no_plain_tensor_of_numbers_is_named(state, tmp_path, capsys, odd):
    torch.save(state | {"norm.weight": odd}, tmp_path / "m.pth")
    line = error_line(capsys, tmp_path / "m.pth", tmp_path / "out", "--n_heads", "6")
    assert "norm.weight is" in line


def test_weights_that_are_no_numbers_are_refused(state, tmp_path, capsys):
    broken = state | {"norm.weight": torch.full_like(state["norm.weight"], float("nan"))}
    torch.save(broken, tmp_path / "m.pth")
    line = error_line(capsys, tmp_path / "m.pth", tmp_path / "out", "--n_heads", "6")
    assert "norm.weight holds NaN" in line
