import cmath

import pytest
import torch

from model import apply_rotary_emb, precompute_pos_cis


def queries_and_keys(dtype=torch.float32):
    """Return queries of 4 heads and keys of 2 heads at 7 positions, with 6 channels."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 7, n, 6, generator=generator).to(dtype) for n in (4, 2)]


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_the_table_holds_the_rotations_of_the_definition(theta):
    table = precompute_pos_cis(8, 300, theta)
    expected = torch.tensor(
        [[cmath.exp(1j * t * theta ** (-2 * j / 8)) for j in range(4)] for t in range(300)]
    )
    torch.testing.assert_close(table, expected.to(torch.complex64), atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_neighbouring_channels_are_rotated_in_fp32_and_the_dtype_is_kept(dtype):
    pos_cis, given = precompute_pos_cis(6, 7), queries_and_keys(dtype)
    for x, turned in zip(given, apply_rotary_emb(*given, pos_cis), strict=True):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        expected = torch.view_as_real(pairs * pos_cis[:, None]).flatten(-2)
        assert turned.dtype == dtype
        torch.testing.assert_close(turned, expected.to(dtype), atol=1e-6, rtol=0)


def test_a_table_without_an_imaginary_part_is_refused():
    with pytest.raises(ValueError, match=r"must be complex, not"):
        apply_rotary_emb(*queries_and_keys(), precompute_pos_cis(6, 7).real)


@pytest.mark.parametrize(("rows", "columns"), [(6, 3), (8, 3), (7, 2), (7, 6)])
def test_a_table_that_does_not_fit_is_refused(rows, columns):
    with pytest.raises(ValueError, match=rf"\({rows}, {columns}\) does not fit"):
        apply_rotary_emb(*queries_and_keys(), precompute_pos_cis(2 * columns, rows))


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
