"""Speculative decoding: a step verifies guesses of a request's next tokens, and so may give it several tokens.

A drafter guesses. The step computes the guessed tokens beside the last known one, and samples after each of them, at
its own position, as steps without guesses do. Tokens count up to the first that differs from its guess. A draw depends
on seed and position alone, so the tokens are those that the request gets without speculation, sampled ones as well: a
guess is accepted with the probability that the model gives it, as by rejection sampling with a drafter that is sure.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice
from typing import Protocol

from pdserve.core.request import Request

MAX_DRAFTS = 8
"""Tokens of a request that a step verifies at most."""
NGRAM = 3
"""Tokens that must have occurred before. Fewer occur by chance in any text."""
MAX_LOOKBACK = 32_768
"""Tokens before the end of a prompt that are searched: an index of them takes some 8 MB."""
TRIAL_COST = 0.25
"""The tokens that a draft has to be expected to add while it is not known what it costs."""
_MEMORY = 0.9
"""The weight of a guess in the next one's estimate, so that some ten guesses count."""
_STEP_MEMORY = 0.98
_LEAST_VARIANCE = 1e-3


class Drafter(Protocol):
    """Guesses the tokens of one request."""

    def propose(self, token_ids: Seq[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``token_ids``, those of the request, which only grow."""
        ...


class NgramDrafter:
    """Guesses that after the last `NGRAM` tokens come those that came after them the last time, in prompt or output."""

    def __init__(self, request: Request) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """Where the tokens go on after each n-gram."""
        self._indexed = max(NGRAM, len(request.token_ids) - MAX_LOOKBACK)

    def propose(self, token_ids: Seq[int], most: int) -> list[int]:
        """See `Drafter`."""
        end = len(token_ids)
        for place in range(self._indexed, end):
            self._after[tuple(token_ids[place - NGRAM : place])] = place
        self._indexed = max(self._indexed, end)
        place = self._after.get(tuple(token_ids[end - NGRAM :]), end)
        # A guess may go on after the end: what repeats is as long as the way back.
        return [token_ids[place + number % (end - place)] for number in range(most)] if place < end else []


class Speculation:
    """The guesses for one request. With ``always`` a step verifies as many as it can, else as many as pay."""

    def __init__(self, drafter: Drafter, always: bool) -> None:
        self.drafter, self._always = drafter, always
        self.waits = False
        """Its next step has to know its last token: drafts are being verified, or a guess is likely to be right."""
        self._right, self._guesses = 0.5, 1.0

    @property
    def acceptance(self) -> float:
        """The estimated probability that a guess is right, above 0 and below 1."""
        return self._right / self._guesses

    def gain(self, depth: int, cost: float | None) -> float:
        """The tokens that draft number ``depth`` is expected to add; 0 if it does not pay: if a step makes as many in
        the time that it takes, ``cost`` (None: that is unknown)."""
        expected = self.acceptance**depth
        return expected if self._always or (cost is not None and expected > cost) else 0.0

    def observe(self, accepted: int, drafts: int, cost: float | None) -> None:
        """Note that the first ``accepted`` of ``drafts`` guesses were right, and what a draft costs now."""
        for right in islice((*(1.0,) * accepted, 0.0), drafts):
            self._right, self._guesses = self._right * _MEMORY + right, self._guesses * _MEMORY + 1.0
        self.waits = accepted > 0 and self.gain(1, cost) > 0.0

    def observe_next(self, token_ids: Seq[int], token_id: int, cost: float | None) -> None:
        """`observe` whether the guess after ``token_ids``, which no step has verified, would have been right."""
        guess = self.drafter.propose(token_ids, 1)
        self.observe(int(guess == [token_id]), len(guess), cost)


class RowCost:
    """What one more row costs a step of decodes: the seconds of steps, fitted by a line over their rows. Recent steps
    count more."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Note the time of a step."""
        self._weight = self._weight * _STEP_MEMORY + 1.0
        self._rows = self._rows * _STEP_MEMORY + rows
        self._seconds = self._seconds * _STEP_MEMORY + seconds
        self._rows_rows = self._rows_rows * _STEP_MEMORY + rows * rows
        self._rows_seconds = self._rows_seconds * _STEP_MEMORY + rows * seconds

    def share(self, rows: int) -> float | None:
        """How much longer one more row makes a step of ``rows``, as a share of its time. None if it is not known,
        because the last steps all had the same number of rows."""
        if not self._weight:
            return None
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_rows / self._weight - mean_rows * mean_rows
        if variance < _LEAST_VARIANCE:
            return None
        slope = max(0.0, (self._rows_seconds / self._weight - mean_rows * mean_s) / variance)
        step_s = max(mean_s + slope * (rows - mean_rows), slope * rows)
        return slope / step_s if step_s > 0.0 else 0.0
