"""The interface between scheduler and runner: the parts of a step, and the tokens that it samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from engine.scheduling.sequence import PromptLogprobs, TokenHistory
from pdserve.core.sampling import SamplingParams, TokenLogprobs

PENDING = -1
"""In place of a token id: the token that the step before this one samples for the request, which is not known yet."""


class StepTooLarge(Exception):
    """The device has too little memory for a step. It has computed nothing that counts."""


class ScheduledSeq(msgspec.Struct, frozen=True, eq=False):
    """One request's part of a step.

    ``token_ids`` are the tokens to compute, at positions ``start`` to ``start + len(token_ids) - 1``. The KV of the
    first ``start`` tokens is in the pool when the steps before have run. ``block_ids`` is the block table, which covers
    all of these tokens, the last of which may be `PENDING`. With ``sample``, the step samples the request's next token
    from the logits after the last token.

    The last ``num_drafts`` tokens are guesses (`engine.scheduling.speculation`). The step samples after each of them,
    too, and after the token before them.

    ``history`` is set if ``params`` penalise or have structured outputs. It is the request's own object, so read it
    when the tokens of the step before are known, and before those of this step are.

    ``prompt_logprobs`` is the request's own object, too, to which the step adds those of its tokens when it is read.
    """

    attempt_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: bool
    params: SamplingParams
    history: TokenHistory | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_drafts: int = 0

    @property
    def end(self) -> int:
        """Tokens whose KV is in the pool after the step."""
        return self.start + len(self.token_ids)

    @property
    def histories(self) -> list[TokenHistory | None]:
        """The history before each of the tokens that the step samples."""
        if self.history is None:
            return [None] * (self.num_drafts + 1)
        drafts = self.token_ids[len(self.token_ids) - self.num_drafts :]
        return [*itertools.accumulate(drafts, TokenHistory.after, initial=self.history)]

    @property
    def decodes(self) -> bool:
        """Whether there is only one token beside the drafts."""
        return len(self.token_ids) == self.num_drafts + 1


@dataclass(frozen=True, slots=True)
class LayerHook:
    """A callback within a step: call ``done(n)`` when the KV of the first n layers is in the pool, for each n in
    ``after``."""

    after: frozenset[int]
    done: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that a step sampled for a request, with its logprobs if the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None
