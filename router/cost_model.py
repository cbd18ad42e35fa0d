"""Learns how long prefill, hand-off and decode take on this deployment, from the requests it has completed.

`CostModel` keeps a bounded sample of measurements and fits lines to them. `Costs` are the fitted lines: plain values,
which `router.placement` gets with its view of the workers. There is no clock in here, and nothing is stored on disk: a
router that starts knows nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from operator import mul
from typing import NamedTuple

import msgspec

from pdserve.core.request import counted

MIN_SAMPLES = 16
"""A line with fewer measurements predicts nothing."""

PER_SIZE = 16
"""Measurements kept for each power of two of the size (prompt tokens, KV bytes, requests): the latest ones."""

LATEST = 64
"""Requests that the means are taken of."""

MAX_LINES = 16
"""Lines of one quantity. The one that was not measured for longest makes room for another."""

INTERVAL = 1.645
"""Standard errors of a margin: a line lies within them 9 times out of 10."""

_ROUNDS = 8
_MIN_SECONDS = 1e-6


class Estimate(NamedTuple):
    """A predicted duration, and how far the fitted line may be off because it was measured with noise."""

    seconds: float
    margin_s: float


class Line(msgspec.Struct, frozen=True):
    """A duration as a sum of features times ``coefficients`` (seconds per unit), none of them negative.

    ``covariance`` is that of the coefficients. ``samples`` is the number of measurements since the start.
    """

    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    samples: int

    def seconds(self, *features: float) -> float:
        """The duration for these features."""
        return math.fsum(map(mul, self.coefficients, features))

    def at(self, *features: float) -> Estimate:
        """The duration for these features, with its margin."""
        seconds = self.seconds(*features)
        variance = sum(
            [
                a * b * cov
                for a, row in zip(features, self.covariance, strict=True)
                for b, cov in zip(features, row, strict=True)
            ]
        )
        return Estimate(seconds, INTERVAL * max(0.0, variance) ** 0.5)


class Served(msgspec.Struct, frozen=True):
    """Measurements of one completed request. Durations are in seconds; a negative one is unknown.

    ``prefill_on``, ``decode_on``: kinds of the workers (`worker_kind`). ``uncached_tokens`` of the prompt were computed
    in ``prefill_s``, from the arrival at the worker to token 1, with ``tokens_ahead`` prompt tokens waiting there
    before it and ``decoding_beside`` requests decoding there.
    ``link``: kind of the link (`link_kind`); empty without a hand-off of ``kv_bytes``, which took ``handoff_s`` from
    token 1 to the decode step that the request joined, without waiting for room.
    ``decoding``: requests that decoded on the worker, this one included; ``itl_s``: its mean time per token.
    ``fetch_link``: kind of the link over which ``fetch_bytes`` of its beginning came from another worker's cache in
    ``fetch_s``, which is no part of ``prefill_s``; empty without.
    ``outputs_share``: its outputs as a share of the most that it wanted. ``prompt_tokens``: all tokens of its prompt;
    0: those that were computed.
    """

    prefill_on: str
    uncached_tokens: int
    tokens_ahead: int
    decoding_beside: int
    prefill_s: float
    decode_on: str = ""
    link: str = ""
    kv_bytes: int = 0
    handoff_s: float = -1.0
    decoding: float = 1.0
    itl_s: float = -1.0
    outputs_share: float = 1.0
    prompt_tokens: int = 0
    fetch_link: str = ""
    fetch_bytes: int = 0
    fetch_s: float = -1.0

    @property
    def uncached_share(self) -> float:
        """Share of the prompt that was computed."""
        return min(1.0, self.uncached_tokens / self.prompt_tokens) if self.prompt_tokens else 1.0


class Costs(msgspec.Struct, frozen=True):
    """What the deployment's completed ``requests`` have taught. A prediction is None before there are `MIN_SAMPLES`.

    ``uncached``, ``least_uncached``: mean and least share of prompts that was not cached, lately.
    ``outputs_share``: mean share of ``max_tokens`` that requests generate. ``decoding``: requests that decode on one
    worker at a time, as the requests meet them. ``since_explored``: requests of mode ``auto`` that have been placed
    since the last one that was to measure what is not known.
    """

    prefill: Mapping[str, Line] = {}
    handoff: Mapping[str, Line] = {}
    decode: Mapping[str, Line] = {}
    requests: int = 0
    uncached: float = 1.0
    least_uncached: float = 1.0
    outputs_share: float = 1.0
    decoding: float = 1.0
    since_explored: int = 0
    fetch: Mapping[str, Line] = {}

    def fetch_s(self, link: str, kv_bytes: int) -> Estimate | None:
        """To get KV from the cache of another worker. Until it is measured, as long as a hand-off of so many bytes."""
        line = self.fetch.get(link) or self.handoff.get(link)
        return line.at(1.0, kv_bytes) if line else None

    def describe(self) -> list[str]:
        """The lines in words, for operators."""
        said = [
            f"prefill on a {kind} worker: {_ms(line.coefficients[1])}/token + {_ms(line.coefficients[0])}, and "
            f"{_ms(line.coefficients[2])} per token that waits before it ({_from(line)})"
            for kind, line in sorted(self.prefill.items())
        ]
        said += [
            f"{what} {link}: {_ms(line.coefficients[0])} + {_ms(line.coefficients[1] * 1e6)}/MB ({_from(line)})"
            for what, lines in (("hand-off", self.handoff), ("prefix fetch", self.fetch))
            for link, line in sorted(lines.items())
        ]
        said += [
            f"decode on a {kind} worker: {_ms(line.seconds(1.0, 1.0))}/token alone, "
            f"{_ms(line.seconds(1.0, 8.0))}/token at 8 running ({_from(line)})"
            for kind, line in sorted(self.decode.items())
        ]
        return said


NOTHING_KNOWN = Costs()


def worker_kind(role: str, device: str) -> str:
    """Workers of one kind are predicted to be equally fast: ``decode cpu``. All GPUs are one kind of device."""
    return f"{role} {device.partition(':')[0]}"


def link_kind(node: str, other: str) -> str:
    """Links of one kind are predicted to be equally fast."""
    return "within a host" if node == other else "between hosts"


class CostModel:
    """Learns from completed requests. Its memory is bounded, and equal measurements in equal order give equal lines."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, _Samples]] = {"prefill": {}, "handoff": {}, "fetch": {}, "decode": {}}
        self._requests = 0
        self._latest: deque[Served] = deque(maxlen=LATEST)
        self._costs = NOTHING_KNOWN

    def note(self, served: Served) -> None:
        """Take in the measurements of a completed request."""
        self._requests += 1
        self._latest.append(served)
        tokens, moved, fetched, decoding = served.uncached_tokens, served.kv_bytes, served.fetch_bytes, served.decoding
        beside = served.tokens_ahead, served.decoding_beside
        for quantity, kind, size, features, seconds in (
            ("prefill", served.prefill_on if tokens > 0 else "", tokens, (tokens, *beside), served.prefill_s),
            ("handoff", served.link, moved, (moved,), served.handoff_s),
            ("fetch", served.fetch_link, fetched, (fetched,), served.fetch_s),
            ("decode", served.decode_on, decoding, (decoding,), served.itl_s),
        ):
            if kind and seconds >= 0:
                _of(self._samples[quantity], kind).add(size, (1.0, *features), seconds)

    @property
    def handoffs(self) -> int:
        """Measured hand-offs."""
        return sum(samples.count for samples in self._samples["handoff"].values())

    @property
    def costs(self) -> Costs:
        """The lines of the last `refit`."""
        return self._costs

    def placed(self, explores: bool) -> None:
        """Note that a request of mode ``auto`` was placed, and whether that was an exploration."""
        since = 0 if explores else self._costs.since_explored + 1
        self._costs = msgspec.structs.replace(self._costs, since_explored=since)

    def refit(self) -> Costs:
        """Fit the lines again if there are new measurements. It takes milliseconds: call it about once a second."""
        if self._requests != self._costs.requests:
            lines = {
                # A prompt that waits before another delays it by about its own time, until this is measured.
                quantity: {kind: line for kind, s in samples.items() if (line := s.line(like={2: 1})) is not None}
                for quantity, samples in self._samples.items()
            }
            latest = self._latest
            self._costs = Costs(
                **lines,
                requests=self._requests,
                uncached=statistics.fmean([served.uncached_share for served in latest]),
                least_uncached=min([served.uncached_share for served in latest]),
                outputs_share=statistics.fmean([served.outputs_share for served in latest]),
                decoding=statistics.fmean([served.decoding for served in latest]),
                since_explored=self._costs.since_explored,
            )
        return self._costs


# --- fitting ---------------------------------------------------------------------------------------------------------


class _Samples:
    """The latest measurements of each size. Many of one size do not displace the few of another, without which a line
    has no slope."""

    def __init__(self) -> None:
        self.count = 0
        self._by_size: dict[int, deque[tuple[tuple[float, ...], float]]] = {}
        self._line: Line | None = None

    def add(self, size: float, features: tuple[float, ...], seconds: float) -> None:
        self.count += 1
        latest = self._by_size.setdefault(int(size).bit_length(), deque(maxlen=PER_SIZE))
        latest.append((features, max(seconds, _MIN_SECONDS)))

    def line(self, like: Mapping[int, int]) -> Line | None:
        """The fitted line; None with too few measurements."""
        if self.count < MIN_SAMPLES:
            return None
        if self._line is None or self._line.samples != self.count:
            rows = [row for latest in self._by_size.values() for row in latest]
            self._line = fit(rows, like, self.count)
        return self._line


def _of(lines: dict[str, _Samples], key: str) -> _Samples:
    samples = lines.pop(key, None) or _Samples()
    lines[key] = samples  # the last one is the one measured last
    if len(lines) > MAX_LINES:
        del lines[next(iter(lines))]
    return samples


def fit(rows: Sequence[tuple[tuple[float, ...], float]], like: Mapping[int, int], samples: int) -> Line:
    """Fit durations to features (the first of which is 1) by least squares of the relative errors, with coefficients
    that are not negative. Measurements far off the line lose their weight, as those of a process that stood still.

    A feature that hardly ever was above zero has no coefficient of its own: it gets that of the feature which ``like``
    names for it, with a margin as large; without one, 0.
    """
    width = len(rows[0][0])
    columns = [list(column) for column in zip(*[features for features, _ in rows], strict=True)]
    scales = [max(column) for column in columns]
    seen = [j for j in range(width) if sum([x > 0 for x in columns[j]]) * 2 >= MIN_SAMPLES]
    xs = [[x / scales[j] for x in columns[j]] for j in seen]
    ys = [seconds for _, seconds in rows]
    typical = statistics.median(ys)
    fitted = [max(y, typical / 8) for y in ys]
    weights = [1.0] * len(rows)
    beta, inverse = [0.0] * len(seen), _zeros(len(seen))
    spread = 0.0
    for _ in range(_ROUNDS):
        before = beta
        beta, inverse = _non_negative(xs, ys, [w / (f * f) for w, f in zip(weights, fitted, strict=True)])
        predicted = [0.0] * len(rows)
        for b, column in zip(beta, xs, strict=True):
            predicted = [p + b * x for p, x in zip(predicted, column, strict=True)]
        fitted = [max(p, typical / 64) for p in predicted]
        errors = [(y - p) / f for y, p, f in zip(ys, predicted, fitted, strict=True)]
        usual = max(1.4826 * statistics.median([abs(e) for e in errors]), 1e-3)
        weights = [_weight(abs(e) / usual) for e in errors]
        spread = sum([w * e * e for w, e in zip(weights, errors, strict=True)]) / max(1.0, sum(weights) - len(seen))
        if all(abs(b - was) <= 1e-3 * b for b, was in zip(beta, before, strict=True)):
            break
    coefficients = [0.0] * width
    covariance = _zeros(width)
    for a, j in enumerate(seen):
        coefficients[j] = beta[a] / scales[j]
        for b, k in enumerate(seen):
            covariance[j][k] = spread * inverse[a][b] / (scales[j] * scales[k])
    for j, other in like.items():
        if j < width and j not in seen:
            coefficients[j] = coefficients[other]
            covariance[j][j] = (coefficients[other] / INTERVAL) ** 2
    return Line(tuple(coefficients), tuple([tuple(row) for row in covariance]), samples)


def _weight(error: float) -> float:
    """Of a measurement so many usual errors off: Huber's weight, and none beyond 8."""
    return 1.0 if error <= 2 else 2 / error if error <= 8 else 0.0


def _non_negative(
    xs: Sequence[Sequence[float]], ys: Sequence[float], weights: Sequence[float]
) -> tuple[list[float], list[list[float]]]:
    """Weighted least squares over columns of features: coefficients, none negative, and the inverse of the normal
    matrix. Features are dropped as long as a coefficient is negative, the most negative first."""
    width = len(xs)
    weighted = [list(map(mul, weights, column)) for column in xs]
    normal = [[sum(map(mul, weighted[j], xs[k])) for k in range(width)] for j in range(width)]
    right = [sum(map(mul, column, ys)) for column in weighted]
    active = list(range(width))
    while True:
        inverse = _inverse([[normal[j][k] for k in active] for j in active])
        beta = [sum([inverse[a][b] * right[k] for b, k in enumerate(active)]) for a in range(len(active))]
        lowest = min(range(len(active)), key=lambda a: beta[a])
        if beta[lowest] >= 0 or len(active) == 1:
            break
        del active[lowest]
    coefficients, full = [0.0] * width, _zeros(width)
    for a, j in enumerate(active):
        coefficients[j] = max(0.0, beta[a])
        for b, k in enumerate(active):
            full[j][k] = inverse[a][b]
    return coefficients, full


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """The inverse of a symmetric positive matrix. A tiny part of the diagonal is added, so that features which never
    varied independently of each other share their effect, and predict others with wide margins."""
    size = len(matrix)
    rows = [
        [matrix[j][k] + (1e-7 * matrix[j][j] + 1e-300 if j == k else 0.0) for k in range(size)]
        + [float(j == k) for k in range(size)]
        for j in range(size)
    ]
    for j in range(size):
        pivot = max(range(j, size), key=lambda i: abs(rows[i][j]))
        rows[j], rows[pivot] = rows[pivot], rows[j]
        head = rows[j][j]
        rows[j] = [value / head for value in rows[j]]
        for i in range(size):
            if i != j and rows[i][j]:
                factor = rows[i][j]
                rows[i] = [value - factor * own for value, own in zip(rows[i], rows[j], strict=True)]
    return [row[size:] for row in rows]


def _zeros(size: int) -> list[list[float]]:
    return [[0.0] * size for _ in range(size)]


# --- words -----------------------------------------------------------------------------------------------------------


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _from(line: Line) -> str:
    return f"from {counted(line.samples, 'request')}"
