"""How likely a token was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the model's own distribution, ``log_softmax(logits)``: before bias,
    penalties, temperature and filters, so that they say the same of a token however it was drawn.

    ``logprob`` is the sampled token's. ``top`` are the likeliest ``(token id, logprob)``, likeliest first (of equals
    the lower id first); the sampled token is among them only if it is that likely.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def to_wire(self) -> list[float]:
        """Flat, for msgpack: the token's own, then ids and logprobs in turn."""
        return [self.logprob, *(value for pair in self.top for value in pair)]

    @classmethod
    def from_wire(cls, values: Sequence[float]) -> TokenLogprobs:
        """The logprobs that `to_wire` described."""
        return cls(values[0], tuple((int(i), v) for i, v in zip(values[1::2], values[2::2], strict=True)))
