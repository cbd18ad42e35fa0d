"""The MLP of a decoder layer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from checkpoints.shape import Activation
from engine.model.linear import linear
from engine.model.weights import MLPWeights


class MLP(ABC):
    """What a layer computes after attention, of rows ``x`` (``[rows, hidden]``)."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP of ``x``: ``[rows, hidden]``."""

    @abstractmethod
    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The MLP of ``x`` plus ``residual`` (``[rows, hidden]``), which it may overwrite."""


class GatedMLP(MLP):
    """The product of an activated gate and a second projection, projected back, with the device's fastest products."""

    def __init__(self, weights: MLPWeights, activation: Activation) -> None:
        gate, up = weights.gate_up.chunk(2)
        gate_bias, up_bias = (None, None) if weights.gate_up_bias is None else weights.gate_up_bias.chunk(2)
        self._gate, self._up = linear(gate, gate_bias), linear(up, up_bias)
        self._down = linear(weights.down, weights.down_bias)
        self._activated = self._gate.silu if activation == "silu" else self._gate.gelu_tanh

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._up.times(x, self._activated(x)))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._down.plus(self._up.times(x, self._activated(x)), residual)
