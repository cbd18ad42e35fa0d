"""A matrix product with a fixed weight, in the form that is fastest on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]
"""``[rows, in]`` to ``[rows, out]``."""


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The product with ``weight`` (``[out, in]``), plus ``bias`` (``[out]``) if there is one. On CPUs a bfloat16 weight
    is copied into oneDNN's own order once, as otherwise every call would reorder it (which takes most of a decode
    step); the caller should drop the original."""
    if weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and _packs():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

        def product(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return result

        return product
    return lambda x: functional.linear(x, weight, bias)


def _packs() -> bool:
    return bool(torch._C._has_mkldnn) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
