import dataclasses
import math

import pytest
import torch

from benchmarks.peers import PEERS, PeerStep
from benchmarks.work import SIZES, VOCAB_SIZE
from model import Transformer

TEST = dataclasses.replace(SIZES["test"], dtype="float32")
MILLIONS = {"26m": 25.83, "104m": 104.03, "360m": 361}


@pytest.fixture(params=PEERS)
def peer(request):
    pytest.importorskip(request.param)
    return request.param


@pytest.mark.parametrize(("size", "millions"), MILLIONS.items())
def test_sizes_have_the_parameters_of_their_names(size, millions):
    assert SIZES[size].counts[0] / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize("size", MILLIONS)
def test_a_peer_has_exactly_our_number_of_parameters(peer, size):
    with torch.device("meta"):
        model = PEERS[peer].build(SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == SIZES[size].counts[0]


def test_everybody_gets_the_same_tokens_and_each_rank_others():
    cpu = torch.device("cpu")
    first, again, other = (TEST.batches(rank, cpu) for rank in (0, 0, 1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    tokens, targets = first[0]
    assert tokens.shape == targets.shape == (TEST.batch_size, TEST.seq_len)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def halves(weight, heads):
    """Rows of each head reordered from rotated pairs (0, 1), (2, 3) to (0, d/2), (1, d/2 + 1)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def give_weights(ours, model, peer, config):
    """Our weights under the peer's names; everything must have been given at the end."""
    given = {}
    for i, layer in enumerate(ours.layers):
        attention, mlp = layer.attention, layer.feed_forward
        wq, wk = (
            halves(w.weight, n)
            for w, n in zip(
                (attention.wq, attention.wk), (config.n_heads, config.n_kv_heads), strict=True
            )
        )
        wv, wo = attention.wv.weight, attention.wo.weight
        if peer == "litgpt":
            names = {
                "norm_1": layer.attention_norm,
                "norm_2": layer.ffn_norm,
                "mlp.fc_1": mlp.w1,
                "mlp.fc_2": mlp.w3,
                "mlp.proj": mlp.w2,
            }
            given |= {f"transformer.h.{i}.{k}.weight": v.weight for k, v in names.items()}
            given[f"transformer.h.{i}.attn.qkv.weight"] = torch.cat((wq, wk, wv))
            given[f"transformer.h.{i}.attn.proj.weight"] = wo
        else:
            names = {
                "input_layernorm": layer.attention_norm,
                "mlp.gate_proj": mlp.w1,
                "post_attention_layernorm": layer.ffn_norm,
                "mlp.up_proj": mlp.w3,
                "mlp.down_proj": mlp.w2,
            }
            given |= {f"model.layers.{i}.{k}.weight": v.weight for k, v in names.items()}
            for letter, weight in zip("qkvo", (wq, wk, wv, wo), strict=True):
                given[f"model.layers.{i}.self_attn.{letter}_proj.weight"] = weight
    embedding, norm = (
        ("transformer.wte", "transformer.ln_f")
        if peer == "litgpt"
        else ("model.embed_tokens", "model.norm")
    )
    table = ours.tok_embeddings.weight
    given |= {f"{embedding}.weight": table, "lm_head.weight": table}
    given[f"{norm}.weight"] = ours.norm.weight
    model.load_state_dict(given, strict=True)


def test_a_peer_with_our_weights_has_our_loss_and_our_gradient(peer):
    torch.manual_seed(0)
    ours, model = Transformer(TEST.config), PEERS[peer].build(TEST)
    give_weights(ours, model, peer, TEST.config)
    tokens, targets = TEST.batches(0, torch.device("cpu"))[0]
    our_loss = ours(tokens, targets).loss
    loss = PEERS[peer].loss(model, tokens, targets, torch.enable_grad())
    assert loss.item() == pytest.approx(our_loss.item(), abs=1e-5)
    our_loss.backward()
    loss.backward()
    norms = [
        torch.nn.utils.get_total_norm(p.grad for p in m.parameters()).item() for m in (ours, model)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_a_peers_step_trains_fp32_weights_under_autocast_from_the_untrained_loss(peer):
    step = PeerStep(peer, dataclasses.replace(TEST, dtype="bfloat16", accumulation_steps=2), False)
    assert {p.dtype for p in step._weights} == {torch.float32}
    before = [p.detach().clone() for p in step._weights]
    step.step()
    assert step.loss() == pytest.approx(math.log(VOCAB_SIZE), abs=0.1)
    assert not any(torch.equal(a, b) for a, b in zip(before, step._weights, strict=True))
