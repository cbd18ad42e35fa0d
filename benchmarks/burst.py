"""What a burst of streams gets: 3,000 at once, with a queue for fewer and for more of them, and what the same streams
get from a bare gRPC server that refuses all. Part of `python -m benchmarks.abuse`."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import psutil

from benchmarks.bare_grpc import bare_server
from benchmarks.frame import quantile, service
from pdserve import AsyncClient
from pdserve.core.errors import CapacityExceeded, PdserveError

PROMPT = "def read_lines(path):\n    with open(path) as file:\n"
CONNECTIONS = 8


class Burst(NamedTuple):
    """``streams`` at once, to services with these ``max_queues``; the memory is looked at ``settle_s`` later."""

    streams: int
    max_queues: tuple[int, ...]
    settle_s: float


BURST = Burst(3_000, (50, 1024, 6_000), 30.0)
QUICK_BURST = Burst(200, (1,), 0.5)


def bursts(burst: Burst) -> dict[str, Any]:
    """The figures by ``max_queue``, and those of the bare server as ``floor``."""
    result: dict[str, Any] = {}
    for max_queue in burst.max_queues:
        with service({"router.max_queue": max_queue}) as served:
            result[str(max_queue)] = asyncio.run(_burst(served.target, served.gateway, burst))
    with bare_server("refuse") as (target, pid):
        result["floor"] = asyncio.run(_burst(target, psutil.Process(pid), burst))
    return result


async def _burst(target: str, server: psutil.Process, burst: Burst) -> dict[str, Any]:
    refused_ms: list[float] = []
    errors: list[str] = []
    answered = 0
    clients = [AsyncClient(target) for _ in range(CONNECTIONS)]
    for client in clients:  # all connections exist, and the gateway has its buffers
        first = (client.generate(PROMPT, max_tokens=2).result() for _ in range(16))
        await asyncio.gather(*first, return_exceptions=True)
    before = server.memory_info().rss

    async def one(index: int) -> None:
        nonlocal answered
        started_s = time.monotonic()
        try:
            await clients[index % CONNECTIONS].generate(PROMPT, max_tokens=8, timeout_s=300).result()
            answered += 1
        except CapacityExceeded as error:
            if error.retry_after_s is None:
                errors.append(str(error))
            else:
                refused_ms.append((time.monotonic() - started_s) * 1e3)
        except PdserveError as error:
            errors.append(f"{type(error).__name__}: {error}")

    tasks = []
    for index in range(burst.streams):
        tasks.append(asyncio.create_task(one(index)))
        if index % 8 == 7:
            await asyncio.sleep(0)  # keeps the creation of tasks out of the measurement
    await asyncio.gather(*tasks)
    for client in clients:
        await client.close()
    await asyncio.sleep(burst.settle_s)
    after = server.memory_info().rss
    return {
        "answered": answered,
        "refused": len(refused_ms),
        "other": len(errors),
        "refused_p50_ms": quantile(refused_ms, 0.5),
        "refused_p99_ms": quantile(refused_ms, 0.99),
        "memory_before_mb": before / 2**20,
        "memory_after_mb": after / 2**20,
        "memory_growth": after / before - 1,
        "errors": sorted(set(errors))[:5],
    }
