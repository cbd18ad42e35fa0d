"""What the scheduler hands to the runner for one step, `{request: tokens to compute}` flattened to plain values, what
it gets back, `{request: tokens sampled}`, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.messages import TokenOut
from engine.scheduling.sequence import TokenHistory
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSeq:
    """One request's part of a step.

    ``token_ids`` are the tokens to compute now, at positions ``start`` to ``start + len(token_ids) - 1``; the KV of
    the first ``start`` tokens is in the pool. ``block_ids`` is the block table and covers all of them. ``history`` is
    there if ``params`` penalise; it is the request's own and covers all its tokens, so it must be read before the
    step's results are taken in.

    If ``sample``, the step gives the request's next token, from the logits after the last of ``token_ids``. The last
    ``num_drafts`` of them may be drafts: guesses of what comes next. Then the step gives those drafts, from the first,
    that are what it would have given itself, and one more token after them.
    """

    attempt_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: bool
    params: SamplingParams
    history: TokenHistory | None = None
    num_drafts: int = 0

    @property
    def end(self) -> int:
        """How many tokens have their KV in the pool after the step, drafts included."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class LayerHook:
    """``done(n)`` is to be called within a step once the first n layers' KV is in the pool, for each n of ``after``."""

    after: frozenset[int]
    done: Callable[[int], None]


@dataclass(slots=True)
class StepResult:
    """The tokens that one step sampled. Times are seconds of the scheduler's clock: ``sampled_s`` when the tokens were
    known, ``started_s`` when the step was scheduled."""

    sampled_s: float
    started_s: float
    tokens: list[TokenOut] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token a step made for a request, with its logprobs if they were asked for. A step may make several per
    request, in order."""

    token_id: int
    logprobs: TokenLogprobs | None = None
