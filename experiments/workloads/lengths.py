"""Distributions of lengths in tokens: fixed, uniform, and truncated lognormal."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Protocol

from pdserve.core.errors import InvalidRequest

_NORMAL = NormalDist()
MOST_CUT = 0.1
"""A lognormal distribution that lost more than this share of its draws to truncation no longer has its shape."""


class Lengths(Protocol):
    """A distribution of lengths."""

    @property
    def longest(self) -> int:
        """No draw is longer."""

    def draw(self, rng: random.Random) -> int:
        """A length of at least 1, from one number of ``rng``."""

    def describe(self) -> str:
        """The distribution in a few words."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always ``tokens``."""

    tokens: int

    @property
    def longest(self) -> int:
        return self.tokens

    def draw(self, rng: random.Random) -> int:
        return self.tokens

    def describe(self) -> str:
        return f"{self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Equally likely lengths from ``shortest`` to ``longest``, both included."""

    shortest: int
    longest: int

    def draw(self, rng: random.Random) -> int:
        return self.shortest + int(rng.random() * (self.longest - self.shortest + 1))

    def describe(self) -> str:
        return f"{self.shortest} to {self.longest} tokens, uniform"


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths whose natural logarithm is normal with ``mean`` and ``sigma``, multiplied by ``scale`` and rounded to
    at least 1. The distribution is truncated to ``shortest`` … ``longest`` tokens: what lies outside is left out, not
    moved to the limit."""

    mean: float
    sigma: float
    shortest: int = 1
    longest: int = 1 << 20
    scale: float = 1.0

    def validate(self, option: str) -> None:
        """Raise `InvalidRequest` naming ``option`` if the parameters make no distribution, or if less than a millionth
        of it lies within the limits."""
        if not (math.isfinite(self.mean) and 0 < self.sigma < math.inf and 0 < self.scale < math.inf):
            raise InvalidRequest(
                f"{option}: mean {self.mean:g}, sigma {self.sigma:g}, scale {self.scale:g} make no lognormal "
                "distribution; sigma and scale have to be positive"
            )
        if not 1 <= self.shortest <= self.longest or self._span()[1] - self._span()[0] < 1e-6:
            raise InvalidRequest(
                f"{option}: next to none of the lengths lie between {self.shortest} and {self.longest} tokens (the "
                f"median is {self.median:.0f}); change the limits or the scale"
            )

    @property
    def median(self) -> float:
        """The median before truncation, in tokens."""
        return math.exp(self.mean) * self.scale

    @property
    def share_cut(self) -> float:
        """The share of the distribution that lies outside the limits."""
        low, high = self._span()
        return 1.0 - (high - low)

    def percentile(self, share: float) -> int:
        """The length that ``share`` (0 to 1) of the lengths do not exceed, before truncation."""
        return math.ceil(math.exp(self.mean + self.sigma * _NORMAL.inv_cdf(share)) * self.scale)

    def limited(self, longest: int, option: str) -> Lognormal:
        """This distribution truncated to at most ``longest`` tokens. `InvalidRequest` with a scale that fits, if that
        leaves out more than `MOST_CUT` of it."""
        limited = replace(self, longest=min(self.longest, longest))
        if limited.share_cut > max(MOST_CUT, self.share_cut):
            fits = self.scale * longest / self.percentile(1 - MOST_CUT / 2)
            raise InvalidRequest(
                f"{option}: {limited.share_cut:.0%} of the lengths ({self.describe()}) do not fit the {longest} tokens "
                f"that the service has room for; scale the {'inputs' if option == 'input_len' else 'outputs'} by "
                f"{math.floor(fits * 1e3) / 1e3:g} (--scale INPUT:OUTPUT)"
            )
        return limited

    def draw(self, rng: random.Random) -> int:
        low, high = self._span()
        normal = _NORMAL.inv_cdf(min(max(low + rng.random() * (high - low), 1e-12), 1 - 1e-12))
        return min(max(round(math.exp(self.mean + self.sigma * normal) * self.scale), self.shortest), self.longest)

    def describe(self) -> str:
        scaled = f" × {self.scale:g}" if self.scale != 1 else ""
        cut = f", {self.share_cut:.1%} outside {self.shortest} … {self.longest} left out"
        return f"lognormal({self.mean:g}, {self.sigma:g}){scaled} tokens{cut if self.share_cut >= 0.0005 else ''}"

    def _span(self) -> tuple[float, float]:
        """The distribution function at both limits."""

        def below(tokens: float) -> float:
            return _NORMAL.cdf((math.log(tokens / self.scale) - self.mean) / self.sigma)

        return below(self.shortest - 0.5) if self.shortest > 1 else 0.0, below(self.longest + 0.5)


def parse_lengths(option: str, text: str) -> Fixed | Uniform:
    """``128`` or the range ``128:1024``; `InvalidRequest` naming ``option`` otherwise."""
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        raise InvalidRequest(f"{option}: {text!r} is no number of tokens and no range; write 128 or 128:1024")
    if min(numbers) < 1:
        raise InvalidRequest(f"{option}: {min(numbers)} is below 1")
    if numbers[0] > numbers[-1]:
        raise InvalidRequest(f"{option}: the range {text!r} ends before it begins; write the smaller number first")
    return Fixed(numbers[0]) if numbers[0] == numbers[-1] else Uniform(*numbers)
