"""Linear layers, fused with the operation after them, in the form that is fastest on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn import functional

from engine.model.quantized import Matrix


class Linear(ABC):
    """The product of ``x`` (``[rows, in]``) and a weight, plus a bias if there is one: ``[rows, out]``."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""

    @abstractmethod
    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the product."""

    @abstractmethod
    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        """GELU of the product, by its approximation with tanh."""

    @abstractmethod
    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product times ``factor`` (``[rows, out]``), element by element."""

    @abstractmethod
    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus ``residual`` (``[rows, out]``)."""


class PlainLinear(Linear):
    """PyTorch's product, for any device and dtype. A quantized weight is dequantized for each product."""

    def __init__(self, weight: Matrix, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def _plain(self, dtype: torch.dtype) -> torch.Tensor:
        return self._weight if isinstance(self._weight, torch.Tensor) else self._weight.dequantized(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._plain(x.dtype), self._bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self(x), inplace=True)

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self(x), approximate="tanh")

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(factor)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product to ``total`` (``[rows, out]``) in place, in the same kernel on GPUs."""
        total.addmm_(x, self._plain(x.dtype).t())
        if self._bias is not None:
            total.add_(self._bias)


class PackedLinear(Linear):
    """oneDNN's product with a bfloat16 weight that is copied into oneDNN's order once. Otherwise every call would
    reorder it, which takes most of a decode step. SiLU, factor and residual are applied before the result is rounded.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return result

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "swish", [], "")
        return result

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "gelu", [], "tanh")
        return result

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self._packed, self._bias, "mul")
        return result

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return result


def linear(weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
    """Return the fastest product with ``weight`` (``[out, in]``) and ``bias`` (``[out]``) on their device. It may copy
    the weight, so the caller should drop it."""
    if isinstance(weight, torch.Tensor) and weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and _packs():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _packs() -> bool:
    return bool(torch._C._has_mkldnn) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
