import pytest
import torch

from model import Attention, LMConfig, precompute_pos_cis, repeat_kv
from model.attention import fast_attention, fused_attention, plain_attention


@pytest.mark.parametrize("n_rep", [1, 2, 5])
def test_repeat_kv_puts_the_copies_of_a_head_side_by_side(n_rep):
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(repeat_kv(x, n_rep), x.repeat_interleave(n_rep, dim=2))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_fused_and_plain_attention_have_equal_outputs_and_gradients(dtype, tolerance, n_kv_heads):
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(2, 11, n, 8, generator=generator) for n in (4, n_kv_heads, n_kv_heads)]
    results = []
    for attend, kind in ((plain_attention, torch.float32), (fused_attention, dtype)):
        qkv = [x.to(kind).requires_grad_() for x in exact]
        out = attend(*qkv, 0.0)
        assert out.dtype == kind
        results.append([out, *torch.autograd.grad(out.float().square().sum(), qkv)])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused.float(), plain, atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "heads_given"), [(torch.float32, 4), (torch.float16, 4), (torch.bfloat16, 2)]
)
def test_heads_are_repeated_for_kernels_that_take_no_grouped_heads(dtype, heads_given, monkeypatch):
    given = {}

    def record(q, k, v, **options):
        given.update(options, heads=(k.shape[1], v.shape[1]))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    q, k, v = (torch.empty(2, 11, n, 8, dtype=dtype, device="meta") for n in (4, 2, 2))
    fast_attention(q, k, v, 0.0)
    assert given["heads"] == (heads_given, heads_given)
    assert given["enable_gqa"] == (heads_given == 2)
    assert given["is_causal"]
    # The only kernel that takes a mask takes no grouped heads.
    fast_attention(q, k, v, 0.0, torch.empty(2, 1, 11, 11, dtype=dtype, device="meta"))
    assert given["heads"] == (4, 4)
    assert not given["is_causal"]


@pytest.mark.parametrize("use_flash_attn", [False, True], ids=["plain", "flash"])
def test_in_training_dropout_acts_on_attention_weights_and_on_the_output(use_flash_attn):
    torch.manual_seed(0)
    config = LMConfig(dim=32, n_heads=4, dropout=0.5, use_flash_attn=use_flash_attn)
    layer, x, pos_cis = Attention(config), torch.randn(2, 11, 32), precompute_pos_cis(8, 11)
    shares, attend = [], layer.attend

    def seen(q, k, v, dropout, mask):
        shares.append(dropout)
        return attend(q, k, v, dropout, mask)

    layer.attend = seen
    out = layer(x, pos_cis)
    assert shares == [0.5]
    assert (out == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    q = x[:, :, None]
    assert not torch.equal(attend(q, q, q, 0.5), attend(q, q, q, 0.0))
