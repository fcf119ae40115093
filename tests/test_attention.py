import pytest
import torch

from model import Attention, LMConfig, precompute_pos_cis
from model.attention import fast_attention


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
