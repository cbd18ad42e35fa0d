"""Several gateways over the same workers: `python -m experiments.benchmarks.gateways`.

One gateway, then two, with stub workers (`experiments.benchmarks.stub_workers`) and clients that keep streams open on all gateways
at once. Gateways, workers and clients share this machine's cores, so the wall clock says little. What is measured is
the CPU time of the gateways per request: a gateway is one process with one thread at work, so N gateways with a core
each bear N divided by that per second. The ratio of two to one is 2 if a second gateway costs the first nothing.

Then one of two gateways is killed while clients that know both read streams: the time until each of its streams has its
next token, at another gateway."""

from __future__ import annotations

import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from experiments.benchmarks.frame import Quick, in_turns, run
from experiments.benchmarks.front_door import PROMPT, SHAPES, STEP_MS, gateways
from pdserve import AsyncClient, AsyncStream

WORKERS = 4
STREAMS = 16
"""Streams that are open on each gateway. Fewer would cost more each, because a gateway gets the tokens of all its
requests of a step in one message."""
KILLED_STREAMS = 32
SLOW_STEP_MS = 10.0


class Sizes(NamedTuple):
    """``rounds`` windows of each kind, after ``warm_up`` others; ``tokens`` of each stream whose gateway is killed."""

    rounds: int = 3
    window_s: float = 4.0
    warm_up: int = 1
    tokens: int = 1000


QUICK = Sizes(1, 0.3, warm_up=0, tokens=400)


def measure(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    sizes = QUICK if quick else Sizes()
    one_us, two_us = _costs_us(1, sizes), _costs_us(2, sizes)
    gaps_s = asyncio.run(_killed(sizes.tokens))
    return {
        **{
            name: {
                "us_per_request_1": one_us[name],
                "us_per_request_2": two_us[name],
                "x": 2 * one_us[name] / two_us[name],
            }
            for name in SHAPES
        },
        "resumed": len(gaps_s),
        "resume_p50_s": statistics.median(gaps_s),
        "resume_max_s": max(gaps_s),
    }


def _costs_us(count: int, sizes: Sizes) -> dict[str, float]:
    """CPU microseconds per request, over all gateways, by shape."""
    found: dict[str, list[float]] = {name: [] for name in SHAPES}
    with gateways(count, WORKERS, STEP_MS) as servers, ThreadPoolExecutor(count) as threads:
        for number, name in in_turns(SHAPES, sizes.rounds, sizes.warm_up):
            loads = [threads.submit(server.load, SHAPES[name], STREAMS, sizes.window_s) for server in servers]
            windows = [load.result() for load in loads]
            if number >= 0:
                cpu_s = sum(window.cpu_s for window in windows)
                found[name].append(1e6 * cpu_s / sum(window.finished for window in windows))
    return {name: statistics.median(costs) for name, costs in found.items()}


async def _killed(tokens: int) -> list[float]:
    """Seconds from a gateway's death to the next token of each of its streams, which have so many tokens."""
    with gateways(2, WORKERS, SLOW_STEP_MS) as servers:
        async with AsyncClient([server.target for server in servers]) as client:
            streams = [client.generate(PROMPT, max_tokens=tokens, ignore_eos=True) for _ in range(KILLED_STREAMS)]
            await asyncio.gather(*(_read(stream, 20) for stream in streams))
            hit = [stream for stream in streams if stream.target == servers[0].target]
            reading = [asyncio.create_task(stream.result()) for stream in streams]
            await asyncio.sleep(0.5)
            servers[0].processes[0].kill()
            killed_s = time.monotonic()
            generations = await asyncio.gather(*reading)
    gaps_s = []
    for stream, generation in zip(streams, generations, strict=True):
        if len(generation.token_ids) != tokens or generation.resumes != (stream in hit):
            raise SystemExit(f"a stream has {len(generation.token_ids)} tokens after {generation.resumes} resumes")
        if generation.resumes:
            gaps_s.append(min(t.arrived_s for t in generation.tokens if t.arrived_s > killed_s) - killed_s)
    return gaps_s


async def _read(stream: AsyncStream, count: int) -> None:
    for _ in range(count):
        await anext(stream)


if __name__ == "__main__":
    run(measure)
