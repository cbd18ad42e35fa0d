"""Samples tokens from logits. A draw depends on ``(seed, position)`` only, not on batch, hand-off or resume.

Sampling parameters are applied in this order, each to the result of the one before:

1. ``logit_bias`` is added; -100 forbids a token, and 100 forbids all tokens without a bias of 100
2. ``repetition_penalty`` divides the positive logits of tokens in prompt or output, and multiplies the others
3. ``presence_penalty``, and ``frequency_penalty`` times the count, are subtracted for tokens in the output
4. ``temperature`` divides the logits; 0 takes the token with the largest logit and skips the rest
5. ``top_k``, then ``top_p``, then ``min_p`` drop tokens; the token is drawn from the rest in proportion

Logprobs are ``log_softmax(logits)`` of the unmodified logits. A row that needs any of this is computed alone, in
float64 on the CPU, so that its result does not depend on other rows.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence

import torch
import xxhash

from engine.scheduling.batch import SampledToken
from engine.scheduling.sequence import TokenHistory
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import MAX_BIAS, SamplingParams

_OFTEN_ENOUGH = 1024  # top-p mostly keeps fewer tokens, and finding these is much faster than sorting all


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that selects the token at ``position`` of a request with ``seed``."""
    return float(xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, position)) >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None] | None = None,
) -> list[SampledToken]:
    """Sample one token per row of ``logits`` (``[rows, vocabulary]``). ``positions`` are those of the new tokens.
    ``histories`` are needed for rows with penalties (None for other rows)."""
    # Equal to argmax, which takes four times as long on a CPU.
    tokens = [SampledToken(token_id) for token_id in logits.max(dim=-1).indices.tolist()]
    before = [None] * len(params) if histories is None else histories
    for row, (wanted, position, history) in enumerate(zip(params, positions, before, strict=True)):
        if not wanted.is_plain:
            tokens[row] = _sample_row(logits[row], tokens[row].token_id, wanted, position, history)
    return tokens


def weights(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The weights in proportion to which tokens are drawn: temperature (above 0) and filters applied to ``scores``
    (``[vocabulary]``, float64). The likeliest token has weight 1, a dropped token 0."""
    scaled = (scores - scores.max()) / params.temperature
    if 0 < params.top_k < scaled.shape[0]:
        scaled = _keep(scaled, scaled.topk(params.top_k).values[-1])
    weighed = scaled.exp()
    if params.top_p < 1.0:
        weighed = weighed.where(weighed >= _least_of_top_p(weighed, params.top_p), 0.0)
    if params.min_p > 0.0:
        weighed = weighed.where(weighed >= params.min_p, 0.0)
    return weighed


def adjust(logits: torch.Tensor, params: SamplingParams, history: TokenHistory | None) -> torch.Tensor:
    """Apply bias and penalties to a copy of ``logits`` (``[vocabulary]``). ValueError if ``params`` penalise and
    ``history`` is None."""
    if params.logit_bias:
        logits = _biased(logits, params.logit_bias)
    if not params.penalises:
        return logits
    if history is None:
        raise ValueError("penalties need the history of the request")
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = _tensor(history.seen_ids)
        scores = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    outputs = _tensor(history.output_ids)
    counts = _tensor(history.output_counts).to(logits.dtype)  # integers times a Python float would become float32
    logits[outputs] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def _sample_row(
    logits: torch.Tensor, likeliest: int, params: SamplingParams, position: int, history: TokenHistory | None
) -> SampledToken:
    logits = logits.to("cpu", torch.float64)
    scores = adjust(logits, params, history)
    if params.temperature > 0.0:
        token_id = _draw(weights(scores, params), uniform(params.seed or 0, position))
    else:
        token_id = likeliest if scores is logits else int(scores.argmax())
    return SampledToken(token_id, None if params.logprobs is None else _logprobs(logits, token_id, params.logprobs))


def _draw(weighed: torch.Tensor, number: float) -> int:
    # The inverse of the distribution in vocabulary order; a token of weight 0 is never hit.
    reached = weighed.cumsum(0)
    total = reached[-1]
    if not torch.isfinite(total):  # the model overflowed; any token will do
        return int(weighed.argmax())
    target = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
    return int(torch.searchsorted(reached, target, right=True))


def _least_of_top_p(weighed: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest weight in the smallest set with a share of ``top_p``. Sorts all weights only if necessary."""
    wanted = weighed.sum() * top_p
    ordered = weighed.topk(min(_OFTEN_ENOUGH, weighed.shape[0])).values
    last = int(torch.searchsorted(ordered.cumsum(0), wanted))
    if last == ordered.shape[0] < weighed.shape[0]:
        ordered = weighed.sort(descending=True).values
        last = int(torch.searchsorted(ordered.cumsum(0), wanted))
    return ordered[min(last, ordered.shape[0] - 1)]


def _logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    logprobs = logits.log_softmax(dim=-1)
    num_top = min(num_top, logprobs.shape[0])
    if not num_top:
        return TokenLogprobs(float(logprobs[token_id]))
    # All that tie with the last one compete, and the lower id wins: a tie must not be decided by the sort.
    ids = (logprobs >= logprobs.topk(num_top).values[-1]).nonzero().flatten()
    order = logprobs[ids].sort(descending=True, stable=True).indices[:num_top]
    top = zip(ids[order].tolist(), logprobs[ids[order]].tolist(), strict=True)
    return TokenLogprobs(float(logprobs[token_id]), tuple(top))


def _biased(logits: torch.Tensor, biases: Mapping[int, float]) -> torch.Tensor:
    ids = torch.tensor(list(biases))
    bias = torch.tensor(list(biases.values()), dtype=logits.dtype)
    scores = logits[ids] + bias
    alone = bias >= MAX_BIAS
    if bool(alone.any()):
        biased = torch.full_like(logits, -torch.inf)
        biased[ids[alone]] = scores[alone]
        return biased
    biased = logits.clone()
    biased[ids] = scores.where(bias > -MAX_BIAS, -torch.inf)
    return biased


def _tensor(values: array[int]) -> torch.Tensor:
    """A copy: an array cannot grow while a tensor shares its memory."""
    return torch.frombuffer(values, dtype=torch.int64).clone() if values else torch.empty(0, dtype=torch.int64)


def _keep(scaled: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Drop tokens below ``threshold``. Ties with it stay, so that no result depends on the sort."""
    return scaled.where(scaled >= threshold, -torch.inf)
