"""The steps and generations of an engine that are measured. Without torch."""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

WARM_STEPS, STEPS = 2, 5
"""Of a decode step, whose median counts."""


class StepCase(msgspec.Struct, frozen=True):
    """A step with ``tokens`` tokens of each of ``batch`` prompts, after ``context`` others whose KV is in the pool, and
    one token of ``beside`` further requests with the same context. A decode step is one with single tokens. One prompt
    without a context is computed as a whole, in as many steps as the engine needs."""

    batch: int
    tokens: int
    context: int = 0
    beside: int = 0

    @property
    def kind(self) -> Literal["prompt", "prefill", "decode", "mixed"]:
        """What the step does."""
        if self.beside:
            return "mixed"
        if self.tokens == 1:
            return "decode"
        return "prefill" if self.batch > 1 or self.context else "prompt"

    @property
    def rows(self) -> int:
        """Tokens that the prompts compute."""
        return self.batch * self.tokens

    @property
    def pairs(self) -> float:
        """Pairs of a computed token of them and one that it attends to."""
        return self.rows * (self.context + (self.tokens + 1) / 2)


def drawn_size(draw: random.Random, most: int, least: int = 1) -> int:
    """A size from ``least`` to ``most``, whose logarithm is uniform: small and large ones are equally likely."""
    return round(2 ** draw.uniform(math.log2(least), math.log2(most)))


OFF, AUTO, ALWAYS = "off", "auto", "always"
SPECULATION = {OFF: None, AUTO: None, ALWAYS: True}
"""The option of requests, by arm. Without speculation there is nothing that guesses."""
REPEATING, RANDOM = "repeating", "random"
"""A prompt that repeats, answered greedily; and a random one, answered by random tokens."""


class GuessCase(msgspec.Struct, frozen=True):
    """``batch`` requests whose guesses are right with the probability ``right``; or are those of n-grams, or of the
    engine's draft model (``by_model``), in a ``text`` of a kind."""

    batch: int
    right: float | None = None
    text: str = RANDOM
    by_model: bool = False

    @property
    def guesses(self) -> str:
        """What the guesses are."""
        if self.right is not None:
            return f"{self.right:.0%} right"
        return f"{'draft model' if self.by_model else 'n-grams'}, {self.text} text"
