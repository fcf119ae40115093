import pytest
import torch
from test_transformer import SHAPE, some_tokens, transformer
from torch.nn import functional as F

from model import ConfigError, LMConfig
from model.experts import Experts, load_balance

MOE = {"use_moe": True, "n_routed_experts": 4, "num_experts_per_tok": 1, "moe_hidden_dim": 24}


def by_hand(experts: Experts, x: torch.Tensor, normalizes: bool) -> torch.Tensor:
    """Compute the output of one token after the other, with a loop over the token's experts."""
    out = torch.zeros_like(x)
    for row, token in enumerate(x):
        probabilities = (experts.router @ token).softmax(dim=0)
        chosen = probabilities.argsort(descending=True)[: experts.n_chosen].tolist()
        total = sum(probabilities[e] for e in chosen) if normalizes else 1.0
        weights = {e: probabilities[e] / total for e in chosen}
        shared = range(experts.n_routed, experts.n_routed + experts.n_shared)
        for e, weight in (weights | dict.fromkeys(shared, 1.0)).items():
            inner = F.silu(experts.w1[e] @ token) * (experts.w3[e] @ token)
            out[row] += weight * (experts.w2[e] @ inner)
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts_per_tok": 2, "n_shared_experts": 2},
        {"num_experts_per_tok": 3, "norm_topk_prob": True},
    ],
)
def test_output_and_gradients_equal_a_loop_over_experts(changes):
    experts = transformer(**MOE | changes).layers[0].feed_forward
    x = torch.randn(3, 7, 32, requires_grad=True)
    expected = by_hand(experts, x.flatten(0, 1), experts.normalizes).view_as(x)
    out, _ = experts(x)
    assert expected.std() > 0.01
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    inputs = [x, *experts.parameters()]
    weights = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((y * weights).sum(), inputs) for y in (out, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_with_one_expert_per_token_the_loss_trains_the_router():
    """With normalised weights the router would have no gradient (MiniMind's issue 858)."""
    sizes = {}
    for normalizes in (False, True):
        model = transformer(**MOE, norm_topk_prob=normalizes)
        tokens = some_tokens(40)
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        routers = [block.feed_forward.router.grad.square().mean() for block in model.layers]
        size = max(routers).sqrt() / model.tok_embeddings.weight.grad.square().mean().sqrt()
        sizes[normalizes] = size.item()
    assert sizes[False] > 0.01
    assert sizes[True] < 1e-6


def test_the_router_computes_in_fp32_under_autocast():
    experts = transformer(**MOE).layers[0].feed_forward
    x = torch.randn(2, 5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        _, probabilities = experts(x.bfloat16())
    assert probabilities.dtype == torch.float32
    assert torch.equal(probabilities, experts.route(x.bfloat16()))


def test_the_balancing_loss_is_one_for_an_even_load_and_independent_of_how_a_batch_is_divided():
    even = torch.full((2, 1, 4, 4), 0.1) + 0.6 * torch.eye(4)
    found = load_balance(even, torch.ones(1, 4, dtype=torch.bool), 1)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"balancing_loss": 1.0, "busiest_expert": 0.25, "idlest_expert": 0.25}
    )
    collapsed = torch.eye(4)[0].expand(2, 1, 4, 4)
    assert load_balance(collapsed, torch.ones(1, 4, dtype=torch.bool), 1)["balancing_loss"] == 4
    routing = torch.randn(2, 6, 9, 4).softmax(dim=-1)
    counts = torch.rand(6, 9) < 0.5
    counts[1] = False
    whole = load_balance(routing, counts, 2)["balancing_loss"]
    parts = [slice(0, 2), slice(2, 6)]
    weighted = sum(
        load_balance(routing[:, part], counts[part], 2)["balancing_loss"] * counts[part].sum()
        for part in parts
    )
    torch.testing.assert_close(weighted / counts.sum(), whole)


def test_only_the_chosen_and_the_shared_experts_count_as_active():
    shape = MOE | {"num_experts_per_tok": 2, "n_shared_experts": 1}
    model = transformer(**shape)
    expert = 3 * 24 * 32  # parameters
    inactive = 2 * 2 * expert  # in two layers, two of five experts
    assert model.num_parameters() - model.num_parameters(active=True) == inactive
    attention = 12 * 2 * 4 * 8 * 40  # 12 · layers · heads · head_dim · tokens
    assert model.flops_per_token(40) == 6 * model.num_parameters(active=True) + attention


def test_a_dense_config_stores_no_settings_of_experts_and_wrong_ones_are_refused():
    assert LMConfig(**SHAPE | {"use_moe": True}).moe_hidden_dim == 64
    assert not MOE.keys() & (LMConfig().to_dict() | LMConfig().shape()).keys()
    for values, said in (
        ({"n_routed_experts": 8}, "n_routed_experts needs experts: set use_moe too"),
        (MOE | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is larger than"),
        (MOE | {"router_aux_loss": -0.1}, "router_aux_loss must be at least 0"),
        (MOE | {"n_shared_experts": -1}, "n_shared_experts must be a whole number, at least 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            LMConfig(**SHAPE | values)
