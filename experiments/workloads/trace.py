"""Traces in Mooncake's format: when requests arrived, their lengths, and which blocks of their prompts were equal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

import msgspec

from experiments.workloads.arrivals import random_arrivals
from experiments.workloads.conversation import Conversation, Room, Turn, Workload, random_tokens
from experiments.workloads.prompt_files import read_json_lines
from experiments.workloads.synthetic import SHARED_SALT
from pdserve.core.errors import InvalidRequest

TRACE_BLOCK_SIZE = 512
"""Tokens that one hash id of a trace stands for."""

_EXPECTED = '{"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [numbers]}'
_Count = Annotated[int, msgspec.Meta(ge=1)]


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a trace. ``timestamp`` is in milliseconds. Each of ``hash_ids`` stands for the next
    `TRACE_BLOCK_SIZE` tokens of the prompt (the last one for the rest): prompts with equal ids have equal tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace(Workload):
    """The requests of a trace file. A hash id becomes ``block_size`` tokens; with fewer than `TRACE_BLOCK_SIZE`, input
    and output lengths are scaled down by the same factor. All requests share one salt, so that prefix caches find the
    blocks that are equal. Requests with an equal first hash id are of one session."""

    path: Path
    requests: tuple[TraceRequest, ...]
    lines: tuple[int, ...]
    block_size: int = TRACE_BLOCK_SIZE

    @classmethod
    def read(cls, path: Path, block_size: int = TRACE_BLOCK_SIZE) -> Self:
        """Read a trace file with one JSON object per line. `InvalidRequest` names the line that is wrong."""
        if not 1 <= block_size <= TRACE_BLOCK_SIZE:
            raise InvalidRequest(
                f"block_size: {block_size} is not within 1 … {TRACE_BLOCK_SIZE} (tokens of a hash id in the trace)"
            )
        lines, requests = zip(*read_json_lines(path, TraceRequest, "requests", _EXPECTED), strict=True)
        earlier_ms = 0.0
        for number, request in zip(lines, requests, strict=True):
            blocks = -(-request.input_length // TRACE_BLOCK_SIZE)
            if len(request.hash_ids) != blocks:
                raise InvalidRequest(
                    f"{path}:{number}: {len(request.hash_ids)} hash_ids for an input_length of {request.input_length}, "
                    f"which is {blocks} blocks of {TRACE_BLOCK_SIZE} tokens; give one id per block"
                )
            if request.timestamp < earlier_ms:
                raise InvalidRequest(
                    f"{path}:{number}: the timestamp {request.timestamp:g} is earlier than the one before it, "
                    f"{earlier_ms:g}; sort the trace by timestamp"
                )
            earlier_ms = request.timestamp
        return cls(path, requests, lines, block_size)

    @property
    def times_s(self) -> list[float]:
        """The arrivals in seconds, the first one at 0."""
        return [(request.timestamp - self.requests[0].timestamp) / 1e3 for request in self.requests]

    @property
    def own_count(self) -> int | None:
        return len(self.requests)

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        """The first ``count`` requests, or all if there are fewer."""
        for request in self.requests[:count]:
            tokens: list[int] = []
            for hash_id in request.hash_ids:
                tokens += random_tokens(f"trace/{seed}/{hash_id}", self.block_size, vocab_size)
            input_len, output_len = self._lengths(request)
            yield Conversation((Turn(tuple(tokens[:input_len]), output_len),), SHARED_SALT, str(request.hash_ids[0]))

    def within(self, room: Room) -> Self:
        """Unchanged; the error names the line of the longest request, and a block size with which all fit."""
        lengths = [self._lengths(request) for request in self.requests]
        line, longest = max(zip(self.lines, lengths, strict=True), key=lambda each: sum(each[1]))
        fits = (self.block_size * room.tokens) // (sum(longest) + 2) if sum(longest) > room.tokens else 0
        remedy = f" (all fit with --block-size {fits}, which scales the trace down)" if fits else ""
        room.check(*longest, f"{self.path}:{line}{remedy}")
        return self

    def first(self, count: int) -> Self:
        """The trace's first ``count`` requests."""
        return replace(self, requests=self.requests[:count], lines=self.lines[:count])

    def describe(self) -> str:
        scaled = ""
        if self.block_size != TRACE_BLOCK_SIZE:
            factor = self.block_size / TRACE_BLOCK_SIZE
            scaled = f", {self.block_size} tokens per hash id: all lengths × {factor:g}"
        return f"trace {self.path.name}: {len(self.requests)} requests over {self.times_s[-1]:g} s{scaled}"

    def _lengths(self, request: TraceRequest) -> tuple[int, int]:
        """Of input and output, rounded up, so that a prompt keeps a token of its last block."""
        input_len, output_len = (
            -(-tokens * self.block_size // TRACE_BLOCK_SIZE) for tokens in (request.input_length, request.output_length)
        )
        return input_len, output_len


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
        draw = random.Random(f"skewed/{seed}")
        weights = [rank**-self.skew for rank in range(1, self.prefixes + 1)]
        own_ids = itertools.count(self.prefixes * self.prefix_blocks)
        requests = []
        for at_s in itertools.takewhile(lambda at_s: at_s < duration_s, random_arrivals(rate, seed)):
            (prefix,) = draw.choices(range(self.prefixes), weights)
            shared = range(prefix * self.prefix_blocks, (prefix + 1) * self.prefix_blocks)
            ids = (*shared, *itertools.islice(own_ids, draw.randint(1, self.own_blocks)))
            length = len(ids) * TRACE_BLOCK_SIZE
            requests.append(TraceRequest(round(1e3 * at_s, 3), length, self.output_len, ids))
        return Trace(Path("skewed"), tuple(requests), tuple(range(1, len(requests) + 1)), block_size)
