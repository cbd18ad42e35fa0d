"""Prompts of random tokens: distributions of lengths (fixed, uniform, truncated lognormal), shared prefixes, several
turns, and the shapes of published traces."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Protocol, Self

from experiments.workloads.conversation import Conversation, Room, Turn, Workload, random_tokens
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


SHARED_SALT = "shared"


@dataclass(frozen=True, slots=True)
class Synthetic(Workload):
    """Conversations of ``turns`` turns, each with ``inputs`` new tokens and ``outputs`` generated ones, drawn
    independently, and ``pause_s`` between an answer and the next turn.

    With ``prefix_len`` each conversation begins with one of ``num_prefixes`` prefixes of that length, drawn at random;
    all conversations then share one salt, so that a prefix cache can hold the prefixes."""

    inputs: Lengths
    outputs: Lengths
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1
    pause_s: float = 0.0
    name: str = "random"

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first option that is out of range."""
        for option, value, least in (
            ("prefix_len", self.prefix_len, 0),
            ("num_prefixes", self.num_prefixes, 1),
            ("turns", self.turns, 1),
        ):
            if value < least:
                raise InvalidRequest(f"{option}: {value} is below {least}")
        for option, lengths in (("input_len", self.inputs), ("output_len", self.outputs)):
            if isinstance(lengths, Lognormal):
                lengths.validate(option)

    @property
    def most_turns(self) -> int:
        return self.turns

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        prefixes: dict[int, tuple[int, ...]] = {}
        for index in range(count):
            rng = random.Random(f"lengths/{seed}/{index}")
            turns = []
            for turn in range(self.turns):
                tokens = random_tokens(f"tokens/{seed}/{index}/{turn}", self.inputs.draw(rng), vocab_size)
                pause_s = self.pause_s if turn else 0.0
                turns.append(Turn(tokens, self.outputs.draw(rng), pause_s))
            if not self.prefix_len:
                yield Conversation(tuple(turns))
                continue
            which = rng.randrange(self.num_prefixes)
            if which not in prefixes:
                prefixes[which] = random_tokens(f"prefix/{seed}/{which}", self.prefix_len, vocab_size)
            turns[0] = replace(turns[0], token_ids=prefixes[which] + turns[0].token_ids)
            yield Conversation(tuple(turns), SHARED_SALT)

    def within(self, room: Room) -> Self:
        share = max(1, (room.tokens - self.prefix_len) // self.turns)  # of each turn; its output gets half at most
        outputs = self.outputs
        if isinstance(outputs, Lognormal):
            outputs = outputs.limited(min(share // 2, outputs.percentile(0.999)), "output_len")
        inputs = self.inputs
        if isinstance(inputs, Lognormal):
            inputs = inputs.limited(max(1, share - outputs.longest), "input_len")
        before_last = (self.turns - 1) * (inputs.longest + outputs.longest)
        room.check(self.prefix_len + before_last + inputs.longest, outputs.longest)
        return replace(self, inputs=inputs, outputs=outputs)

    def describe(self) -> str:
        parts = [f"{self.name}: input {self.inputs.describe()}; output {self.outputs.describe()}"]
        if self.prefix_len:
            parts.append(f"{self.num_prefixes} shared prefixes of {self.prefix_len} tokens")
        if self.turns > 1:
            parts.append(f"{self.turns} turns, {self.pause_s:g} s between them")
        return "; ".join(parts)


_PUBLISHED = {
    "azure-code": (7.00, 1.36, 2.79, 0.85),
    "azure-conv": (6.63, 0.99, 5.02, 0.86),
    "mooncake-conv": (8.74, 1.20, 5.34, 1.36),
    "sharegpt-like": (7.46, 0.93, 6.03, 0.54),
    "arxiv-summarization": (8.86, 0.48, 5.34, 0.45),
}
"""Mean and sigma of the logarithms of input and output lengths. azure-code, azure-conv: fits of the Azure LLM inference
traces of 2023. mooncake-conv: Mooncake's conversation trace. sharegpt-like, arxiv-summarization: the two data sets of
the Sarathi-Serve paper (openchat_sharegpt4, arxiv_summarization)."""

PUBLISHED_SHAPES = tuple(_PUBLISHED)
"""Names that `published` takes."""


def published(name: str, input_scale: float = 1.0, output_scale: float = 1.0) -> Synthetic:
    """Random tokens with the input and output lengths of a published trace, drawn independently. The scales multiply
    the lengths, for services whose context is smaller; `Synthetic.describe` states them."""
    input_mean, input_sigma, output_mean, output_sigma = _PUBLISHED[name]
    inputs = Lognormal(input_mean, input_sigma, scale=input_scale)
    outputs = Lognormal(output_mean, output_sigma, scale=output_scale)
    for lengths in (inputs, outputs):
        lengths.validate("scale")
    return Synthetic(inputs, outputs, name=name)
