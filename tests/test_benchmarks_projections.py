import pytest
import torch

from benchmarks.contenders import Contender
from benchmarks.projections import FusedAttention, FusedFeedForward, fused_projections
from benchmarks.work import SIZES
from benchmarks.worker import build
from model import LMConfig, Transformer
from model.attention import Attention

FUSED = {"attention.wqkv": ("wq", "wk", "wv"), "feed_forward.w13": ("w1", "w3")}


@pytest.mark.parametrize("n_kv_heads", [1, 3, 6])
def test_fused_projections_compute_the_same(n_kv_heads):
    config = LMConfig(dim=48, n_heads=6, n_kv_heads=n_kv_heads, n_layers=2, vocab_size=100)
    torch.manual_seed(0)
    plain = Transformer(config)
    with fused_projections():
        fused = Transformer(config)
    assert isinstance(plain.layers[0].attention, Attention)
    assert isinstance(fused.layers[0].attention, FusedAttention)
    assert isinstance(fused.layers[0].feed_forward, FusedFeedForward)
    weights = plain.state_dict()
    for i in range(config.n_layers):
        for name, parts in FUSED.items():
            room = f"layers.{i}.{name.split('.')[0]}"
            rows = [weights.pop(f"{room}.{part}.weight") for part in parts]
            weights[f"layers.{i}.{name}.weight"] = torch.cat(rows)
    fused.load_state_dict(weights, strict=True)
    tokens = torch.randint(config.vocab_size, (2, 17))
    losses = [model(tokens[:, :-1], tokens[:, 1:]).loss for model in (plain, fused)]
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-5)
    for loss in losses:
        loss.backward()
    gradient = torch.cat(
        [getattr(plain.layers[0].attention, n).weight.grad for n in FUSED["attention.wqkv"]]
    )
    torch.testing.assert_close(fused.layers[0].attention.wqkv.weight.grad, gradient)


def test_the_contender_of_that_name_has_them_and_no_other(monkeypatch):
    made = []
    monkeypatch.setattr(
        "benchmarks.ours.OurStep", lambda work, _, **__: made.append(Transformer(work.config))
    )
    for fused in (True, False):
        build(Contender("ours", False, fused=fused), SIZES["test"])
    assert [hasattr(model.layers[0].attention, "wqkv") for model in made] == [True, False]
