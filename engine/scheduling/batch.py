"""What the scheduler hands to the runner for one step, `{request: tokens to compute}` flattened to plain values, and
what it gets back: `{request: tokens sampled}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.scheduling.history import TokenHistory
from pdserve.core.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """How one request's next token is drawn; the draw is keyed by ``(seed, position)`` alone. The fields are those of
    `pdserve.core.sampling.SamplingParams`, checked already."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far matter, so that `ScheduledSeq.history` is needed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the largest logit decides and nobody asks how likely it was."""
        return self.temperature == 0.0 and not self.penalises and not self.logit_bias and self.logprobs is None


@dataclass(frozen=True, slots=True)
class ScheduledSeq:
    """One request's part of a step.

    ``token_ids`` are the tokens to compute now, at positions ``start`` to ``start + len(token_ids) - 1``; the KV of
    the first ``start`` tokens is in the pool. ``block_ids`` is the block table and covers all of them. If ``sample``,
    the logits after the last of them give the token at position ``start + len(token_ids)``. ``history`` is there if
    ``params`` penalise; it is the request's own and covers all its tokens, so it must be read before the step's
    results are taken in.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: bool
    params: SamplerParams
    history: TokenHistory | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token a step made for a request, with its logprobs if they were asked for. A step may make several per
    request, in order."""

    token_id: int
    logprobs: TokenLogprobs | None = None
