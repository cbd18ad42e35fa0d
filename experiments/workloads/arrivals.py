"""When conversations begin: after each other (closed loop), or at times of their own (open loop).

The times of an open loop are seconds since the start of the run, in order, beginning at 0 and without an end unless
stated otherwise. Equal seeds give equal times."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``concurrency`` conversations at a time: the next one begins when one ends. The load follows the service's speed,
    so that a slow service gets less of it."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InvalidRequest(f"concurrency: {self.concurrency} is below 1")


Schedule = ClosedLoop | Iterable[float]
"""A closed loop, or the times of an open one."""


def random_arrivals(rate: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """``rate`` arrivals per second. ``burstiness`` is the shape of the gamma distribution of the gaps: 1 is a Poisson
    process, less is burstier (coefficient of variation 1/√burstiness), more is more regular."""
    check_rate("rate", rate)
    check_burstiness(burstiness)
    return (at / rate for at in _unit_arrivals(seed, burstiness))


def ramp(first_rate: float, last_rate: float, duration_s: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """A rate that changes linearly from ``first_rate`` to ``last_rate`` within ``duration_s``; the times end there. One
    of the rates may be 0."""
    for rate in (first_rate, last_rate):
        if not 0 <= rate < math.inf:
            raise InvalidRequest(f"ramp: {rate:g} is not a number of requests per second from 0")
    if not first_rate + last_rate > 0:
        raise InvalidRequest("ramp: both rates are 0; give at least one above it")
    if not 0 < duration_s < math.inf:
        raise InvalidRequest(f"duration: {duration_s:g} is not a positive number of seconds")
    check_burstiness(burstiness)
    return _ramp(first_rate, last_rate, duration_s, seed, burstiness)


def _ramp(first_rate: float, last_rate: float, duration_s: float, seed: int, burstiness: float) -> Iterator[float]:
    """Arrivals of unit rate, moved in time by the inverse of the expected number ``first·t + slope·t²/2``."""
    slope = (last_rate - first_rate) / duration_s
    for expected in _unit_arrivals(seed, burstiness):
        under_root = first_rate**2 + 2 * slope * expected
        if under_root < 0:  # the rate reaches 0 before so many have arrived
            return
        root = math.sqrt(under_root)
        at_s = 2 * expected / (first_rate + root) if expected else 0.0
        if at_s >= duration_s:
            return
        yield at_s


def all_at_once() -> Iterator[float]:
    """All at 0."""
    return itertools.repeat(0.0)


def timed_arrivals(times_s: Sequence[float], speed: float = 1.0) -> Iterator[float]:
    """The times of a trace, divided by ``speed`` (2: twice as fast). They end with the trace."""
    if not 0 < speed < math.inf:
        raise InvalidRequest(f"speed: {speed:g} is not a positive number")
    return (at_s / speed for at_s in times_s)


def check_rate(option: str, rate: float) -> None:
    """`InvalidRequest` unless the rate is positive and finite."""
    if not 0 < rate < math.inf:
        raise InvalidRequest(f"{option}: {rate:g} is not a positive number of requests per second")


def check_burstiness(burstiness: float) -> None:
    """`InvalidRequest` unless the burstiness is positive and finite."""
    if not 0 < burstiness < math.inf:
        raise InvalidRequest(f"burstiness: {burstiness:g} is not a positive number (1 is a Poisson process)")


def _unit_arrivals(seed: int, burstiness: float) -> Iterator[float]:
    draw = random.Random(f"arrivals/{seed}")
    at = 0.0
    while True:
        yield at
        at += draw.gammavariate(burstiness, 1 / burstiness)
