"""Goodput at twice the load that a service can bear: `python -m experiments.benchmarks.overload`.

A service with engines, one prefill and one decode worker of the model tiny, first at rising load: goodput is the number
of complete answers within their deadline per second, and its peak the best of the windows. Then requests arrive at
twice that rate for a minute, from eight clients of equal share, on a clock of their own that waits for no answer.
Reported: goodput beside the peak, how soon refusals come, what answered requests waited, the memory of the gateway, and
what is left afterwards. The process that makes the load is busy itself and sees refusals late, so a second one sends a
few requests per second and times their refusals too. Then requests are cancelled in every state, and the time is taken
until all blocks are free."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmarks.frame import Quick, Service, Window, in_turns, loads, memory_of, note, run, service
from experiments.statistics import percentile
from experiments.workloads.arrivals import ClosedLoop, Schedule, random_arrivals
from experiments.workloads.conversation import Conversation
from experiments.workloads.synthetic import Fixed, Synthetic
from ops.settled import leaked_blocks, settled
from pdserve import AsyncClient
from pdserve.core.request import Mode
from tests.request_states import State, dummy_model, held, is_free, settings, until

PROMPT_TOKENS = 64
VOCABULARY = 1000
SHARES = (0.9, 1.1, 1.4)
OVERLOAD = 2.0
CLIENTS = 8
PROBES_PER_S = 5.0
TARGET_MS = 50.0
MEMORY_EVERY_S = 1.0


class Sizes(NamedTuple):
    """Lengths of windows in seconds; ``outputs`` tokens per request, which are due within ``deadline_s``. The engines
    run ``seqs`` requests at a time, and ``max_queue`` wait. ``cancels`` requests are cancelled in each state."""

    window_s: float = 12.0
    overload_s: float = 60.0
    warm_up_s: float = 15.0
    outputs: int = 32
    deadline_s: float = 10.0
    max_queue: int = 32
    seqs: int = 32
    cancels: int = 15


QUICK = Sizes(1.0, 2.0, 1.0, outputs=4, deadline_s=60.0, max_queue=1, seqs=2, cancels=1)


def overload(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    sizes = QUICK if quick else Sizes()
    chosen = {"model.dtype": "float32", "engine.max_num_seqs": sizes.seqs, "router.max_queue": sizes.max_queue}
    with service(chosen) as served:
        figures = asyncio.run(_overload(served, sizes))
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder,
        service({**settings(dummy_model(Path(folder))), "cluster": {"oversubscribe": True}}) as served,
    ):
        figures["cancel_to_free_ms"] = asyncio.run(_cancels(served.target, sizes.cancels))
    return figures


# --- overload --------------------------------------------------------------------------------------------------------


async def _overload(served: Service, sizes: Sizes) -> dict[str, Any]:
    target, closed = served.target, ClosedLoop(sizes.seqs + sizes.seqs // 4)
    async with AsyncClient(target) as client:
        await _window([client], [closed], sizes.warm_up_s, sizes)
        before = await settled(client)
        first = await _window([client], [closed], sizes.window_s, sizes)
        if not first.goodput:  # the rates of the other windows are shares of it
            raise SystemExit(f"no request was answered within {sizes.window_s:g} s: this machine needs longer windows")
        windows = {f"closed loop of {closed.concurrency}": first}
        for share in SHARES:
            note(f"{share:g} of {first.goodput:.1f} requests/s")
            arrivals = random_arrivals(share * first.goodput, seed=1)
            windows[f"open loop, {share:g} of that"] = await _window([client], [arrivals], sizes.window_s, sizes)
            await settled(client)
        peak = max(window.goodput for window in windows.values())
        rate = OVERLOAD * peak
        probe_rate = min(PROBES_PER_S, rate / 4)
        note(f"{rate:.1f} requests/s")
        clients = [AsyncClient(target) for _ in range(CLIENTS)]
        schedules = [random_arrivals((rate - probe_rate) / CLIENTS, seed) for seed in range(CLIENTS)]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            probing = asyncio.get_running_loop().run_in_executor(apart, _probe, target, probe_rate, sizes)
            async with memory_of(served.gateway, MEMORY_EVERY_S) as memory:
                overloaded = await _window(clients, schedules, sizes.overload_s, sizes)
                probed = await probing
        for each in clients:
            await each.close()
        leaked = await leaked_blocks(client, before)
        after = await settled(client)
    windows[f"open loop, {OVERLOAD:g} of the peak"] = overloaded
    quarter = max(1, len(memory) // 4)
    grown = statistics.mean(memory[-quarter:]) - statistics.mean(memory[quarter : 2 * quarter])
    goodput = overloaded.goodput + probed.goodput
    return {
        "windows": {name: _summary(window) for name, window in windows.items()},
        "peak_goodput_per_s": peak,
        "overload_sent_per_s": (overloaded.sent + probed.sent) / sizes.overload_s,
        "overload_goodput_per_s": goodput,
        "goodput_ratio": goodput / peak,
        "answered": len(overloaded.first_ms) + len(probed.first_ms),
        "refusals": {"by the load": _refusals(overloaded), "by the second process": _refusals(probed)},
        "other_errors": dict(overloaded.errors + probed.errors),
        "gateway_mb": {"begin": memory[0] / 2**20, "end": memory[-1] / 2**20},
        "gateway_grown_mb": grown / 2**20,
        "leaked_blocks": leaked,
        "left": {"queued": after.queued, "running": after.running},
    }


async def _window(
    clients: Sequence[AsyncClient], schedules: Sequence[Schedule], seconds: float, sizes: Sizes
) -> Window:
    """Requests of each client by its own schedule."""

    def requests(number: int) -> Iterator[Conversation]:
        return Synthetic(Fixed(PROMPT_TOKENS), Fixed(sizes.outputs)).conversations(10**9, number, VOCABULARY)

    options = {"mode": Mode.AUTO, "duration_s": seconds, "timeout_s": sizes.deadline_s}
    return Window.of(seconds, await loads(clients, schedules, requests, **options))


def _probe(target: str, rate: float, sizes: Sizes) -> Window:
    """``rate`` requests per second, from a process that does nothing else."""

    async def ask() -> Window:
        async with AsyncClient(target) as client:
            return await _window([client], [random_arrivals(rate, seed=CLIENTS)], sizes.overload_s, sizes)

    return asyncio.run(ask())


def _summary(window: Window) -> dict[str, Any]:
    return {
        "sent_per_s": window.sent / window.seconds,
        "goodput_per_s": window.goodput,
        "refused": len(window.refused_ms),
        "other_errors": window.errors.total(),
        "first_p50_ms": percentile(window.first_ms, 50),
        "first_p99_ms": percentile(window.first_ms, 99),
    }


def _refusals(window: Window) -> dict[str, Any]:
    refused = window.refused_ms
    within = sum(ms <= TARGET_MS for ms in refused) / max(1, len(refused))
    quantiles = {f"p{q}_ms": percentile(refused, q) for q in (50, 90, 99, 100)}
    return {"count": len(refused), **quantiles, f"within_{TARGET_MS:g}_ms": within}


# --- cancels ---------------------------------------------------------------------------------------------------------


async def _cancels(target: str, count: int) -> dict[str, dict[str, float]]:
    """From a cancel to the moment at which the service tells that nothing waits or runs and all blocks are free."""
    found: dict[State, list[float]] = {state: [] for state in State}
    async with AsyncClient(target) as client:
        for _, state in in_turns(State, count):
            async with held(client, state) as (request, blockers):
                begin_s = time.monotonic()
                request.stream.cancel()
                if blockers:
                    await until(client, lambda status: status.queued == 0)
                else:
                    await asyncio.sleep(0.002)
                    await until(client, lambda status, since_s=begin_s: _is_freed(status, since_s))  # type: ignore[misc]
                found[state].append((time.monotonic() - begin_s) * 1e3)
            await until(client, is_free)
    return {state.value: {"p50": statistics.median(ms), "max": max(ms)} for state, ms in found.items()}


def _is_freed(status: Any, since_s: float) -> bool:
    """Whether all blocks are free by reports from after ``since_s``."""
    elapsed_s = time.monotonic() - since_s
    return is_free(status) and all(worker.heartbeat_age_s < elapsed_s for worker in status.workers)


if __name__ == "__main__":
    run(overload)
