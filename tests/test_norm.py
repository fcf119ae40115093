import pytest
import torch

from model import RMSNorm


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_is_the_weight_times_the_input_over_its_root_mean_square(dtype, eps, scale):
    """Half precision is kept, and only the result is rounded."""
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(512, eps)
    norm.weight.data = torch.randn(512, generator=generator)
    x = (scale * torch.randn(3, 5, 512, generator=generator)).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()
    out = norm(x)
    assert out.dtype == dtype
    error = (out.double() - expected).abs()
    assert (error <= (torch.finfo(dtype).eps / 2 + 1e-6) * expected.abs() + 1e-6).all()
