import pytest
import torch

from model import RMSNorm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept_and_only_the_result_is_rounded(dtype):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(512, eps=1e-5)
    norm.weight.data = torch.randn(512, generator=generator)
    x = torch.randn(3, 5, 512, generator=generator).to(dtype)
    out = norm(x)
    assert out.dtype == dtype
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    error = (out.double() - expected).abs()
    assert (error <= torch.finfo(dtype).eps * expected.abs() + 1e-6).all()
