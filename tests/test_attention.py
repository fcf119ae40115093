import pytest
import torch

from model import Attention, LMConfig, precompute_pos_cis
from model.attention import fast_attention, fused_attention, mask_of, plain_attention, repeat_kv
from model.cpu_attention import row_block_attention

# (batch, tokens, heads, key/value heads, head_dim). A block has 64 tokens, or 128 if heads share no
# keys. The tokens fill less than one block, one block, or more; the last block may be incomplete.
SHAPES = [
    (2, 1, 1, 1, 2),
    (2, 5, 4, 2, 8),
    (1, 64, 4, 4, 32),
    (2, 65, 8, 2, 64),
    (1, 128, 2, 2, 48),
    (3, 130, 4, 2, 96),
    (1, 200, 6, 1, 48),
    (1, 257, 1, 1, 128),
    (2, 513, 8, 2, 64),
]
SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def heads(shape, dtype=torch.float32):
    """Return random queries, keys, values, and a gradient of the output."""
    batch, seq_len, n_heads, n_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, seq_len, n, head_dim, generator=generator).to(dtype)
        for n in (n_heads, n_kv_heads, n_kv_heads, n_heads)
    ]


def reference(q, k, v, starts):
    """Compute attention by its formula in float64. A position sees none before its start."""
    seq_len, head_dim, group = q.shape[1], q.shape[-1], q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, repeat_kv(k, group), repeat_kv(v, group)))
    scores = q @ k.transpose(-2, -1) / head_dim**0.5
    hidden = torch.ones(seq_len, seq_len).triu(1).bool()
    hidden = hidden | (torch.arange(seq_len) < starts[:, :, None])  # (B, T, T)
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2)


@SHAPE
@pytest.mark.parametrize("attend", [fast_attention, fused_attention, plain_attention])
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
    ids=["fp32", "bf16"],
)
def test_output_and_gradients_equal_those_of_the_formula(shape, attend, dtype, tolerance, several):
    """A sequence is one conversation, or several that do not see each other."""
    results, starts = [], torch.zeros(shape[:2], dtype=torch.int64)
    if several:
        begins = torch.rand(shape[:2], generator=torch.Generator().manual_seed(1)) < 0.05
        starts = (begins * torch.arange(shape[1])).cummax(dim=1).values
    mask = mask_of(starts, dtype) if several else None
    *qkv, gradient = heads(shape, dtype)
    for compute, options, kind in (
        (attend, (0.0, mask), dtype),
        (reference, (starts,), torch.float64),
    ):
        inputs = [x.to(kind).requires_grad_() for x in qkv]
        out = compute(*inputs, *options)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, gradient.to(kind))])
    for name, mine, theirs in zip(("out", "q", "k", "v"), *results, strict=True):
        assert mine.dtype == dtype
        if shape[1] == 1 and name in "qk":  # one position sees only itself, whatever q and k are
            assert not mine.any()
        else:
            assert (mine.double() - theirs).norm() <= tolerance * theirs.norm(), name


def test_gradients_pass_the_numerical_check():
    qkv = [x.double().requires_grad_() for x in heads((1, 67, 2, 1, 4))[:3]]
    # The check fails if the operation rounds float64 sums to fp32.
    assert torch.autograd.gradcheck(row_block_attention, qkv, fast_mode=True)


def test_the_operations_are_registered_as_torch_requires():
    rows, k, v, _ = heads((2, 70, 2, 1, 8))
    rows = rows.reshape(2, 140, 8).requires_grad_()
    k, v = (x.reshape(2, 70, 8).requires_grad_() for x in (k, v))
    mask = mask_of(torch.zeros(2, 70, dtype=torch.int64), torch.float32)
    for more in ((), (mask,)):
        torch.library.opcheck(torch.ops.small_lm.row_block_attention.default, (rows, k, v, *more))


def test_fast_attention_on_a_cpu_uses_row_blocks_unless_there_is_dropout():
    q, k, v, _ = heads((2, 70, 4, 2, 8))
    assert torch.equal(fast_attention(q, k, v, 0.0), row_block_attention(q, k, v))
    results = []
    for attend in (fast_attention, plain_attention):
        torch.manual_seed(3)
        results.append(attend(q, k, v, 0.5))
    assert torch.equal(*results)
    assert not torch.equal(results[0], row_block_attention(q, k, v))


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
