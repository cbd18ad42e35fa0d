"""Samples tokens from logits. A draw depends on ``(seed, position)`` only, not on batch, hand-off or resume.

Sampling parameters are applied in this order, each to the result of the one before:

1. ``logit_bias`` is added; -100 forbids a token, and 100 forbids all tokens without a bias of 100
2. ``repetition_penalty`` divides the positive logits of tokens in prompt or output, and multiplies the others
3. ``presence_penalty``, and ``frequency_penalty`` times the count, are subtracted for tokens in the output
4. ``structured_outputs`` forbid the tokens after which the output could not match
5. ``temperature`` divides the logits; 0 takes the token with the largest logit and skips the rest
6. ``top_k``, then ``top_p``, then ``min_p`` drop tokens; the token is drawn from the rest in proportion

Logprobs are ``log_softmax(logits)`` of the unmodified logits. All rows are computed together on the device of the
logits. The result for a row does not depend on the other rows: sums have a fixed order, and each row has uniform
numbers of its own (`engine.model.uniforms`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.logit_adjustments import adjust
from engine.model.token_blocks import argmax
from engine.model.token_draw import DrawRow, DrawRows, draw
from engine.model.token_logprobs import LogprobTensors, logprob_tensors
from engine.model.upload import upload
from engine.scheduling.batch import SampledToken
from engine.scheduling.sequence import TokenHistory
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The tokens of a batch, on the device of its logits, which may still compute them. ``token_ids`` is ``[rows]``,
    int64. ``logprobs`` are those of the rows ``told``."""

    token_ids: torch.Tensor
    told: list[int]
    logprobs: LogprobTensors | None

    def tensors(self) -> list[torch.Tensor]:
        """All results, to be copied to the host for `read`."""
        return [self.token_ids, *(self.logprobs.tensors() if self.logprobs else ())]

    def read(self, copies: Sequence[torch.Tensor]) -> list[SampledToken]:
        """The tokens. ``copies`` are those of `tensors` on the host."""
        logprobs: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            logprobs = dict(zip(self.told, self.logprobs.read(copies[1:]), strict=True))
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(copies[0].tolist())]


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None] | None = None,
) -> list[SampledToken]:
    """Sample one token per row of ``logits`` (see `draw_tokens`), and wait for them."""
    drawn = draw_tokens(logits, params, positions, histories)
    return drawn.read([tensor.cpu() for tensor in drawn.tensors()])


def draw_tokens(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None] | None = None,
    draw_rows: DrawRows | None = None,
) -> DrawnTokens:
    """Draw one token per row of ``logits`` (``[rows, vocabulary]``). ``positions`` are those of the new tokens.
    ``histories`` are needed for rows with penalties or structured outputs (None for other rows); ValueError if one is
    missing.
    ``draw_rows`` is the device's own way to draw. On a GPU that has one nothing waits for the GPU."""
    scores = adjust(logits, params, [None] * len(params) if histories is None else histories)
    greedy = [row for row, p in enumerate(params) if p.temperature == 0.0]
    drawn = [row for row, p in enumerate(params) if p.temperature > 0.0]
    if not drawn:
        token_ids = argmax(scores)
    else:
        draws = [DrawRow(params[row], positions[row]) for row in drawn]
        token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
        _put(token_ids, drawn, draw(_rows(scores, drawn), draws, draw_rows))
        if greedy:
            _put(token_ids, greedy, argmax(_rows(scores, greedy)))
    told = [row for row, p in enumerate(params) if p.logprobs is not None]
    if not told:
        return DrawnTokens(token_ids, told, None)
    num_top = [params[row].logprobs or 0 for row in told]
    return DrawnTokens(token_ids, told, logprob_tensors(_rows(logits, told), _rows(token_ids, told), num_top))


def _rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The given rows, ascending; without a copy if these are all."""
    return tensor if len(rows) == tensor.shape[0] else tensor[upload(rows, torch.int64, tensor.device)]


def _put(tensor: torch.Tensor, rows: Sequence[int], values: torch.Tensor) -> None:
    tensor[upload(rows, torch.int64, tensor.device)] = values
