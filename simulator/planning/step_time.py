"""How long a step of an engine takes: fitted to measured steps, or from a device's data sheet."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import msgspec

from checkpoints.arithmetic import ModelArithmetic
from engine.scheduling.batch import ScheduledSeq
from pdserve.core.errors import InvalidRequest
from router.cost_model import MIN_SAMPLES, fit

KNOTS = (1, 4, 16, 64, 256, 1024, 4096)
"""The time of a step is linear in its rows between these numbers of them."""


class StepShape(NamedTuple):
    """What a step computes, as far as its time depends on it.

    ``rows`` are tokens, of which each of ``sampled`` gives a next one. ``pairs`` are the pairs of a prompt's token and
    one that it attends to, and ``read`` the tokens whose KV is read from the cache.
    """

    rows: int
    sampled: int
    pairs: int
    read: int

    @classmethod
    def of(cls, seqs: Sequence[ScheduledSeq]) -> Self:
        """The shape of a step."""
        rows = sampled = pairs = read = 0
        for seq in seqs:
            count, start = len(seq.token_ids), seq.start
            rows += count
            sampled += seq.sample
            if count == 1:
                read += start + 1
            else:
                read += start
                pairs += count * start + count * (count + 1) // 2
        return cls(rows, sampled, pairs, read)

    @classmethod
    def plain(cls, batch: int, tokens: int, context: int, beside: int = 0) -> Self:
        """That of ``tokens`` tokens of each of ``batch`` requests after ``context`` others, and of one token of each of
        ``beside`` more."""
        pairs = 0 if tokens == 1 else batch * (tokens * context + tokens * (tokens + 1) // 2)
        read = batch * (context + (tokens == 1)) + beside * (context + 1)
        return cls(batch * tokens + beside, batch + beside, pairs, read)


class StepTime(Protocol):
    """Predicts steps."""

    def seconds(self, step: StepShape) -> float:
        """Seconds from the launch of a step to its tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Scaled:
    """Steps take ``factor`` times as long as predicted."""

    steps: StepTime
    factor: float

    def seconds(self, step: StepShape) -> float:
        """See `StepTime`."""
        return self.factor * self.steps.seconds(step)


class MeasuredSteps(msgspec.Struct, frozen=True):
    """Fitted to measured steps. ``at_rows`` has the seconds of a step with each number of rows of `KNOTS`, without
    attention; the others are seconds per unit."""

    at_rows: tuple[float, ...]
    sampled_s: float
    pair_s: float
    read_s: float

    @classmethod
    def fit(cls, steps: Sequence[tuple[StepShape, float]]) -> Self:
        """Fit steps and their seconds. Beyond a knot that hardly any step has reached, the line before it goes on.
        InvalidRequest if there are too few."""
        if len(steps) < MIN_SAMPLES:
            raise InvalidRequest(f"{len(steps)} steps are too few for a fit; measure at least {MIN_SAMPLES}")
        rows = [((1.0, *_ramps(step.rows), step.sampled, step.pairs, step.read), seconds) for step, seconds in steps]
        as_before = {place: place - 1 for place in range(2, len(KNOTS))}
        first, *others = fit(rows, as_before, len(rows)).coefficients
        slopes, (sampled_s, pair_s, read_s) = others[:-3], others[-3:]
        lengths = [after - before for before, after in itertools.pairwise(KNOTS)]
        at_rows = itertools.accumulate(
            (slope * length for slope, length in zip(slopes, lengths, strict=True)), initial=first
        )
        return cls(tuple(at_rows), sampled_s, pair_s, read_s)

    def seconds(self, step: StepShape) -> float:
        """See `StepTime`. Beyond the last knot as between the last two."""
        place = min(max(1, bisect_right(KNOTS, step.rows)), len(KNOTS) - 1)
        low, high = KNOTS[place - 1], KNOTS[place]
        before, after = self.at_rows[place - 1], self.at_rows[place]
        base = before + (after - before) * (step.rows - low) / (high - low)
        return base + self.sampled_s * step.sampled + self.pair_s * step.pairs + self.read_s * step.read

    def error(self, steps: Sequence[tuple[StepShape, float]]) -> float:
        """Median of the relative errors at ``steps``, which it should not have been fitted to."""
        return statistics.median(abs(self.seconds(step) - seconds) / seconds for step, seconds in steps)


def _ramps(rows: int) -> list[float]:
    """How far ``rows`` are in each interval of `KNOTS`."""
    return [float(min(max(rows - low, 0), high - low)) for low, high in itertools.pairwise(KNOTS)]


@dataclass(frozen=True, slots=True)
class CalculatedSteps:
    """Calculated from a model and what ``devices`` of a kind do together: a step takes the longer of computing at
    ``flops_per_s`` and reading at ``bytes_per_s`` (of each device, and as far as they are reached), then the sums over
    the devices, and ``fixed_s``. Layers with a sliding window count as if they saw all tokens."""

    model: ModelArithmetic
    flops_per_s: float
    bytes_per_s: float
    fixed_s: float = 0.0
    devices: int = 1
    hidden_size: int = 0
    link_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0

    def seconds(self, step: StepShape) -> float:
        """See `StepTime`."""
        model, layers = self.model, len(self.model.windows)
        active = model.layer_matrices - model.idle_matrices
        multiplied = step.rows * layers * active + step.sampled * model.head_matrix
        attended = step.pairs + step.read
        flops = 2.0 * multiplied + 4.0 * model.query_size * layers * attended
        weights = layers * model.layer_matrices + model.head_matrix
        num_bytes = model.dtype_bytes * (weights + 2 * model.kv_size * layers * (step.read + step.rows))
        computed_s = max(flops / self.flops_per_s, num_bytes / self.bytes_per_s) / self.devices
        return computed_s + self._sums_s(step.rows, layers) + self.fixed_s

    def _sums_s(self, rows: int, layers: int) -> float:
        """Two sums of all rows over the devices, per layer. In a ring each device sends nearly twice the rows."""
        if self.devices == 1:
            return 0.0
        num_bytes = 2.0 * (self.devices - 1) / self.devices * rows * self.hidden_size * self.model.dtype_bytes
        return 2 * layers * (self.link_latency_s + num_bytes / self.link_bytes_per_s)
