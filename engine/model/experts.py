"""Mixtures of experts: each token is computed by a few of many MLPs, which a router chooses."""

from __future__ import annotations

import torch
from torch.nn import functional

from checkpoints.shape import Activation, Experts
from engine.model.linear import linear
from engine.model.mlp import MLP, GatedMLP
from engine.model.quantized import unbind
from engine.model.weights import ExpertWeights, MLPWeights

_NATIVE = (9, 10)
"""The compute capabilities (major numbers) whose grouped products are native."""


class Router:
    """Chooses the experts of each row, and weighs them."""

    def __init__(self, weight: torch.Tensor, experts: Experts) -> None:
        self._product = linear(weight)
        self._experts = experts

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights (float32) and the numbers of the experts of ``x`` (``[rows, hidden]``), each
        ``[rows, per_token]``."""
        probabilities = self._product(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self._experts.per_token, dim=-1)
        if self._experts.normalized:
            weights /= weights.sum(-1, keepdim=True)
        return weights, chosen


def groups_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch has a native grouped product there. The others read the groups' sizes back from the device, which
    a CUDA graph cannot record."""
    return dtype is torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _NATIVE


class LoopedExperts(MLP):
    """One MLP after the other, each over the rows that chose it. Reads the weights of the chosen experts only."""

    def __init__(self, weights: ExpertWeights, experts: Experts, activation: Activation) -> None:
        self._router = Router(weights.router, experts)
        self._mlps = [
            GatedMLP(MLPWeights(gate_up, down, None, None), activation)
            for gate_up, down in zip(unbind(weights.gate_up), unbind(weights.down), strict=True)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._router(x)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == expert)
            total.index_add_(0, rows, self._mlps[expert](x[rows]) * weights[rows, places, None])
        return total.to(x.dtype)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)


class GroupedExperts(MLP):
    """Two grouped products over the rows of all experts, sorted by expert. No shape depends on the choice, and nothing
    is read back from the device, so that a CUDA graph can record it where PyTorch has a native grouped product."""

    def __init__(self, weights: ExpertWeights, experts: Experts, activation: Activation) -> None:
        self._router = Router(weights.router, experts)
        assert isinstance(weights.gate_up, torch.Tensor)
        assert isinstance(weights.down, torch.Tensor)
        self._gate_up, self._down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)
        self._numbers = torch.arange(experts.count, device=weights.router.device)
        self._silu = activation == "silu"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._router(x)
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

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))
