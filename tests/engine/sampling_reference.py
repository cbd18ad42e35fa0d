"""The distribution of sampled tokens by its definition: one row at a time, in float64, by sorting."""

from __future__ import annotations

import torch

from engine.model.token_draw import uniform
from pdserve.core.sampling import SamplingParams


def weights(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The weights in proportion to which tokens are drawn: temperature (above 0) and filters applied to ``scores``
    (``[vocabulary]``, float64). The likeliest token has weight 1, a dropped token 0."""
    scaled = (scores - scores.max()) / params.temperature
    if 0 < params.top_k < scaled.shape[0]:
        scaled = scaled.where(scaled >= scaled.topk(params.top_k).values[-1], -torch.inf)
    weighed = scaled.exp()
    if params.top_p < 1.0:
        ordered = weighed.sort(descending=True).values
        last = int(torch.searchsorted(ordered.cumsum(0), weighed.sum() * params.top_p))
        weighed = weighed.where(weighed >= ordered[min(last, ordered.shape[0] - 1)], 0.0)
    if params.min_p > 0.0:
        weighed = weighed.where(weighed >= params.min_p, 0.0)
    return weighed


def replayed(scores: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token that ``params`` and ``position`` select: the first of the drawn tokens that top-p keeps. Tokens are
    drawn by the same numbers as in the engine; each one that is dropped drops all that are not likelier."""
    kept = weights(scores, params)
    left = weights(scores, SamplingParams(temperature=params.temperature, top_k=params.top_k, min_p=params.min_p))
    turn = 0
    while True:
        reached = left.cumsum(0)
        number = uniform(params.seed or 0, position, turn)
        token_id = int(torch.searchsorted(reached, number * reached[-1], right=True))
        if kept[token_id] > 0:
            return token_id
        left = left.where(left > left[token_id], 0.0)
        turn += 1
