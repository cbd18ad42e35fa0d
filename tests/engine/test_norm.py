"""The norm against itself in float64."""

from __future__ import annotations

import pytest
import torch

from engine.model.layers import RMSNorm


@pytest.mark.parametrize("scale", [1e-4, 3e4])
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm(dtype: torch.dtype, rows: int, scale: float) -> None:
    """In bfloat16 the result is rounded once: half a unit of its 8 bits. In float16 it is of 11, and numbers below
    2**-14 have fewer; its largest is 65504."""
    if dtype is torch.float16:
        scale = min(scale, 1e4)
    torch.manual_seed(rows)
    x = (scale * torch.randn(rows, 577) + scale / 3).to(dtype)
    before = x.clone()
    weight = (1 + 0.3 * torch.randn(577)).to(dtype)
    eps = 1e-5
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    result = RMSNorm(weight, eps)(x)
    assert result.dtype is dtype
    assert result.is_contiguous()
    rtol, atol = {torch.bfloat16: (2**-8, 1e-9), torch.float16: (2**-10, 2**-24), torch.float32: (1e-5, 1e-9)}[dtype]
    torch.testing.assert_close(result.double(), exact, rtol=rtol, atol=atol)
    assert torch.equal(x, before), "its argument stays as it is"
