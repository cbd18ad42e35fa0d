"""Draws tokens from logits. A draw is keyed by ``(seed, position)`` alone: no batch, hand-off or resume changes it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import xxhash

from engine.batch import SamplerParams


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at ``position`` of a request with ``seed``."""
    return float(xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, position)) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, params: Sequence[SamplerParams], positions: Sequence[int]) -> list[int]:
    """One token per row of ``logits`` (``[rows, vocabulary]``); ``positions`` are those of the tokens to be drawn."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (wanted, position) in enumerate(zip(params, positions, strict=True)):
        if wanted.temperature > 0.0:
            # Row by row: nothing of a row's arithmetic may depend on which other rows there are.
            tokens[row] = _draw(logits[row], wanted, uniform(wanted.seed, position))
    return tokens


def _draw(logits: torch.Tensor, params: SamplerParams, number: float) -> int:
    scaled = logits.to("cpu", torch.float64)
    scaled = (scaled - scaled.max()) / params.temperature
    if 0 < params.top_k < scaled.shape[0]:
        scaled = _keep(scaled, scaled.topk(params.top_k).values[-1])
    weights = scaled.exp()
    if params.top_p < 1.0:
        ordered = weights.sort(descending=True).values
        reached = ordered.cumsum(0)
        last = int(torch.searchsorted(reached, reached[-1] * params.top_p))
        weights = weights.where(weights >= ordered[min(last, ordered.shape[0] - 1)], 0.0)
    # The inverse of the distribution in vocabulary order; a token of weight 0 is never hit.
    reached = weights.cumsum(0)
    total = reached[-1]
    target = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
    return int(torch.searchsorted(reached, target, right=True))


def _keep(scaled: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Tokens that tie with the last one kept stay as well: a tie must not be decided by the sort."""
    return scaled.where(scaled >= threshold, -torch.inf)
