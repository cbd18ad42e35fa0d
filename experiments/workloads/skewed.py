"""A trace in Mooncake's format in which many requests share few long beginnings, some of them far more than others."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from experiments.workloads.arrivals import check_rate, random_arrivals
from experiments.workloads.trace import TRACE_BLOCK_SIZE, Trace, TraceRequest
from pdserve.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SkewedPrefixes:
    """Prompts that begin with one of ``prefixes`` shared beginnings of ``prefix_blocks`` hash ids, followed by up to
    ``own_blocks`` hash ids of their own (at least one). The beginning number r (from 1) is drawn with a probability
    proportional to r^-``skew``: 0 draws all equally often. Outputs have ``output_len`` tokens of the trace's scale."""

    prefixes: int
    prefix_blocks: int
    own_blocks: int
    skew: float
    output_len: int

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first value that is out of range."""
        for name in ("prefixes", "prefix_blocks", "own_blocks", "output_len"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name}: {getattr(self, name)} is below 1")
        if not 0 <= self.skew < 10:
            raise InvalidRequest(f"skew: {self.skew:g} is not within 0 … 10")

    def trace(self, rate: float, duration_s: float, seed: int, block_size: int = TRACE_BLOCK_SIZE) -> Trace:
        """The requests of ``duration_s`` seconds, of which ``rate`` arrive per second (a Poisson process). Equal seeds
        give equal requests; another rate changes their times only, and how many there are."""
        self.validate()
        check_rate("rate", rate)
        draw = random.Random(f"skewed/{seed}")
        weights = [rank**-self.skew for rank in range(1, self.prefixes + 1)]
        own_ids = itertools.count(self.prefixes * self.prefix_blocks)
        requests = []
        for at_s in itertools.takewhile(lambda at_s: at_s < duration_s, random_arrivals(rate, seed)):
            (prefix,) = draw.choices(range(self.prefixes), weights)
            shared = range(prefix * self.prefix_blocks, (prefix + 1) * self.prefix_blocks)
            own = list(itertools.islice(own_ids, draw.randint(1, self.own_blocks)))
            hash_ids = (*shared, *own)
            requests.append(
                TraceRequest(round(1e3 * at_s, 3), len(hash_ids) * TRACE_BLOCK_SIZE, self.output_len, hash_ids)
            )
        return Trace(Path("skewed"), tuple(requests), tuple(range(1, len(requests) + 1)), block_size)
