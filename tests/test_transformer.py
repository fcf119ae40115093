import copy
import math

import pytest
import torch
from small_model import opinionated
from torch.nn import functional as F

from benchmarks.generation import llama_of
from lm.formats.weight_layout import to_hugging_face
from model import LMConfig, Transformer, precompute_pos_cis

KERNELS = pytest.mark.parametrize("use_flash_attn", [False, True], ids=["plain", "flash"])
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 50}
SHAPE |= {"hidden_dim": 64, "max_seq_len": 40}
NORMED = {"qk_norm": True, "head_dim": 12}


def transformer(**changes) -> Transformer:
    settings = SHAPE | changes
    return opinionated(settings.pop("vocab_size"), settings.pop("max_seq_len"), **settings)


def some_tokens(seq_len=13, batch=3, seed=1) -> torch.Tensor:
    return torch.randint(50, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


@KERNELS
@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", [*({"n_kv_heads": n} for n in (1, 2, 4)), NORMED], ids=str)
def test_logits_and_gradients_equal_those_of_transformers(use_flash_attn, tie_embeddings, shape):
    model = transformer(**shape, tie_embeddings=tie_embeddings, use_flash_attn=use_flash_attn)
    tokens, targets = some_tokens(40), some_tokens(40, seed=2)
    llama, logits = llama_of(model, "float32"), model(tokens).logits
    assert logits.std() > 0.1
    expected = llama(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    model(tokens, targets).loss.backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    ours = to_hugging_face(model.config, {name: p.grad for name, p in model.named_parameters()})
    theirs = {name: p.grad for name, p in llama.named_parameters()}
    torch.testing.assert_close(dict(ours), theirs, atol=1e-5, rtol=1e-4)


def test_the_loss_of_a_bf16_model_is_fp32():
    model = transformer().bfloat16()
    assert model(some_tokens()).logits.dtype == torch.bfloat16
    assert model(some_tokens(), some_tokens(seed=2)).loss.dtype == torch.float32


@pytest.mark.parametrize("changes", [{"recompute": "selective"}, {"dropout": 1e-9}, {}], ids=str)
@KERNELS
def test_conversations_in_a_row_have_the_losses_and_gradients_that_they_have_alone(
    use_flash_attn, changes
):
    how = changes.copy()
    recompute = how.pop("recompute", "off")
    model = transformer(use_flash_attn=use_flash_attn, max_seq_len=200, **how).train()
    for block in model.layers:
        block.recompute = recompute
    lengths, tokens = (70, 1, 90, 39), some_tokens(200, batch=2)
    begins = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    starts = begins.repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    in_row = model(tokens, tokens, "none", starts=starts).loss
    alone = torch.cat([model(x, x, "none").loss for x in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(in_row, alone, rtol=1e-5, atol=1e-5)
    weights = list(model.parameters())
    found, expected = (torch.autograd.grad(loss.sum(), weights) for loss in (in_row, alone))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("changes", "millions"),
    [({}, 25.83), ({"dim": 768, "n_layers": 16}, 104.03)],
)
def test_the_documented_shapes_have_the_documented_number_of_parameters(changes, millions):
    with torch.device("meta"):
        model = Transformer(LMConfig(**changes))
    assert round(model.num_parameters() / 1e6, 2) == millions


def test_parameter_names_are_those_of_llamas_release():
    names = set(transformer(n_layers=1, tie_embeddings=False).state_dict())
    block = {f"attention.{w}" for w in ("wq", "wk", "wv", "wo")}
    block |= {f"feed_forward.{w}" for w in ("w1", "w2", "w3")} | {"attention_norm", "ffn_norm"}
    expected = {f"layers.0.{name}" for name in block} | {"tok_embeddings", "norm", "output"}
    assert names == {f"{name}.weight" for name in expected}


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
def test_initial_weights_have_mean_0_and_residual_outputs_a_smaller_deviation(tie_embeddings):
    torch.manual_seed(0)
    shape = {"dim": 256, "n_layers": 8, "vocab_size": 600, "hidden_dim": 512}
    model = Transformer(LMConfig(**SHAPE | shape, tie_embeddings=tie_embeddings))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        writes_residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        expected = 0.02 / math.sqrt(2 * 8) if writes_residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(parameter.mean().item()) < expected / 50, name


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
def test_flops_per_token_equal_a_count_by_hand(tie_embeddings):
    model = transformer(vocab_size=100, tie_embeddings=tie_embeddings)
    # Weights: output 100·32, last norm 32; in each layer wq and wo 2·32·32, wk and wv 2·16·32,
    # w1, w2 and w3 3·32·64, two norms 2·32: 3200 + 32 + 2·(2048 + 1024 + 6144 + 64) = 21792.
    # Attention: 12 · 2 layers · 32 channels · 16 tokens = 12288.
    assert model.flops_per_token(16) == 6 * 21_792 + 12_288


def test_casts_do_not_change_pos_cis_which_moves_to_the_meta_device_and_back():
    empty = transformer().to("meta")
    assert empty.pos_cis.is_meta
    for model in (
        transformer().to(torch.bfloat16),
        copy.deepcopy(transformer()).half().float(),
        empty.to_empty(device="cpu"),
    ):
        config = model.config
        exact = precompute_pos_cis(config.head_dim, config.max_seq_len, config.rope_theta)
        assert torch.equal(model.pos_cis, exact)
        assert dict(model.named_buffers())["pos_cis"] is model.pos_cis
