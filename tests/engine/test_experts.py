"""Mixtures of experts: the loop and the grouped products, against each expert written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from checkpoints.shape import Activation, Experts
from engine.model.layers import GroupedExperts, LoopedExperts
from engine.model.weights import ExpertWeights

HIDDEN, INNER = 32, 24


def _weights(experts: Experts, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    torch.manual_seed(experts.count)
    return ExpertWeights(
        router=torch.randn(experts.count, HIDDEN).to(dtype),
        gate_up=torch.randn(experts.count, 2 * INNER, HIDDEN).to(dtype) / 4,
        down=torch.randn(experts.count, HIDDEN, INNER).to(dtype) / 4,
    )


def _written_out(x: torch.Tensor, weights: ExpertWeights, experts: Experts, activation: Activation) -> torch.Tensor:
    """All experts of every row, one by one, in float64."""
    assert isinstance(weights.gate_up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, numbers in enumerate(x.double()):
        probabilities = (weights.router.double() @ numbers).softmax(0)
        chosen = probabilities.argsort(descending=True)[: experts.per_token].tolist()
        total = sum(probabilities[i].item() for i in chosen) if experts.normalized else 1.0
        for i in chosen:
            gate, up = (weights.gate_up[i].double() @ numbers).chunk(2)
            gate = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
            out[row] += weights.down[i].double() @ (gate * up) * probabilities[i] / total
    return out


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("experts", [Experts(4, 2, INNER), Experts(9, 3, INNER, normalized=False)], ids=str)
@pytest.mark.parametrize("kind", [LoopedExperts, GroupedExperts])
def test_experts(
    kind: type[LoopedExperts] | type[GroupedExperts], experts: Experts, activation: Activation, rows: int
) -> None:
    weights = _weights(experts)
    x = torch.randn(rows, HIDDEN)
    expected = _written_out(x, weights, experts, activation)
    mlp = kind(weights, experts, activation)
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-4)
    residual = torch.randn(rows, HIDDEN)
    torch.testing.assert_close(mlp.plus(x, residual.clone()).double(), expected + residual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [LoopedExperts, GroupedExperts])
def test_experts_in_bfloat16(kind: type[LoopedExperts] | type[GroupedExperts]) -> None:
    experts = Experts(3, 3, INNER)  # all are chosen, so that rounding cannot change the choice
    weights = _weights(experts, torch.bfloat16)
    x = torch.randn(5, HIDDEN).to(torch.bfloat16)
    result = kind(weights, experts, "silu")(x)
    assert result.dtype is torch.bfloat16
    expected = _written_out(x, weights, experts, "silu")
    torch.testing.assert_close(result.double(), expected, rtol=5e-2, atol=5e-2)
