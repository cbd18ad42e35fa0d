"""What a burst of streams gets: 3,000 at once, with a queue for fewer and for more of them, and what the same streams
get from a bare gRPC server that refuses all. Part of `python -m benchmarks.abuse`."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.bare_server import started
from ops.launch.detach import start_detached, stop_detached
from ops.launch.state import ServiceState
from pdserve import AsyncClient
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import CapacityExceeded, PdserveError

REFUSING = "benchmarks.refusing_server"
PROMPT = "def read_lines(path):\n    with open(path) as file:\n"
CONNECTIONS = 8


class Burst(NamedTuple):
    """``streams`` at once, to services with these ``max_queues``; the memory is looked at ``settle_s`` later."""

    streams: int
    max_queues: tuple[int, ...]
    settle_s: float


BURST = Burst(3_000, (50, 1024, 6_000), 30.0)
QUICK_BURST = Burst(200, (1,), 0.5)


def bursts(console: Console, burst: Burst) -> dict[str, Any]:
    """Measure, and print a table."""
    columns = ("answered", "refused", "other", "refused p50, ms", "p99, ms", "memory, MB")
    table = Table(f"{burst.streams} streams, max_queue", *columns, f"{burst.settle_s:g} s after", "growth")
    result: dict[str, Any] = {}
    for max_queue in burst.max_queues:
        settings = PdserveConfig.load(None, {"model.path": "tiny", "gateway.port": 0, "router.max_queue": max_queue})
        port = start_detached(settings, lambda stage: None)
        try:
            figures = result[str(max_queue)] = asyncio.run(_burst(port, burst))
        finally:
            stop_detached(port)
        table.add_row(str(max_queue), *(str(figures[name]) for name in figures if name != "errors"))
    figures = result["floor"] = _floor(burst)
    table.add_row("floor: refuses all", *(str(figures[name]) for name in figures if name != "errors"))
    console.print(table)
    return result


async def _burst(port: int, burst: Burst) -> dict[str, Any]:
    clients = [AsyncClient(f"localhost:{port}") for _ in range(CONNECTIONS)]
    async with AsyncClient(ServiceState.read(port).operator) as operator:
        gateway = psutil.Process((await operator.status()).pid)
    for client in clients:  # all connections exist, and the gateway has its buffers
        await asyncio.gather(*(client.generate(PROMPT, max_tokens=2).result() for _ in range(16)))
    before = gateway.memory_info().rss
    figures = await _streams(clients, burst)
    errors = figures.pop("errors")
    await asyncio.sleep(burst.settle_s)
    after = gateway.memory_info().rss
    memory = {"memory_before_mb": round(before / 2**20, 1), "memory_after_mb": round(after / 2**20, 1)}
    return {**figures, **memory, "memory_growth": round(after / before - 1, 3), "errors": errors}


def _floor(burst: Burst) -> dict[str, Any]:
    """The same burst against a server that only refuses, on an otherwise idle machine."""
    with started(REFUSING) as (port, _):
        return asyncio.run(_refused_at_once(f"localhost:{port}", burst))


async def _refused_at_once(target: str, burst: Burst) -> dict[str, Any]:
    clients = [AsyncClient(target) for _ in range(CONNECTIONS)]
    for client in clients:
        with contextlib.suppress(CapacityExceeded):
            await client.generate(PROMPT, max_tokens=2).result()
    return await _streams(clients, burst)


async def _streams(clients: list[AsyncClient], burst: Burst) -> dict[str, Any]:
    """Open all streams at once, and close the clients when they have ended."""
    refused_ms: list[float] = []
    errors: list[str] = []
    answered = 0

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
    refused_ms.sort()
    return {
        "answered": answered,
        "refused": len(refused_ms),
        "other": len(errors),
        "refused_p50_ms": round(statistics.median(refused_ms), 1) if refused_ms else None,
        "refused_p99_ms": round(refused_ms[int(len(refused_ms) * 0.99)], 1) if refused_ms else None,
        "errors": sorted(set(errors))[:5],
    }
