"""Goodput at twice the load that a service can bear: `python -m benchmarks.overload`.

A service with engines, one prefill and one decode worker of the model tiny, first at rising load: goodput is the number
of complete answers within their deadline per second, and its peak the best of the windows. Then requests arrive at
twice that rate for a minute, from eight clients of equal share, on a clock of their own that waits for no answer.
Reported: goodput beside the peak, how soon refusals come, what answered requests waited, the memory of the gateway, and
what is left afterwards. The process that makes the load is busy itself and sees refusals late, so a second one sends a
few requests per second and times their refusals too. Then requests are cancelled in every state, and the time is taken
until all blocks are free. Tables, then one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.quick import Quick
from benchmarks.request_states import State, dummy_model, held, is_free, settings, until
from ops.launch.detach import start_detached, stop_detached
from ops.launch.state import ServiceState
from ops.settled import leaked_blocks, settled
from pdserve import AsyncClient
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import CapacityExceeded, PdserveError

PROMPT_TOKENS = 64
SHARES = (0.9, 1.1, 1.4)
OVERLOAD = 2.0
CLIENTS = 8
PROBES_PER_S = 5.0
TARGET_MS = 50.0


class Sizes(NamedTuple):
    """Lengths of windows in seconds; ``outputs`` tokens per request, which are due within ``deadline_s``."""

    window_s: float
    overload_s: float
    warm_up_s: float = 15.0
    outputs: int = 32
    deadline_s: float = 10.0


QUICK = Sizes(window_s=1.0, overload_s=2.0, warm_up_s=1.0, outputs=4, deadline_s=60.0)


@dataclass
class Window:
    """What became of the requests that were sent in ``seconds``."""

    seconds: float
    begin_s: float = field(default_factory=time.monotonic)
    sent: int = 0
    answered: int = 0
    answered_within: int = 0
    refused_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        """Answers per second that were complete within the window: what waits at its end is no throughput."""
        return self.answered_within / self.seconds


def main(
    window_s: Annotated[float, typer.Option(min=2.0, help="length of a window that looks for the peak")] = 12.0,
    overload_s: Annotated[float, typer.Option(min=5.0, help="length of the overload")] = 60.0,
    cancels: Annotated[int, typer.Option(min=0, help="requests cancelled in each state")] = 15,
    model: Annotated[
        str, typer.Option(help="the model; tiny loads the control plane, dummy:135m the engines")
    ] = "tiny",
    max_queue: Annotated[int, typer.Option(min=1, help="router.max_queue")] = 32,
    seqs: Annotated[int, typer.Option(min=1, help="engine.max_num_seqs")] = 32,
    quick: Quick = False,
) -> None:
    """Measure."""
    console = Console(highlight=False)
    sizes = Sizes(window_s, overload_s)
    if quick:
        sizes, cancels, model, max_queue, seqs = QUICK, 1, "tiny", 1, 2
    result = _overload(console, sizes, model, max_queue, seqs)
    if cancels:
        result["cancel_to_free_ms"] = _cancels(console, cancels)
    print(json.dumps(result))  # noqa: T201 - the last line is for programs


# --- overload --------------------------------------------------------------------------------------------------------


def _overload(console: Console, sizes: Sizes, model: str, max_queue: int, seqs: int) -> dict[str, Any]:
    config = {"model.path": model, "model.dtype": "float32", "gateway.port": 0, "engine.max_num_seqs": seqs}
    port = start_detached(PdserveConfig.load(None, {**config, "router.max_queue": max_queue}))
    try:
        operator = ServiceState.read(port).operator
        figures, windows = asyncio.run(_measure(f"localhost:{port}", operator, sizes, seqs + seqs // 4))
    finally:
        stop_detached(port)
    table = Table("load", "sent/s", "goodput/s", "refused", "other errors", "first token p50, ms", "p99, ms", box=None)
    for name, window in windows.items():
        table.add_row(
            name,
            f"{window.sent / window.seconds:.1f}",
            f"{window.goodput:.1f}",
            str(len(window.refused_ms)),
            str(dict(window.errors) or ""),
            *("" if (ms := _quantile(window.first_ms, share)) is None else f"{ms:.0f}" for share in (0.5, 0.99)),
        )
    console.print(table)
    return figures


async def _measure(target: str, operator: str, sizes: Sizes, closed: int) -> tuple[dict[str, Any], dict[str, Window]]:
    async with AsyncClient(operator) as inside:
        gateway = psutil.Process((await inside.status()).pid)
    async with AsyncClient(target) as client:
        await _closed(client, sizes.warm_up_s, closed, sizes)
        before = await settled(client)
        windows = {f"closed loop of {closed}": await _closed(client, sizes.window_s, closed, sizes)}
        capacity = _capacity(windows[f"closed loop of {closed}"])
        for share in SHARES:
            windows[f"open loop, {share:g} of that"] = await _open([client], share * capacity, sizes.window_s, sizes)
            await settled(client)
        peak = max(window.goodput for window in windows.values())
        clients = [AsyncClient(target) for _ in range(CLIENTS)]
        memory = [gateway.memory_info().rss]
        sampling = asyncio.create_task(_sample(gateway, memory))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            rate = OVERLOAD * peak
            probe_rate = min(PROBES_PER_S, rate / 4)
            probing = asyncio.get_running_loop().run_in_executor(apart, _probe, target, probe_rate, sizes)
            overloaded = windows[f"open loop, {OVERLOAD:g} of the peak"] = await _open(
                clients, rate - probe_rate, sizes.overload_s, sizes
            )
            probed = await probing
        sampling.cancel()
        memory.append(gateway.memory_info().rss)
        for each in clients:
            await each.close()
        leaked = await leaked_blocks(client, before)
        after = await settled(client)
    quarter = max(1, len(memory) // 4)
    grown = statistics.mean(memory[-quarter:]) - statistics.mean(memory[quarter : 2 * quarter])
    return {
        "peak_goodput_per_s": round(peak, 2),
        "overload_sent_per_s": round((overloaded.sent + probed.sent) / sizes.overload_s, 2),
        "overload_goodput_per_s": round(overloaded.goodput + probed.goodput, 2),
        "goodput_ratio": round((overloaded.goodput + probed.goodput) / peak, 3),
        "answered": overloaded.answered + probed.answered,
        "refusals": {"by the load": _refusals(overloaded), "by the second process": _refusals(probed)},
        "other_errors": dict(overloaded.errors + probed.errors),
        "gateway_mb": {"begin": round(memory[0] / 2**20, 1), "end": round(memory[-1] / 2**20, 1)},
        "gateway_grown_mb": round(grown / 2**20, 2),
        "leaked_blocks": leaked,
        "left": {"queued": after.queued, "running": after.running},
    }, windows


def _capacity(window: Window) -> float:
    """Its goodput. SystemExit if nothing was answered, because the rates of the other windows are shares of it."""
    if not window.goodput:
        raise SystemExit(f"no request was answered within {window.seconds:g} s: give a longer --window-s")
    return window.goodput


def _probe(target: str, rate: float, sizes: Sizes) -> Window:
    """``rate`` requests per second, from a process that does nothing else."""

    async def ask() -> Window:
        async with AsyncClient(target) as client:
            return await _open([client], rate, sizes.overload_s, sizes)

    return asyncio.run(ask())


def _refusals(window: Window) -> dict[str, Any]:
    refused = window.refused_ms
    within = sum(ms <= TARGET_MS for ms in refused) / max(1, len(refused))
    quantiles = {f"p{100 * q:g}_ms": _quantile(refused, q) for q in (0.5, 0.9, 0.99, 1.0)}
    return {"count": len(refused), **quantiles, f"within_{TARGET_MS:g}_ms": round(within, 4)}


async def _sample(process: psutil.Process, memory: list[int]) -> None:
    while True:
        await asyncio.sleep(1.0)
        memory.append(process.memory_info().rss)


async def _request(client: AsyncClient, window: Window, sizes: Sizes) -> None:
    window.sent += 1
    prompt = [random.randrange(5, 1000) for _ in range(PROMPT_TOKENS)]
    begin_s = time.monotonic()
    stream = client.generate(prompt, max_tokens=sizes.outputs, ignore_eos=True, timeout_s=sizes.deadline_s)
    try:
        await anext(stream)
        first_ms = (time.monotonic() - begin_s) * 1e3
        await stream.result()
    except CapacityExceeded:
        window.refused_ms.append((time.monotonic() - begin_s) * 1e3)
    except PdserveError as error:
        window.errors[type(error).__name__] += 1
    else:
        window.answered += 1
        window.answered_within += time.monotonic() <= window.begin_s + window.seconds
        window.first_ms.append(first_ms)


async def _closed(client: AsyncClient, seconds: float, count: int, sizes: Sizes) -> Window:
    """So many requests at a time."""
    window = Window(seconds)

    async def ask() -> None:
        while time.monotonic() < window.begin_s + seconds:
            await _request(client, window, sizes)

    await asyncio.gather(*(ask() for _ in range(count)))
    return window


async def _open(clients: list[AsyncClient], rate: float, seconds: float, sizes: Sizes) -> Window:
    """So many requests per second, at random times."""
    window, draw = Window(seconds), random.Random(1)
    asking: set[asyncio.Task[None]] = set()
    at_s = window.begin_s
    for number in range(10**9):
        at_s += draw.expovariate(rate)
        if at_s > window.begin_s + seconds:
            break
        await asyncio.sleep(max(0.0, at_s - time.monotonic()))
        task = asyncio.create_task(_request(clients[number % len(clients)], window, sizes))
        asking.add(task)
        task.add_done_callback(asking.discard)
    await asyncio.gather(*asking)
    return window


def _quantile(values: list[float], share: float) -> float | None:
    """The value at ``share``, to a tenth; None without values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


# --- cancels ---------------------------------------------------------------------------------------------------------


def _cancels(console: Console, count: int) -> dict[str, Any]:
    """From a cancel to the moment at which the service tells that nothing waits or runs and all blocks are free."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        config = PdserveConfig.parse(
            {
                **settings(dummy_model(Path(folder))),
                "gateway": {"port": 0},
                "cluster": {"prefill": 1, "decode": 1, "oversubscribe": True},
            }
        )
        port = start_detached(config)
        try:
            found = asyncio.run(_cancel_all(f"localhost:{port}", count))
        finally:
            stop_detached(port)
    table = Table("cancelled while", "free after p50, ms", "max, ms", box=None)
    figures = {}
    for state, ms in found.items():
        figures[state.value] = {"p50": round(statistics.median(ms), 1), "max": round(max(ms), 1)}
        table.add_row(state, *(f"{each:.0f}" for each in figures[state.value].values()))
    console.print(table)
    return figures


async def _cancel_all(target: str, count: int) -> dict[State, list[float]]:
    found: dict[State, list[float]] = {state: [] for state in State}
    async with AsyncClient(target) as client:
        for state in [state for _ in range(count) for state in State]:
            async with held(client, state) as (request, blockers):
                begin_s = time.monotonic()
                request.stream.cancel()
                if blockers:
                    await until(client, lambda status: status.queued == 0)
                else:
                    await asyncio.sleep(0.002)
                    await until(client, lambda status, since=begin_s: _is_freed(status, since))  # type: ignore[misc]
                found[state].append((time.monotonic() - begin_s) * 1e3)
            await until(client, is_free)
    return found


def _is_freed(status: Any, since_s: float) -> bool:
    """Whether all blocks are free by reports from after ``since_s``."""
    elapsed_s = time.monotonic() - since_s
    return is_free(status) and all(worker.heartbeat_age_s < elapsed_s for worker in status.workers)


if __name__ == "__main__":
    typer.run(main)
