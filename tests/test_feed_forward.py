import torch

from model import FeedForward, LMConfig


def feed_forward(**changes) -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(LMConfig(dim=16, n_heads=2, hidden_dim=40, **changes))


def by_definition(layer: FeedForward, x: torch.Tensor) -> torch.Tensor:
    w1, w2, w3 = (w.weight.double() for w in (layer.w1, layer.w2, layer.w3))
    gate = x.double() @ w1.T
    return (gate / (1 + torch.exp(-gate)) * (x.double() @ w3.T)) @ w2.T


def test_it_is_swiglu():
    layer, x = feed_forward(), 3 * torch.randn(2, 5, 16)
    torch.testing.assert_close(layer(x).double(), by_definition(layer, x), atol=1e-5, rtol=0)


def test_dropout_acts_in_training_alone():
    layer, x = feed_forward(dropout=0.5), torch.randn(4, 50, 16)
    assert 0.4 < (layer(x) == 0).float().mean() < 0.6
    torch.testing.assert_close(layer.eval()(x).double(), by_definition(layer, x), atol=1e-5, rtol=0)
