import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_transformer import transformer

from lm.common.errors import UsageError
from lm.formats.portable import CONFIG_FILE, WEIGHTS_FILE, load_portable, save_portable
from model import Transformer

TOKENS = torch.arange(1, 9)[None]


def weights_of(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def saved(tmp_path):
    model = transformer()
    save_portable(tmp_path / "weights", model.config, weights_of(model))
    return tmp_path / "weights"


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
def test_a_saved_model_comes_back_with_equal_logits(tmp_path, tie_embeddings):
    """Matrices that are not contiguous are saved correctly, and a tied matrix is saved once."""
    model = transformer(tie_embeddings=tie_embeddings, dropout=0.3)
    weights = {name: w.t().contiguous().t() for name, w in weights_of(model).items()}
    out = tmp_path / "not" / "yet"
    save_portable(out, model.config, weights)
    loaded = load_portable(out)
    assert loaded.config == model.config
    assert not loaded.training
    assert (loaded.output.weight is loaded.tok_embeddings.weight) == tie_embeddings
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    stored = load_file(out / WEIGHTS_FILE)
    assert sum(tensor.numel() for tensor in stored.values()) == model.num_parameters()
    assert json.loads((out / CONFIG_FILE).read_text()) == model.config.to_dict()
    assert (out / WEIGHTS_FILE).stat().st_mode == (out / CONFIG_FILE).stat().st_mode


def test_a_disk_that_refuses_other_permissions_gets_the_weights(tmp_path, monkeypatch):
    """Mounted buckets and shares do so."""

    def refuse(*args, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    model = transformer()
    save_portable(tmp_path, model.config, weights_of(model))
    assert torch.equal(load_portable(tmp_path)(TOKENS).logits, model(TOKENS).logits)


K, NORM = "layers.1.attention.wk.weight", "norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {n: w[n] for n in w if n != K}, r"layers\.1\.attention\.wk\.weight is missing"),
        (lambda w: w | {"layers.2.x": torch.ones(2)}, r"layers\.2\.x is not in this model"),
        (lambda w: w | {NORM: torch.ones(17)}, r"norm.weight has shape \(17,\), the model needs"),
        (lambda w: w | {NORM: torch.ones(32) / 0}, "norm.weight contains NaN or infinity"),
        (lambda w: w | {NORM: torch.ones(32).to(torch.int8)}, "or is not floating point"),
    ],
)
def test_weights_that_do_not_fit_are_named(saved, change, message):
    weights = change(weights_of(transformer()))
    save_file(weights, saved / WEIGHTS_FILE)
    with pytest.raises(UsageError, match=f"^{saved}: .*{message}"):
        load_portable(saved)


@pytest.mark.parametrize(
    "text",
    [b"{", b'["dim"]', b'{"dim": 0}', b'{"experts": 4}', b'{"dim": "\xff"}', b"[" * 99_999, None],
    ids=["cut", "list", "zero", "unknown", "bytes", "deep nesting", "missing"],
)
def test_an_invalid_config_file_is_an_error_that_names_its_folder(saved, text):
    (saved / CONFIG_FILE).unlink()
    if text is not None:
        (saved / CONFIG_FILE).write_bytes(text)
    with pytest.raises(UsageError, match=str(saved)):
        load_portable(saved)


def test_shapes_are_compared_before_a_model_larger_than_memory_is_built(saved):
    config = json.loads((saved / CONFIG_FILE).read_text())
    (saved / CONFIG_FILE).write_text(json.dumps(config | {"dim": 1 << 24, "n_heads": 1 << 20}))
    with pytest.raises(UsageError, match=r"has shape \(.*\), the model needs \("):
        load_portable(saved)


@pytest.mark.parametrize("share", [None, 0.01, 0.999])
def test_a_truncated_or_missing_weights_file_is_refused(saved, share):
    data = (saved / WEIGHTS_FILE).read_bytes()
    (saved / WEIGHTS_FILE).unlink()
    if share is not None:
        (saved / WEIGHTS_FILE).write_bytes(data[: int(share * len(data))])
    with pytest.raises(UsageError, match=f"{saved / WEIGHTS_FILE}: no readable weights"):
        load_portable(saved)
