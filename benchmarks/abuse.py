"""What one client's abuse costs others, and what a burst of streams gets: `python -m benchmarks.abuse`.

Abuse: four clients stream answers while a fifth, in a process of its own, sends prompts of 4 MiB, 12 million stop ids,
never reads, or resets thousands of streams. Windows without it, with the same abuse of another server beside (what the
load alone costs this machine), and with it alternate; the figure is the longest gap between two tokens of a window, as
a median over the windows. Burst: 3,000 streams at once, with a queue for fewer and for more of them, and what the same
streams get from a bare gRPC server that refuses all. Tables, then one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.abuse_client import KINDS
from ops.launch.detach import start_detached, stop_detached
from ops.launch.state import ServiceState
from pdserve import AsyncClient, Client
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import CapacityExceeded, PdserveError

INNOCENTS = 4
PROMPT = "def read_lines(path):\n    with open(path) as file:\n"
DRAWN: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 7}
STREAMS = 3_000
CONNECTIONS = 8
SETTLE_S = 30.0


def main(
    rounds: Annotated[int, typer.Option(min=1, help="windows of each kind")] = 5,
    window_s: Annotated[float, typer.Option(min=1.0, help="length of a window")] = 6.0,
) -> None:
    """Measure both."""
    console = Console()
    result = {"abuse": _abuse(console, rounds, window_s), "burst": _bursts(console)}
    print(json.dumps(result))  # noqa: T201 - the last line is for programs


# --- abuse -----------------------------------------------------------------------------------------------------------


def _abuse(console: Console, rounds: int, window_s: float) -> dict[str, Any]:
    tiny = {"model.path": "tiny", "model.dtype": "float32", "gateway.port": 0}
    settings = PdserveConfig.load(None, {**tiny, "router.max_unread_tokens": 64})
    port = start_detached(settings, lambda stage: None)
    target = f"localhost:{port}"
    columns = ("without, ms", "beside, ms", "with / without", "with / beside", "answers", "first attempt", "wrong")
    table = Table("abuse", "longest gap with it, ms", *columns)
    result: dict[str, Any] = {}
    try:
        with _refusing_server() as elsewhere, Client(target) as client:
            expected = client.generate(PROMPT, **DRAWN).result().token_ids
            for kind in KINDS:
                gaps_s: dict[str, list[float]] = {"with": [], "without": [], "beside": []}
                answers = []
                for _ in range(rounds):
                    for name, abused in (("without", None), ("beside", elsewhere), ("with", target)):
                        gap_s, found = _window_beside(abused, kind, target, window_s)
                        gaps_s[name].append(gap_s)
                        answers += found if name == "with" else []
                middle_s = {name: statistics.median(measured) for name, measured in gaps_s.items()}
                figures = result[kind] = {
                    "longest_gap_ms": round(middle_s["with"] * 1e3, 1),
                    "without_ms": round(middle_s["without"] * 1e3, 1),
                    "beside_ms": round(middle_s["beside"] * 1e3, 1),
                    "ratio": round(middle_s["with"] / middle_s["without"], 2),
                    "ratio_beside": round(middle_s["with"] / middle_s["beside"], 2),
                    "answers": len(answers),
                    "first_attempt": sum(attempts == 1 for _, attempts in answers),
                    "wrong": sum(tokens != expected for tokens, _ in answers),
                }
                table.add_row(kind, *(str(figure) for figure in figures.values()))
    finally:
        stop_detached(port)
    console.print(table)
    return result


def _window_beside(
    abused: str | None, kind: str, target: str, window_s: float
) -> tuple[float, list[tuple[tuple[int, ...], int]]]:
    """A window while a misbehaving client uses the server at ``abused`` (None: no such client)."""
    if abused is None:
        return asyncio.run(_window(target, window_s))
    abuser = subprocess.Popen([sys.executable, "-m", "benchmarks.abuse_client", kind, abused])
    try:
        return asyncio.run(_window(target, window_s))
    finally:
        abuser.terminate()
        abuser.wait(30)


async def _window(target: str, window_s: float) -> tuple[float, list[tuple[tuple[int, ...], int]]]:
    """The longest gap between tokens in a window, and each answer's tokens and attempts."""
    answers: list[tuple[tuple[int, ...], int]] = []
    longest_s = 0.0
    until_s = time.monotonic() + window_s

    async def innocent() -> None:
        nonlocal longest_s
        async with AsyncClient(target) as client:
            while time.monotonic() < until_s:
                stream = client.generate(PROMPT, **DRAWN)
                last_s = 0.0
                async for _ in stream:
                    now_s = time.monotonic()
                    if last_s:
                        longest_s = max(longest_s, now_s - last_s)
                    last_s = now_s
                result = await stream.result()
                answers.append((result.token_ids, result.attempts))

    await asyncio.gather(*(innocent() for _ in range(INNOCENTS)))
    return longest_s, answers


# --- bursts ----------------------------------------------------------------------------------------------------------


def _bursts(console: Console) -> dict[str, Any]:
    columns = ("answered", "refused", "other", "refused p50, ms", "p99, ms", "memory, MB", "30 s after", "growth")
    table = Table(f"{STREAMS} streams, max_queue", *columns)
    result: dict[str, Any] = {}
    for max_queue in (STREAMS // 60, 1024, 2 * STREAMS):
        settings = PdserveConfig.load(None, {"model.path": "tiny", "gateway.port": 0, "router.max_queue": max_queue})
        port = start_detached(settings, lambda stage: None)
        try:
            figures = result[str(max_queue)] = asyncio.run(_burst(port))
        finally:
            stop_detached(port)
        table.add_row(str(max_queue), *(str(figures[name]) for name in figures if name != "errors"))
    figures = result["floor"] = _floor()
    table.add_row("floor: refuses all", *(str(figures[name]) for name in figures if name != "errors"))
    console.print(table)
    return result


async def _burst(port: int) -> dict[str, Any]:
    clients = [AsyncClient(f"localhost:{port}") for _ in range(CONNECTIONS)]
    async with AsyncClient(ServiceState.read(port).operator) as operator:
        gateway = psutil.Process((await operator.status()).pid)
    for client in clients:  # all connections exist, and the gateway has its buffers
        await asyncio.gather(*(client.generate(PROMPT, max_tokens=2).result() for _ in range(16)))
    before = gateway.memory_info().rss
    figures = await _streams(clients)
    errors = figures.pop("errors")
    await asyncio.sleep(SETTLE_S)
    after = gateway.memory_info().rss
    memory = {"memory_before_mb": round(before / 2**20, 1), "memory_after_mb": round(after / 2**20, 1)}
    return {**figures, **memory, "memory_growth": round(after / before - 1, 3), "errors": errors}


def _floor() -> dict[str, Any]:
    """The same burst against a server that only refuses, on an otherwise idle machine."""
    with _refusing_server() as target:
        return asyncio.run(_refused_at_once(target))


@contextlib.contextmanager
def _refusing_server() -> Iterator[str]:
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.refusing_server"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"localhost:{int(server.stdout.readline())}"
    finally:
        server.terminate()
        server.wait(30)


async def _refused_at_once(target: str) -> dict[str, Any]:
    clients = [AsyncClient(target) for _ in range(CONNECTIONS)]
    for client in clients:
        with contextlib.suppress(CapacityExceeded):
            await client.generate(PROMPT, max_tokens=2).result()
    return await _streams(clients)


async def _streams(clients: list[AsyncClient]) -> dict[str, Any]:
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
    for index in range(STREAMS):
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


if __name__ == "__main__":
    typer.run(main)
