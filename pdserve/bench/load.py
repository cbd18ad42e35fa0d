"""Sends a load at the service and keeps what came of each request."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest, PdserveError
from core.request import Mode
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation

BOTH = "both"


@dataclass(frozen=True, slots=True)
class Load:
    """``requests`` of random tokens, either ``concurrency`` at a time or at ``rate`` a second (Poisson arrivals).
    ``mode`` is auto, pd, colocated, or both: then each prompt is sent in either mode, one after the other. Each request
    has a salt of its own, so that none finds KV in a prefix cache: not of its pair, nor of an earlier run."""

    requests: int
    input_len: int
    output_len: int
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0
    mode: str = Mode.AUTO
    timeout_s: float | None = None

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first option that is out of range."""
        for name in ("requests", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name}: {getattr(self, name)} is below 1")
        if (self.concurrency is None) == (self.rate is None):
            raise InvalidRequest("concurrency: give either --concurrency or --rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidRequest(f"concurrency: {self.concurrency} is below 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InvalidRequest(f"rate: {self.rate} is not a positive number of requests per second")
        if self.mode not in (*Mode, BOTH):
            raise InvalidRequest(f"mode: {self.mode!r} is none of {', '.join((*Mode, BOTH))}")

    def mode_of(self, index: int) -> Mode:
        """The mode of request ``index``; pairs alternate which mode goes first."""
        if self.mode != BOTH:
            return Mode(self.mode)
        return (Mode.PD, Mode.COLOCATED)[(index + index // 2) % 2]

    def prompt_of(self, index: int) -> int:
        """Which prompt request ``index`` has: its own, or with ``both`` one for two."""
        return index // 2 if self.mode == BOTH else index


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of request ``index``: its generation or its error."""

    index: int
    prompt: int
    mode: Mode
    generation: Generation | None
    error: PdserveError | None = None


def token_ids(seed: int, index: int, length: int, vocab_size: int) -> list[int]:
    """A prompt of random tokens that depends on ``seed`` and ``index`` alone."""
    draw = random.Random(f"{seed}/{index}")
    return [draw.randrange(vocab_size) for _ in range(length)]


def arrivals(rate: float, count: int, seed: int) -> Iterator[float]:
    """Seconds from the start at which ``count`` requests leave: a Poisson process, the first at once."""
    draw = random.Random(f"arrivals/{seed}")
    at_s = 0.0
    for _ in range(count):
        yield at_s
        at_s += draw.expovariate(rate)


async def run_load(
    client: AsyncClient, load: Load, vocab_size: int, on_done: Callable[[Outcome], None]
) -> tuple[list[Outcome], float]:
    """Send ``load``; returns the outcomes in order and the seconds from first to last. A failed request is an outcome,
    not an exception."""
    load.validate()
    await client.connect()
    prompts = {
        prompt: token_ids(load.seed, prompt, load.input_len, vocab_size)
        for prompt in {load.prompt_of(index) for index in range(load.requests)}
    }

    async def one(index: int) -> Outcome:
        prompt, mode = load.prompt_of(index), load.mode_of(index)
        stream = client.generate(
            prompts[prompt],
            max_tokens=load.output_len,
            ignore_eos=True,
            mode=mode,
            timeout_s=load.timeout_s,
            salt=secrets.token_hex(8),
        )
        try:
            outcome = Outcome(index, prompt, mode, await stream.result())
        except PdserveError as error:
            outcome = Outcome(index, prompt, mode, None, error)
        on_done(outcome)
        return outcome

    started_s = time.monotonic()
    if load.rate is not None:
        outcomes = await _at_rate(load, one, started_s)
    else:
        outcomes = await _at_concurrency(load, one)
    return sorted(outcomes, key=lambda outcome: outcome.index), time.monotonic() - started_s


async def _at_rate(load: Load, one: Callable[[int], Coroutine[Any, Any, Outcome]], started_s: float) -> list[Outcome]:
    assert load.rate is not None
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, at_s in enumerate(arrivals(load.rate, load.requests, load.seed)):
            await asyncio.sleep(max(0.0, started_s + at_s - time.monotonic()))
            tasks.append(group.create_task(one(index)))
    return [task.result() for task in tasks]


async def _at_concurrency(load: Load, one: Callable[[int], Coroutine[Any, Any, Outcome]]) -> list[Outcome]:
    assert load.concurrency is not None
    indices = itertools.count()

    async def sender() -> list[Outcome]:
        done = []
        while (index := next(indices)) < load.requests:
            done.append(await one(index))
        return done

    senders = min(load.concurrency, load.requests)
    return list(itertools.chain.from_iterable(await asyncio.gather(*(sender() for _ in range(senders)))))
