"""Guesses of next tokens by a draft model: a smaller model with the same vocabulary, on the same device."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.core import CALM_STEPS
from engine.model.runner import LaunchedStep, ModelRunner
from engine.scheduling.batch import PENDING, ScheduledSeq, StepTooLarge
from engine.scheduling.speculation import MAX_DRAFTS, DraftContext, Drafter
from pdserve.core.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


class DraftModel(Drafter):
    """Guesses the tokens to which its model gives the highest probability.

    The pool of its ``runner`` has as many blocks as that of the model whose tokens it guesses, of as many tokens, and
    each request has the blocks of the same numbers in both. Blocks that requests share hold the same tokens, so they
    may write them again. Nothing depends on what is in them but whether guesses are right.

    ``max_context``: tokens of its longest sequence. ``vocab_size``: ids of the model whose tokens it guesses; ids
    that only one of both has are those of no text.
    """

    free = False

    def __init__(self, runner: ModelRunner, max_context: int, vocab_size: int) -> None:
        self._runner, self.max_context, self._vocab_size = runner, max_context, vocab_size
        self._largest = sys.maxsize  # tokens of a pass of `prepare` for which memory does not lack
        self._pause = self._num_calm = 0  # calls
        self._computed: dict[str, tuple[int, list[int]]] = {}
        """Of requests, how many of the first tokens have their KV in the pool, and the guesses whose KV follows."""

    def missing(self, context: DraftContext) -> int:
        """See `Drafter`."""
        return len(context.token_ids) - 1 - self._start(context)

    def prepare(self, contexts: Sequence[DraftContext], budget: int) -> list[int]:
        """See `Drafter`. A few missing tokens are computed with the first guess. If memory lacks, nothing is computed
        for a while, then passes of half the tokens, and after a while larger ones again."""
        if self._pause:
            self._pause -= 1
            return [0] * len(contexts)
        budget = min(budget, self._largest)
        counts: list[int] = []
        parts: list[ScheduledSeq] = []
        for context in contexts:
            start = self._start(context)
            missing = len(context.token_ids) - 1 - start
            if missing > MAX_DRAFTS and (count := min(missing, budget)):
                budget, missing = budget - count, missing - count
                parts.append(self._part(context, start, start + count, sample=False))
            counts.append(context.most if missing <= MAX_DRAFTS else 0)
        if not parts:
            return counts
        try:
            self._runner.execute(parts)
        except StepTooLarge:
            self._largest = max(1, sum(len(part.token_ids) for part in parts) // 2)
            self._pause, self._num_calm = CALM_STEPS, 0
            return [0] * len(contexts)
        self._num_calm += 1
        if self._num_calm >= CALM_STEPS:
            self._largest, self._num_calm = min(sys.maxsize, 2 * self._largest), 0
        self._computed.update((part.attempt_id, (part.end, [])) for part in parts)
        return counts

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Drafter`. The passes are launched one after the other, without waiting for their tokens."""
        asked = {context.attempt_id: context.most for context in contexts}
        parts = [self._part(each, self._start(each), len(each.token_ids), sample=True) for each in contexts]
        passes: list[LaunchedStep] = []
        guesses: dict[str, list[int]] = {attempt_id: [] for attempt_id in asked}
        try:
            for depth in range(1, max(asked.values()) + 1):
                passes.append(self._runner.launch(parts))
                passes[-1].sample()
                parts = [self._next(part) for part in parts if asked[part.attempt_id] > depth]
            for each in passes:
                for attempt_id, tokens in each.tokens().items():
                    guesses[attempt_id].append(tokens[-1].token_id)
        except StepTooLarge:
            self._pause = CALM_STEPS
            return [[] for _ in contexts]
        for context in contexts:
            self._computed[context.attempt_id] = len(context.token_ids), guesses[context.attempt_id][:-1]
        return [self._known_ids(guess) for guess in guesses.values()]

    def forget(self, attempt_id: str) -> None:
        """See `Drafter`."""
        self._computed.pop(attempt_id, None)

    def _start(self, context: DraftContext) -> int:
        """Where its tokens without KV begin: at the last one at the latest."""
        computed, guesses = self._computed.get(context.attempt_id, (0, []))
        last = len(context.token_ids) - 1
        for guess in guesses:
            if computed >= last or context.token_ids[computed] != guess:
                break
            computed += 1
        return min(computed, last)

    def _part(self, context: DraftContext, start: int, end: int, *, sample: bool) -> ScheduledSeq:
        most = self._runner.vocab_size
        token_ids = [token_id if token_id < most else 0 for token_id in context.token_ids[start:end]]
        drafts = len(token_ids) - 1 if sample else 0  # so that a recorded step can compute a few tokens, too
        return ScheduledSeq(context.attempt_id, token_ids, start, context.block_ids, sample, _GREEDY, num_drafts=drafts)

    @staticmethod
    def _next(part: ScheduledSeq) -> ScheduledSeq:
        return ScheduledSeq(part.attempt_id, [PENDING], part.end, part.block_ids, True, _GREEDY)

    def _known_ids(self, guess: list[int]) -> list[int]:
        """Those up to the first id that the other model does not have."""
        unknown = (place for place, token_id in enumerate(guess) if token_id >= self._vocab_size)
        return guess[: next(unknown, len(guess))]
