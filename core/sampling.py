"""What a request asks of the sampler, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from core.errors import InvalidRequest


class FinishReason(StrEnum):
    """Why a request produced its last token."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. A draw is keyed by ``(seed, position)`` alone, so that neither batch, hand-off nor resume
    changes it; requests without a seed get one from the gateway.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off. ``stop`` are strings (the gateway's business),
    ``stop_token_ids`` are ids (the engine's). ``ignore_eos`` goes on to ``max_tokens`` whatever is sampled.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first field that is out of range."""
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens: {self.max_tokens} is below 1; ask for at least one token")
        if not math.isfinite(self.temperature) or not 0.0 <= self.temperature <= 100.0:
            raise InvalidRequest(f"temperature: {self.temperature} is outside 0 to 100; 0 is greedy, 1 the model's own")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k: {self.top_k} is negative; 0 turns it off")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p: {self.top_p} is outside (0, 1]; 1 turns it off")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InvalidRequest(f"seed: {self.seed} is outside 0 to 2^63-1")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop: an empty string would stop at once; leave it out")
        if len(self.stop) > 16:
            raise InvalidRequest(f"stop: {len(self.stop)} strings are more than 16")
        if any(t < 0 for t in self.stop_token_ids):
            raise InvalidRequest("stop_token_ids: ids are never negative")
