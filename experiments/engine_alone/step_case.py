"""A step of an engine, as it is measured and as a cost model counts it."""

from __future__ import annotations

from typing import Literal

import msgspec


class StepCase(msgspec.Struct, frozen=True):
    """A step with a part for each of ``batch`` requests: of ``tokens`` tokens, after ``context`` others whose KV is in
    the pool. A decode step is one with single tokens."""

    batch: int
    tokens: int
    context: int

    @property
    def kind(self) -> Literal["prefill", "decode"]:
        """What the step does."""
        return "decode" if self.tokens == 1 else "prefill"

    @property
    def rows(self) -> int:
        """Tokens that the step computes."""
        return self.batch * self.tokens

    @property
    def pairs(self) -> float:
        """Pairs of a computed token and one that it attends to."""
        return self.rows * (self.context + (self.tokens + 1) / 2)
