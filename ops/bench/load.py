"""The benchmark load: sends requests, records the outcome of each, and counts leaked KV blocks."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady, PdserveError
from pdserve.core.request import Mode

BOTH = "both"


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """``requests`` of random tokens, either ``concurrency`` at a time or ``rate`` per second (Poisson arrivals).
    ``mode`` is auto, pd, colocated, or both, which sends each prompt in either mode, one after the other. Each request
    has its own salt, so that no prefix cache holds any of its KV."""

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
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise InvalidRequest(f"timeout: {self.timeout_s} is not a positive number of seconds")
        if self.mode not in (*Mode, BOTH):
            raise InvalidRequest(f"mode: {self.mode!r} is none of {', '.join((*Mode, BOTH))}")

    def check_fits(self, status: ServiceStatus) -> None:
        """Raise the error that every request would fail with: `InvalidRequest` or `CapacityExceeded` if a request does
        not fit the service, `NotReady` if no worker has registered."""
        if not status.vocab_size:
            raise NotReady("no worker has registered with the service; wait until `pdserve status` shows some")
        tokens = self.input_len + self.output_len
        if self.input_len >= status.context_length:
            raise InvalidRequest(
                f"input_len: {self.input_len} tokens leave no room in the service's context of "
                f"{status.context_length}; use at most {status.context_length - 1}"
            )
        if tokens > status.context_length:
            raise InvalidRequest(
                f"output_len: {self.output_len} after {self.input_len} tokens of input exceed the service's context of "
                f"{status.context_length}; use at most {status.context_length - self.input_len}"
            )
        if tokens > status.pool_tokens:
            raise CapacityExceeded(
                f"input_len and output_len: {self.input_len} + {self.output_len} tokens exceed the "
                f"{status.pool_tokens} that the KV pool of the service's smallest worker holds; use less, or raise "
                "engine.kv_memory_mb"
            )

    def mode_of(self, index: int) -> Mode:
        """The mode of request ``index``; pairs alternate which mode goes first."""
        if self.mode != BOTH:
            return Mode(self.mode)
        return (Mode.PD, Mode.COLOCATED)[(index + index // 2) % 2]

    def prompt_of(self, index: int) -> int:
        """The prompt of request ``index``: its own, or with ``both`` one for two requests."""
        return index // 2 if self.mode == BOTH else index


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of request ``index``: its generation or its error."""

    index: int
    prompt: int
    mode: Mode
    generation: Generation | None
    error: PdserveError | None = None


def token_ids(seed: int, index: int, length: int, vocab_size: int) -> list[int]:
    """A prompt of random tokens, determined by ``seed`` and ``index``."""
    draw = random.Random(f"{seed}/{index}")
    return [draw.randrange(vocab_size) for _ in range(length)]


def arrivals(rate: float, count: int, seed: int) -> Iterator[float]:
    """Start times of ``count`` requests, in seconds: a Poisson process that starts at 0."""
    draw = random.Random(f"arrivals/{seed}")
    at_s = 0.0
    for _ in range(count):
        yield at_s
        at_s += draw.expovariate(rate)


async def run_load(
    client: AsyncClient,
    load: BenchLoad,
    vocab_size: int,
    on_done: Callable[[Outcome], None],
    stop: asyncio.Event | None = None,
) -> tuple[list[Outcome], float]:
    """Send ``load``. Returns the outcomes in order, and the seconds from first to last. A failed request is an outcome,
    not an exception. Once ``stop`` is set, running requests are cancelled and the outcomes so far returned."""
    load.validate()
    await client.connect()
    prompts: dict[int, list[int]] = {}
    outcomes: list[Outcome] = []
    started_s = time.monotonic()

    async def one(index: int) -> None:
        prompt, mode = load.prompt_of(index), load.mode_of(index)
        try:
            stream = client.generate(
                prompts[prompt],
                max_tokens=load.output_len,
                ignore_eos=True,
                mode=mode,
                timeout_s=load.timeout_s,
                salt=secrets.token_hex(8),
            )
            outcome = Outcome(index, prompt, mode, await stream.result())
        except PdserveError as error:
            outcome = Outcome(index, prompt, mode, None, error)
        outcomes.append(outcome)
        on_done(outcome)

    async def send() -> None:
        nonlocal started_s
        for prompt in {load.prompt_of(index) for index in range(load.requests)}:
            prompts[prompt] = token_ids(load.seed, prompt, load.input_len, vocab_size)
            await asyncio.sleep(0)  # keeps a long load interruptible
        started_s = time.monotonic()
        if load.rate is not None:
            await _at_rate(load, one, started_s)
        else:
            await _at_concurrency(load, one)

    await _until(send(), stop or asyncio.Event())
    return sorted(outcomes, key=lambda outcome: outcome.index), time.monotonic() - started_s


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Run ``work`` until it ends or ``stop`` is set, which cancels it."""
    tasks = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = tasks[0].done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if ended:
        tasks[0].result()


async def _at_rate(load: BenchLoad, one: Callable[[int], Coroutine[Any, Any, None]], started_s: float) -> None:
    assert load.rate is not None
    async with asyncio.TaskGroup() as group:
        for index, at_s in enumerate(arrivals(load.rate, load.requests, load.seed)):
            await asyncio.sleep(max(0.0, started_s + at_s - time.monotonic()))
            group.create_task(one(index))


async def _at_concurrency(load: BenchLoad, one: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    assert load.concurrency is not None
    indices = itertools.count()

    async def sender() -> None:
        while (index := next(indices)) < load.requests:
            await one(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, load.requests)):
            group.create_task(sender())


async def settled(client: AsyncClient, timeout_s: float = 10.0) -> ServiceStatus:
    """The service's status once it is idle and every worker has reported since this call, or the last one after
    ``timeout_s``."""
    return await _poll(client, lambda status: True, timeout_s)


async def leaked_blocks(client: AsyncClient, before: ServiceStatus, timeout_s: float = 10.0) -> int:
    """KV blocks that were free at ``before`` and are not any more, after waiting up to ``timeout_s`` for them."""
    after = await _poll(client, lambda status: _missing(before, status) == 0, timeout_s)
    return _missing(before, after)


async def _poll(client: AsyncClient, good: Callable[[ServiceStatus], bool], timeout_s: float) -> ServiceStatus:
    started_s = time.monotonic()
    while True:
        status = await client.status()
        elapsed_s = time.monotonic() - started_s
        # Heartbeats from before this call may be outdated.
        fresh = all(worker.heartbeat_age_s < elapsed_s for worker in status.workers if worker.state == "ready")
        if (fresh and status.idle and good(status)) or elapsed_s >= timeout_s:
            return status
        await asyncio.sleep(0.1)


def _missing(before: ServiceStatus, after: ServiceStatus) -> int:
    free_before = {worker.worker_id: worker.free_blocks for worker in before.workers}
    return sum(
        max(0, free_before[worker.worker_id] - worker.free_blocks)
        for worker in after.workers
        if worker.worker_id in free_before
    )
