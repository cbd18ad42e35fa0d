"""What the scheduler hands to the runner for one step: `{request: tokens to compute}`, flattened to plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """How one request's next token is drawn; the draw is keyed by ``(seed, position)`` alone."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class ScheduledSeq:
    """One request's part of a step.

    ``token_ids`` are the tokens to compute now, at positions ``start`` to ``start + len(token_ids) - 1``; the KV of
    the first ``start`` tokens is in the pool. ``block_ids`` is the block table and covers all of them. If ``sample``,
    the logits after the last of them give the token at position ``start + len(token_ids)``.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: bool
    params: SamplerParams
