"""The parts of a decoder layer: linear layers, norms, MLPs and mixtures of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from checkpoints.shape import Activation, Experts
from engine.model.share import Ranks
from engine.model.weights import ExpertWeights, Matrix, MLPWeights, QuantizedTensor, unbind

_NATIVE = (9, 10)
"""The compute capabilities (major numbers) whose grouped products are native."""

_FIXED_ROWS = 16
"""Rows of a product that does not depend on the batch."""

FP8_CAPABILITY = (8, 9)
"""The first compute capability that converts and multiplies FP8 numbers."""

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
FP8_LEAST_ROW = 1e-10
"""The least maximum of a row that is quantized, so that a row of zeros has a scale."""


class Product(Protocol):
    """What ends a part of a layer: `Linear`, `GatedMLP` or `RoutedExperts`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus ``residual``, which it may overwrite."""
        ...


class Linear:
    """The product of ``x`` (``[rows, in]``) and a weight, plus a bias if there is one: ``[rows, out]``. This one is
    PyTorch's, for any device and dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return functional.linear(x, self._weight, self._bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the product."""
        return functional.silu(self(x), inplace=True)

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        """GELU of the product, by its approximation with tanh."""
        return functional.gelu(self(x), approximate="tanh")

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product times ``factor`` (``[rows, out]``), element by element."""
        return self(x).mul_(factor)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus ``residual`` (``[rows, out]``), which it may overwrite."""
        residual.addmm_(x, self._weight.t())  # one kernel on GPUs
        return residual if self._bias is None else residual.add_(self._bias)


class PackedLinear(Linear):
    """oneDNN's product with a bfloat16 weight that is copied into oneDNN's order once. Otherwise every call would
    reorder it, which takes most of a decode step. SiLU, factor and residual are applied before the result is rounded.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight, None), bias)
        self._unary: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self._binary: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._unary(x, self._weight, self._bias, "none", [], "")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return self._unary(x, self._weight, self._bias, "swish", [], "")

    def gelu_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return self._unary(x, self._weight, self._bias, "gelu", [], "tanh")

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self._binary(x, factor, self._weight, self._bias, "mul")

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._binary(x, residual, self._weight, self._bias, "add")


class FP8Linear(Linear):
    """The product with a matrix of FP8 numbers and a scale per row. The rows of ``x`` are quantized in the same way,
    and the sums are in float32."""

    def __init__(self, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.values.t(), bias)  # [in, out], as the product wants it
        self._scales = weight.scales.t()

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` (``[rows, in]``) as FP8 numbers (the same shape) and float32 scales (``[rows, 1]``). The largest number
        of a row becomes the largest of the type."""
        wide = x.float()
        scales = wide.abs().amax(-1, keepdim=True).clamp_min_(FP8_LEAST_ROW).div_(FP8_MAX)
        return (wide / scales).to(torch.float8_e4m3fn), scales

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = self.quantized(x)
        product: torch.Tensor = torch._scaled_mm(values, self._weight, scales, self._scales, out_dtype=x.dtype)
        return product if self._bias is None else product.add_(self._bias)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


def multiplies_fp8(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU has products of FP8 matrices with scales per row, which give ``dtype``."""
    return (
        dtype is torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    )


class FixedLinear(Linear):
    """The product, by products of PyTorch that have a fixed number of rows, whatever the batch: with another number
    they may sum in another order. The weight is not quantized."""

    def __init__(self, weight: Matrix, bias: torch.Tensor | None = None) -> None:
        assert isinstance(weight, torch.Tensor)
        self._product = linear(weight, bias)  # which may have copied the weight, so that it is not kept here

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -rows % _FIXED_ROWS))
        return torch.cat([self._product(piece) for piece in torch.split(padded, _FIXED_ROWS)])[:rows]

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


Products = Callable[[Matrix, torch.Tensor | None], Linear]
"""Makes the product with a weight (``[out, in]``) and a bias (``[out]``). It may copy the weight, so the caller should
drop it."""


def linear(weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
    """`Products`: the fastest ones of PyTorch on the device of the weights."""
    if isinstance(weight, QuantizedTensor):
        return FP8Linear(weight, bias)
    if weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and _packs():
        return PackedLinear(weight, bias)
    return Linear(weight, bias)


def _packs() -> bool:
    return bool(torch._C._has_mkldnn) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class RMSNorm:
    """Divides each row of ``x`` (``[rows, hidden]``) by its root mean square and multiplies it by ``weight``
    (``[hidden]``) plus ``offset``. With an offset the sum is kept in float32, as it would lose digits of the weight.

    In bfloat16 the arithmetic is in float32 and the result is rounded once, in as few passes as possible:
    ``x / hypot(|x|, sqrt(hidden * eps)) * (weight * sqrt(hidden))`` is the same number. For a single row on a CPU the
    number of calls dominates, so it uses a layer norm: ``(x, -x)`` has mean 0 and the mean square of ``x``. With
    ``batch_invariant`` it is computed like several rows.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant
        self._dtype = weight.dtype
        self.weight = weight if offset == 0.0 else weight.float() + offset
        self.eps = eps
        if self._dtype is torch.bfloat16:
            hidden = weight.shape[0]
            self._weight_twice = torch.cat((self.weight, self.weight))
            self._scaled_weight = self.weight.float() * hidden**0.5
            self._least = torch.tensor((hidden * eps) ** 0.5, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16:
            if self.weight.dtype is x.dtype:
                return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
            return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        if x.shape[0] == 1 and x.device.type == "cpu" and not self._batch_invariant:
            twice = torch.cat((x, -x), dim=-1)
            return functional.layer_norm(twice, self._weight_twice.shape, self._weight_twice, None, self.eps)[
                :, : x.shape[1]
            ]
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div_(torch.hypot(length, self._least)).mul_(self._scaled_weight).to(x.dtype)


class SpanNorm(RMSNorm):
    """A norm over rows of which each of the ``ranks`` has some columns, ``total`` in all, and each column is in
    ``copies`` of them."""

    def __init__(self, weight: torch.Tensor, eps: float, ranks: Ranks, total: int, copies: int) -> None:
        super().__init__(weight, eps)
        self._ranks, self._total, self._copies = ranks, total, copies

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = self._ranks.sum(wide.square().sum(-1, keepdim=True).div_(self._copies))
        return (wide * squares.div_(self._total).add_(self.eps).rsqrt_() * self.weight).to(x.dtype)


class Summed:
    """The last product of a part of a layer, of which each of the ``ranks`` computes a part of all sums."""

    def __init__(self, product: Product, ranks: Ranks) -> None:
        self._product, self._ranks = product, ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return self._ranks.sum(self._product(x))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus ``residual``, which it may overwrite."""
        return residual.add_(self(x))


class GatedMLP:
    """The product of an activated gate and a second projection, projected back. Rows are ``[rows, hidden]``."""

    def __init__(self, weights: MLPWeights, activation: Activation, products: Products = linear) -> None:
        gate, up = weights.gate_up.chunk(2)
        gate_bias, up_bias = (None, None) if weights.gate_up_bias is None else weights.gate_up_bias.chunk(2)
        self._gate, self._up = products(gate, gate_bias), products(up, up_bias)
        self._down = products(weights.down, weights.down_bias)
        self._activated = self._gate.silu if activation == "silu" else self._gate.gelu_tanh

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self._up.times(x, self._activated(x))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP of ``x``."""
        return self._down(self._inner(x))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The MLP of ``x`` plus ``residual``, which it may overwrite."""
        return self._down.plus(self._inner(x), residual)


class RoutedExperts(ABC):
    """A mixture of experts in place of an MLP: each token is computed by a few of many MLPs, which a router chooses."""

    def __init__(self, weights: ExpertWeights, experts: Experts, products: Products = linear) -> None:
        self._router = products(weights.router, None)
        self._experts = experts

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As `GatedMLP`."""

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """As `GatedMLP`."""
        return residual.add_(self(x))

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights (float32) and the numbers of the experts of ``x`` (``[rows, hidden]``), each
        ``[rows, per_token]``."""
        probabilities = self._router(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self._experts.per_token, dim=-1)
        if self._experts.normalized:
            weights /= weights.sum(-1, keepdim=True)
        return weights, chosen


def groups_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch has a native grouped product there. The others read the groups' sizes back from the device, which
    a CUDA graph cannot record."""
    return dtype is torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _NATIVE


class LoopedExperts(RoutedExperts):
    """One MLP after the other, each over the rows that chose it. Reads the weights of the chosen experts only."""

    def __init__(
        self,
        weights: ExpertWeights,
        experts: Experts,
        activation: Activation,
        products: Products = linear,
        mlp: Callable[[MLPWeights, Activation, Products], GatedMLP] = GatedMLP,
    ) -> None:
        super().__init__(weights, experts, products)
        self._mlps = [
            mlp(MLPWeights(gate_up, down, None, None), activation, products)
            for gate_up, down in zip(unbind(weights.gate_up), unbind(weights.down), strict=True)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._route(x)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == expert)
            total.index_add_(0, rows, self._mlps[expert](x[rows]) * weights[rows, places, None])
        return total.to(x.dtype)


class GroupedExperts(RoutedExperts):
    """Two grouped products over the rows of all experts, sorted by expert. No shape depends on the choice, and nothing
    is read back from the device, so that a CUDA graph can record it where PyTorch has a native grouped product."""

    def __init__(
        self, weights: ExpertWeights, experts: Experts, activation: Activation, products: Products = linear
    ) -> None:
        super().__init__(weights, experts, products)
        assert isinstance(weights.gate_up, torch.Tensor)
        assert isinstance(weights.down, torch.Tensor)
        self._gate_up, self._down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)
        self._numbers = torch.arange(experts.count, device=weights.router.device)
        self._silu = activation == "silu"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._route(x)
        per_token = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        ends = (chosen.flatten()[:, None] == self._numbers).sum(0).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[order // per_token], self._gate_up, offs=ends).chunk(2, dim=-1)
        gate = functional.silu(gate) if self._silu else functional.gelu(gate, approximate="tanh")
        sorted_results = torch._grouped_mm(gate * up, self._down, offs=ends)
        results = torch.empty_like(sorted_results)
        results[order] = sorted_results
        summed = (results.view(x.shape[0], per_token, -1) * weights[..., None]).sum(1)
        return summed.to(x.dtype)
