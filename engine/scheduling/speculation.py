"""Speculative decoding: a step verifies guesses of a request's next tokens, and so may give it several tokens.

A drafter guesses. The step computes the guessed tokens beside the last known one, and samples after each of them, at
its own position, as steps without guesses do. Tokens count up to the first that differs from its guess. A draw depends
on seed and position alone, so the tokens are those that the request gets without speculation, sampled ones as well: a
guess is accepted with the probability that the model gives it, as by rejection sampling with a drafter that is sure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import islice
from typing import NamedTuple, Protocol

MAX_DRAFTS = 8
"""Tokens of a request that a step verifies at most."""
NGRAM = 3
"""Tokens that must have occurred before. Fewer occur by chance in any text."""
MAX_LOOKBACK = 32_768
"""Tokens before the end of a prompt that are searched: an index of them takes some 5 MB."""
TRIAL_COST = 0.25
"""The tokens that a draft has to be expected to add while it is not known what it costs."""
LEAST_GAIN = 1.05
"""How many times the tokens per second a step with drafts has to promise: times are noisy."""
_MEMORY = 0.9
"""The weight of a guess in the next one's estimate, so that some ten guesses count."""
_UNKNOWN = 0.5
"""The acceptance of a request of which nothing is known."""
MOST_MISSING = 64
"""Tokens that a draft model computes before its first guess, at most, for each token that is still to come: a guess
saves no more than a step."""
_COSTLY_TRIAL_DRAFTS = 2
"""Drafts of a step at most, while it is not known what they cost, if guesses cost something, too."""
_REST_STEPS = 64
"""Requests without drafts are tried again every so many steps, all together, because they share the passes."""
_MOST_EXPECTED = 4.0
"""The time of a pass counts as so many times the expected one at most, because a pass may be interrupted."""
_FRESH_EVERY = 32
"""Of so many requests, one starts with an acceptance as if nothing were known of those before it."""
_LONG_MEMORY = 0.99
_STEP_MEMORY = 0.98
_LEAST_SPREAD = 1e-3
_LEAST_WEIGHT = 0.1  # of a step that was made some hundred steps ago


class DraftContext(NamedTuple):
    """A request whose next tokens are guessed, at most ``most``: all of its tokens so far, which only grow until
    `Drafter.forget`, and its block table, which covers them and ``most`` further ones when `Drafter.propose` gets it.
    The KV of all tokens but the last is in these blocks."""

    attempt_id: str
    token_ids: Seq[int]
    block_ids: Seq[int]
    most: int


class Drafter(Protocol):
    """Guesses the next tokens of an engine's requests. The defaults are those of guesses that cost nothing."""

    free: bool = True
    """Its guesses cost nothing. What no step verifies is compared with the sampled token then."""
    max_context: int = sys.maxsize
    """Tokens of a request and of guesses, at most."""

    def missing(self, context: DraftContext) -> int:
        """How many tokens of a request it has to compute before it can guess."""
        return 0

    def prepare(self, contexts: Seq[DraftContext], budget: int) -> list[int]:
        """How many tokens it can guess now, of each request. It computes at most ``budget`` missing tokens before."""
        ...

    def propose(self, contexts: Seq[DraftContext]) -> list[list[int]]:
        """Tokens that may follow, of each request; at most as many as `prepare` has told."""
        ...

    def forget(self, attempt_id: str) -> None:
        """Drop what is known of a request: it has ended, or lost its blocks."""
        return


class NgramDrafter(Drafter):
    """Guesses that after the last `NGRAM` tokens come those that came after them the last time, in prompt or output."""

    def __init__(self) -> None:
        self._indexes: dict[str, _NgramIndex] = {}

    def prepare(self, contexts: Seq[DraftContext], budget: int) -> list[int]:
        """See `Drafter`."""
        return [context.most if self._place(context) < len(context.token_ids) else 0 for context in contexts]

    def propose(self, contexts: Seq[DraftContext]) -> list[list[int]]:
        """See `Drafter`."""
        return [self._propose(context) for context in contexts]

    def forget(self, attempt_id: str) -> None:
        """See `Drafter`."""
        self._indexes.pop(attempt_id, None)

    def _place(self, context: DraftContext) -> int:
        index = self._indexes.get(context.attempt_id)
        if index is None:
            index = self._indexes[context.attempt_id] = _NgramIndex(context.token_ids)
        return index.place(context.token_ids)

    def _propose(self, context: DraftContext) -> list[int]:
        token_ids, most = context.token_ids, context.most
        place, end = self._place(context), len(token_ids)
        # A guess may go on after the end: what repeats is as long as the way back.
        return [token_ids[place + number % (end - place)] for number in range(most)] if place < end else []


class _NgramIndex:
    """Where the tokens of a request go on after each n-gram. The first call of `place` gets ``token_ids``."""

    def __init__(self, token_ids: Seq[int]) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = max(NGRAM, len(token_ids) - MAX_LOOKBACK)

    def place(self, token_ids: Seq[int]) -> int:
        """Where they went on the last time after their last n-gram; their end if it is new."""
        end = len(token_ids)
        for place in range(self._indexed, end):
            self._after[tuple(token_ids[place - NGRAM : place])] = place
        self._indexed = max(self._indexed, end)
        return self._after.get(tuple(token_ids[end - NGRAM :]), end)


class Acceptance:
    """The estimated probability that a guess is right, above 0 and below 1: a mean of which recent guesses are the
    larger part."""

    def __init__(self, start: float = _UNKNOWN, memory: float = _MEMORY) -> None:
        self._right, self._guesses, self._memory = start, 1.0, memory

    @property
    def value(self) -> float:
        """The estimate."""
        return self._right / self._guesses

    def observe(self, accepted: int, drafts: int) -> None:
        """Note that the first ``accepted`` of ``drafts`` guesses were right; the one after them was wrong."""
        for right in islice((*(1.0,) * accepted, 0.0), drafts):
            self._right, self._guesses = self._right * self._memory + right, self._guesses * self._memory + 1.0


class Speculation:
    """The guesses for one request. With ``always`` a step verifies as many as it can, else as many as pay. If they cost
    something, ``prior`` returns the acceptance that is expected of them, else it is None."""

    def __init__(self, always: bool, prior: Callable[[], float] | None = None) -> None:
        self.always, self._prior = always, prior
        self.waits = prior is not None
        """Its next step has to know its last token: drafts are being verified, or are likely to be worth it."""
        self._acceptance = Acceptance(_UNKNOWN if prior is None else prior())
        self._rest = 0  # steps

    @property
    def acceptance(self) -> float:
        """See `Acceptance`."""
        return self._acceptance.value

    @property
    def trial_drafts(self) -> int:
        """Drafts of a step at most, while it is not known what they cost."""
        return MAX_DRAFTS if self._prior is None else _COSTLY_TRIAL_DRAFTS

    def gain(self, depth: int, cost: float | None) -> float:
        """The tokens that draft number ``depth`` is expected to add; 0 if it does not pay: if a step makes as many in
        the time that it takes, ``cost`` (None: that is unknown)."""
        expected = self.acceptance**depth
        return expected if self.always or (cost is not None and expected > cost) else 0.0

    def observe(self, accepted: int, drafts: int, cost: float | None) -> None:
        """Note that the first ``accepted`` of ``drafts`` guesses were right, and what a draft costs now."""
        self._acceptance.observe(accepted, drafts)
        if self._prior is None:
            self.waits = accepted > 0 and self.gain(1, cost) > 0.0
            return
        if drafts:
            self._rest = 0
        elif self._rest:
            self._rest -= 1
            if not self._rest:
                self._acceptance = Acceptance(self._prior())
        self.waits = not self._rest

    def rest(self, steps: int) -> None:
        """Note that its guesses are not worth their cost now. For so many steps it does not wait, and then its
        acceptance is estimated anew."""
        self._rest = self._rest or steps
        self.waits = False


class _Steps:
    """Sums over steps, of which recent ones count more."""

    def __init__(self) -> None:
        self.weight = self.rows = self.seconds = self._rows_rows = self._rows_seconds = 0.0

    def decay(self) -> None:
        """Let all steps so far count less."""
        for name in ("weight", "rows", "seconds", "_rows_rows", "_rows_seconds"):
            setattr(self, name, getattr(self, name) * _STEP_MEMORY)

    def add(self, rows: float, seconds: float) -> None:
        """Add a step."""
        self.weight += 1.0
        self.rows += rows
        self.seconds += seconds
        self._rows_rows += rows * rows
        self._rows_seconds += rows * seconds

    def spread(self) -> tuple[float, float]:
        """The sums of squares of rows, and of products of rows and seconds, each from its mean."""
        mean_rows = self.rows / self.weight if self.weight else 0.0
        return self._rows_rows - mean_rows * self.rows, self._rows_seconds - mean_rows * self.seconds

    def at(self, rows: int, row_s: float) -> float:
        """The expected seconds of a step of so many rows, if a row takes ``row_s``. There must have been steps."""
        return (self.seconds + row_s * (rows * self.weight - self.rows)) / self.weight


class StepTimes:
    """The time of decode steps over their rows, fitted by two parallel lines: without drafts and with them, because a
    step with drafts may be computed in another way."""

    def __init__(self) -> None:
        self._plain, self._drafting = _Steps(), _Steps()
        self._rows: set[tuple[int, bool]] = set()

    def observe(self, rows: int, drafting: bool, seconds: float) -> None:
        """Note the time of a step. The first one of so many rows does not count, because it may have made kernels for
        them, which takes many times as long."""
        if (rows, drafting) not in self._rows:
            self._rows.add((rows, drafting))
            return
        self._plain.decay()
        self._drafting.decay()
        (self._drafting if drafting else self._plain).add(rows, seconds)

    @property
    def row_s(self) -> float:
        """The seconds that one more row takes."""
        (squares, products), (more_squares, more_products) = self._plain.spread(), self._drafting.spread()
        if squares + more_squares > _LEAST_SPREAD:
            return max(0.0, (products + more_products) / (squares + more_squares))
        plain, drafting = self._plain, self._drafting
        if not (plain.weight and drafting.weight):
            return 0.0
        rows = drafting.rows / drafting.weight - plain.rows / plain.weight
        return max(0.0, (drafting.seconds / drafting.weight - plain.seconds / plain.weight) / rows) if rows else 0.0

    def seconds(self, rows: int, drafting: bool) -> float | None:
        """The expected time of a step; None if there was none of its kind for long."""
        steps = self._drafting if drafting else self._plain
        if steps.weight < _LEAST_WEIGHT:
            return None
        return max(steps.at(rows, self.row_s), self.row_s * rows)


class PassTimes:
    """The time of a pass of a draft model over its rows, fitted by a line. There is none of guesses that cost
    nothing."""

    def __init__(self) -> None:
        self._passes = _Steps()
        self._rows: set[int] = set()

    def observe(self, counts: Seq[int], seconds: float) -> None:
        """Note the time of the passes that have guessed so many tokens of each request, as `StepTimes.observe`
        does."""
        rows = round(sum(counts) / max(counts))
        if rows not in self._rows:
            self._rows.add(rows)
            return
        expected_s, pass_s = self.seconds(rows), seconds / max(counts)
        self._passes.add(rows, min(pass_s, _MOST_EXPECTED * expected_s) if expected_s else pass_s)

    def decay(self) -> None:
        """Let all passes so far count less."""
        self._passes.decay()

    def seconds(self, rows: int) -> float:
        """The expected time of a pass; 0 while it is unknown, or if there was none for long."""
        passes = self._passes
        if passes.weight < _LEAST_WEIGHT:
            return 0.0
        squares, products = passes.spread()
        row_s = max(0.0, products / squares) if squares > _LEAST_SPREAD else 0.0
        return max(0.0, passes.at(rows, row_s))


class DraftPolicy:
    """Decides how many drafts a step verifies: as many as pay by the times of recent steps."""

    def __init__(self) -> None:
        self._times, self._passes = StepTimes(), PassTimes()
        self._pays = True
        self._acceptance = Acceptance(memory=_LONG_MEMORY)
        self._starts = self._steps = 0

    def start(self, always: bool, free: bool) -> Speculation:
        """The speculation of a new request. Where guesses are not ``free``, it starts with the acceptance of others,
        so that a drafter that is seldom right costs little."""
        return Speculation(always, None if free else self._prior)

    def _prior(self) -> float:
        self._starts += 1
        return _UNKNOWN if self._starts % _FRESH_EVERY == 1 else self._acceptance.value

    @property
    def rest_steps(self) -> int:
        """After how many steps requests without drafts are tried again: 0 while no step has been timed."""
        timed = self._times.seconds(1, drafting=False) is not None
        return _REST_STEPS - self._steps % _REST_STEPS if timed else 0

    def observe_drafts(self, accepted: int, drafts: int) -> None:
        """Note that a step has verified ``drafts`` guesses of a request, of which the first ``accepted`` were right."""
        self._acceptance.observe(accepted, drafts)

    def worth_preparing(self, guesses: Seq[tuple[Speculation, int]], rows: int, tokens: float, left: int) -> list[bool]:
        """For which requests a drafter whose guesses cost time should prepare some: those whose guesses would pay (see
        `lengths`). While it is unknown what they cost, one request tries them."""
        worth = [length > 0 for length in self.lengths(guesses, rows, tokens, left)]
        if self._times.seconds(rows, drafting=True) is None and True in worth:
            first = worth.index(True)
            worth = [
                is_worth and (place == first or speculation.always)
                for place, (is_worth, (speculation, _)) in enumerate(zip(worth, guesses, strict=True))
            ]
        return worth

    def lengths(self, guesses: Seq[tuple[Speculation, int]], rows: int, tokens: float, left: int) -> list[int]:
        """How many drafts of each request to verify, of those that it has: at most ``left`` in all, in a step that has
        ``rows`` and makes ``tokens`` without them."""
        row_s = self._times.row_s
        plain_s, drafting_s = (self._times.seconds(rows, drafting) for drafting in (False, True))
        counts, added, expected, passes_s = [0] * len(guesses), 0, tokens, 0.0
        for depth in range(1, MAX_DRAFTS + 1):
            deeper: list[int] = []
            gained = 0.0
            for place, (speculation, most) in enumerate(guesses):
                more = added + len(deeper)
                if more == left or most < depth or counts[place] < depth - 1:
                    continue
                if drafting_s is None and more >= speculation.trial_drafts and not speculation.always:
                    continue
                step_s = None if drafting_s is None else drafting_s + passes_s + more * row_s
                if gain := speculation.gain(depth, _cost(plain_s, step_s, row_s, expected + gained)):
                    deeper.append(place)
                    gained += gain
            pass_s = self._passes.seconds(len(deeper))
            if drafting_s is not None and not any(guesses[place][0].always for place in deeper):
                step_s = drafting_s + passes_s + added * row_s
                if gained * step_s <= expected * (pass_s + len(deeper) * row_s):
                    break  # the draft model's pass costs more than its guesses save
            for place in deeper:
                counts[place] = depth
            added, expected, passes_s = added + len(deeper), expected + gained, passes_s + pass_s
        if added:
            self._pays = True
            if plain_s is not None and drafting_s is not None:
                self._pays = expected * plain_s > LEAST_GAIN * tokens * (drafting_s + passes_s + added * row_s)
        each = zip(counts, guesses, strict=True)
        return [count if self._pays or speculation.always else 0 for count, (speculation, _) in each]

    def observe_passes(self, counts: Seq[int], seconds: float) -> None:
        """Note the time in which a draft model has guessed so many tokens of each request."""
        self._passes.observe(counts, seconds)

    def observe(self, rows: int, tokens: int, seconds: float | None) -> None:
        """Note the end of a step, and its time if it has decodes alone: more than ``tokens`` rows are those of
        drafts."""
        self._steps += 1
        if seconds is not None:
            self._times.observe(rows, rows > tokens, seconds)
            self._passes.decay()

    def cost(self, rows: int, tokens: int) -> float | None:
        """What a draft costs in a step of so many rows and tokens (see `Speculation.gain`)."""
        plain_s, drafting_s = (self._times.seconds(rows, drafting) for drafting in (False, True))
        return _cost(plain_s, drafting_s, self._times.row_s, tokens) if self._pays else None


def _cost(plain_s: float | None, drafting_s: float | None, row_s: float, tokens: float) -> float | None:
    """The tokens that a step with drafts, which makes ``tokens``, makes in the time of a row. While the time of such
    steps is unknown, drafts are tried that are likely enough; while that of others is, none (None)."""
    if plain_s is None:
        return None
    return tokens * row_s / drafting_s if drafting_s else TRIAL_COST
