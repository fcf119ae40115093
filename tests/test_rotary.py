import cmath

import pytest
import torch

from model import apply_rotary_emb, precompute_pos_cis

THETA = 1e4


def turned_by_definition(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Multiply channel pair j at position t by exp(i·t·theta^(-2j/head_dim)), in float64."""
    out = x.double().clone()
    batch, seq_len, heads, head_dim = x.shape
    for b, t, h, j in torch.cartesian_prod(
        *map(torch.arange, (batch, seq_len, heads, head_dim // 2))
    ).tolist():
        pair = complex(x[b, t, h, 2 * j], x[b, t, h, 2 * j + 1])
        product = pair * cmath.exp(1j * t * theta ** (-2 * j / head_dim))
        out[b, t, h, 2 * j], out[b, t, h, 2 * j + 1] = product.real, product.imag
    return out


def queries_and_keys(seq_len=7, n_heads=4, n_kv_heads=2, head_dim=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, seq_len, n_heads, head_dim, generator=generator)
    k = torch.randn(2, seq_len, n_kv_heads, head_dim, generator=generator)
    return q.to(dtype), k.to(dtype)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_the_table_holds_the_rotations_of_the_definition(theta):
    table = precompute_pos_cis(8, 300, theta)
    expected = torch.tensor(
        [[cmath.exp(1j * t * theta ** (-2 * j / 8)) for j in range(4)] for t in range(300)]
    )
    torch.testing.assert_close(table, expected.to(torch.complex64), atol=5e-5, rtol=0)


def test_queries_and_keys_are_rotated_by_the_definition():
    q, k = queries_and_keys()
    turned_q, turned_k = apply_rotary_emb(q, k, precompute_pos_cis(6, 7, THETA))
    torch.testing.assert_close(turned_q.double(), turned_by_definition(q, THETA), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned_k.double(), turned_by_definition(k, THETA), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_queries_and_keys_is_kept_and_the_arithmetic_is_fp32(dtype):
    q, k = queries_and_keys(dtype=dtype)
    pos_cis = precompute_pos_cis(6, 7)
    turned_q, turned_k = apply_rotary_emb(q, k, pos_cis)
    wide_q, wide_k = apply_rotary_emb(q.float(), k.float(), pos_cis)
    assert turned_q.dtype == turned_k.dtype == dtype
    assert torch.equal(turned_q, wide_q.to(dtype))
    assert torch.equal(turned_k, wide_k.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_table_without_an_imaginary_part_is_refused(dtype):
    q, k = queries_and_keys()
    with pytest.raises(ValueError, match=r"must be complex, not"):
        apply_rotary_emb(q, k, precompute_pos_cis(6, 7).real.to(dtype))


@pytest.mark.parametrize(("rows", "columns"), [(6, 3), (8, 3), (7, 2), (7, 6)])
def test_a_table_that_does_not_fit_is_refused(rows, columns):
    q, k = queries_and_keys(seq_len=7, head_dim=6)
    with pytest.raises(ValueError, match=rf"\({rows}, {columns}\) does not fit"):
        apply_rotary_emb(q, k, precompute_pos_cis(2 * columns, rows))


@pytest.mark.parametrize("dim", [7, 0, -2])
def test_a_head_dim_that_is_odd_or_not_positive_is_refused(dim):
    with pytest.raises(ValueError, match=f"even and positive, not {dim}"):
        precompute_pos_cis(dim, 4)


def test_the_table_is_exact_even_if_constructors_return_bf16(monkeypatch):
    """`deepspeed.zero.Init` makes torch's constructors return floating tensors in bf16."""

    def rounded(constructor):
        def construct(*args, **kwargs):
            tensor = constructor(*args, **kwargs)
            return tensor.bfloat16() if tensor.is_floating_point() else tensor

        return construct

    expected = precompute_pos_cis(64, 512)
    with monkeypatch.context() as patch:
        for name in ("arange", "empty", "full", "linspace", "ones", "tensor", "zeros"):
            patch.setattr(torch, name, rounded(getattr(torch, name)))
        table = precompute_pos_cis(64, 512)
    assert table.dtype == torch.complex64
    assert torch.equal(table, expected)
