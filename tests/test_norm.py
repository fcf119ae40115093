import pytest
import torch

from model import RMSNorm


def norm_and_input(dim=24, eps=1e-5, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(dim, eps)
    norm.weight.data = torch.randn(dim, generator=generator)
    return norm, scale * torch.randn(3, 5, dim, generator=generator)


def by_definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_output_is_the_weight_times_the_input_over_its_root_mean_square(scale, eps):
    norm, x = norm_and_input(eps=eps, scale=scale)
    expected = by_definition(x, norm.weight, eps).float()
    torch.testing.assert_close(norm(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept_and_only_the_result_is_rounded(dtype):
    norm, x = norm_and_input(dim=512)
    x = x.to(dtype)
    out = norm(x)
    assert out.dtype == dtype
    expected = by_definition(x, norm.weight, 1e-5)
    error = (out.double() - expected).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * expected.abs() + 1e-5).all()
