"""Samples tokens from logits. A draw depends on ``(seed, position)`` only, not on batch, hand-off or resume.

Sampling parameters are applied in this order, each to the result of the one before:

1. ``logit_bias`` is added; -100 forbids a token, and 100 forbids all tokens without a bias of 100
2. ``repetition_penalty`` divides the positive logits of tokens in prompt or output, and multiplies the others
3. ``presence_penalty``, and ``frequency_penalty`` times the count, are subtracted for tokens in the output
4. ``temperature`` divides the logits; 0 takes the token with the largest logit and skips the rest
5. ``top_k``, then ``top_p``, then ``min_p`` drop tokens; the token is drawn from the rest in proportion

Logprobs are ``log_softmax(logits)`` of the unmodified logits. All rows are computed together on the device of the
logits. The result for a row does not depend on the other rows: sums have a fixed order, and each row has uniform
numbers of its own (`engine.model.uniforms`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.logit_adjustments import adjust
from engine.model.token_blocks import argmax
from engine.model.token_draw import DrawRow, draw
from engine.model.token_logprobs import token_logprobs
from engine.scheduling.batch import SampledToken
from engine.scheduling.sequence import TokenHistory
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import SamplingParams


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None] | None = None,
) -> list[SampledToken]:
    """Sample one token per row of ``logits`` (``[rows, vocabulary]``). ``positions`` are those of the new tokens.
    ``histories`` are needed for rows with penalties (None for other rows); ValueError if one is missing."""
    scores = adjust(logits, params, [None] * len(params) if histories is None else histories)
    greedy = [row for row, p in enumerate(params) if p.temperature == 0.0]
    drawn = [row for row, p in enumerate(params) if p.temperature > 0.0]
    if not drawn:
        token_ids = argmax(scores)
    else:
        draws = [DrawRow(params[row], positions[row]) for row in drawn]
        token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
        _put(token_ids, drawn, draw(_rows(scores, drawn), draws))
        if greedy:
            _put(token_ids, greedy, argmax(_rows(scores, greedy)))
    told = _logprobs(logits, token_ids, params)
    return [SampledToken(token_id, told.get(row)) for row, token_id in enumerate(token_ids.tolist())]


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, params: Sequence[SamplingParams]
) -> dict[int, TokenLogprobs]:
    """The logprobs of the rows that ask for them, by row."""
    num_top = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
    if not num_top:
        return {}
    rows = list(num_top)
    found = token_logprobs(_rows(logits, rows), _rows(token_ids, rows), list(num_top.values()))
    return dict(zip(rows, found, strict=True))


def _rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The given rows, ascending; without a copy if these are all."""
    return tensor if len(rows) == tensor.shape[0] else tensor[torch.tensor(rows, device=tensor.device)]


def _put(tensor: torch.Tensor, rows: Sequence[int], values: torch.Tensor) -> None:
    tensor[torch.tensor(rows, device=tensor.device)] = values
