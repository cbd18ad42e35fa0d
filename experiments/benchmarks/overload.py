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
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas

from experiments.benchmarks.frame import (
    Quick,
    Service,
    errors_of,
    in_turns,
    load,
    note,
    quantiles,
    run,
    sampling,
    service,
)
from experiments.workloads.arrivals import ClosedLoop, Schedule, random_arrivals
from experiments.workloads.synthetic import Fixed, Synthetic
from ops.settled import leaked_blocks, settled
from pdserve import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.request import Mode
from tests.request_states import State, dummy_model, held, is_free, settings, until

SHARES = (0.9, 1.1, 1.4)
OVERLOAD = 2.0
CLIENTS = 8
PROBES_PER_S = 5.0
TARGET_MS = 50.0


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
        figures = served.client(partial(_overload, served, sizes))
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder,
        service({**settings(dummy_model(Path(folder))), "cluster": {"oversubscribe": True}}) as served,
    ):
        figures["cancel_to_free_ms"] = served.client(partial(_cancels, sizes.cancels))
    return figures


# --- overload --------------------------------------------------------------------------------------------------------


async def _overload(served: Service, sizes: Sizes, client: AsyncClient) -> dict[str, Any]:
    closed = ClosedLoop(sizes.seqs + sizes.seqs // 4)
    await _window([client], [closed], sizes.warm_up_s, sizes)
    before = await settled(client)
    _, first = await _window([client], [closed], sizes.window_s, sizes)
    bears = first["goodput_per_s"]
    if not bears:  # the rates of the other windows are shares of it
        raise SystemExit(f"no request was answered within {sizes.window_s:g} s: this machine needs longer windows")
    windows = {f"closed loop of {closed.concurrency}": first}
    for share in SHARES:
        note(f"{share:g} of {bears:.1f} requests/s")
        name, arrivals = f"open loop, {share:g} of that", random_arrivals(share * bears, seed=1)
        _, windows[name] = await _window([client], [arrivals], sizes.window_s, sizes)
        await settled(client)
    peak = max(each["goodput_per_s"] for each in windows.values())
    probe_rate = min(PROBES_PER_S, OVERLOAD * peak / 4)
    note(f"{OVERLOAD * peak:.1f} requests/s")
    clients, [gateway, *_] = [AsyncClient(served.target) for _ in range(CLIENTS)], served.processes
    schedules = [random_arrivals((OVERLOAD * peak - probe_rate) / CLIENTS, seed) for seed in range(CLIENTS)]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        probing = asyncio.get_running_loop().run_in_executor(apart, _probe, served.target, probe_rate, sizes)
        async with sampling(1.0, lambda: gateway.memory_info().rss / 2**20) as memory_mb:
            ours, figures = await _window(clients, schedules, sizes.overload_s, sizes)
            probed, others = await probing
    for each in clients:
        await each.close()
    leaked = await leaked_blocks(client, before)
    after = await settled(client)
    sent, goodput = (figures[key] + others[key] for key in ("sent_per_s", "goodput_per_s"))
    both, quarters = pandas.concat([ours, probed]), np.array_split(memory_mb, 4)
    return {
        "windows": {**windows, f"open loop, {OVERLOAD:g} of the peak": figures},
        "peak_goodput_per_s": peak,
        "overload_sent_per_s": sent,
        "overload_goodput_per_s": goodput,
        "goodput_ratio": goodput / peak,
        "answered": both.error.isna().sum(),
        "refusals": {"by the load": refusals(ours), "by the second process": refusals(probed)},
        "other_errors": errors_of(both),
        "gateway_mb": {"begin": memory_mb[0], "end": memory_mb[-1]},
        "gateway_grown_mb": quarters[3].mean() - quarters[1].mean(),
        "leaked_blocks": leaked,
        "left": {"queued": after.queued, "running": after.running},
    }


async def _window(
    clients: Sequence[AsyncClient], schedules: Sequence[Schedule], seconds: float, sizes: Sizes
) -> tuple[pandas.DataFrame, dict[str, Any]]:
    """Requests of each client by its own schedule, and their figures. Goodput are answers that were complete within
    the window: what waits at its end is no throughput."""
    workload = Synthetic(Fixed(64), Fixed(sizes.outputs))
    requests = [workload.conversations(10**9, number, 1000) for number in range(len(clients))]
    options = {"mode": Mode.AUTO, "duration_s": seconds, "timeout_s": sizes.deadline_s}
    sent = await load(clients, schedules, requests, **options)
    return sent, {
        "sent_per_s": len(sent) / seconds,
        "goodput_per_s": (sent.error.isna() & (sent.ended_s <= seconds)).sum() / seconds,
        "refused": sent.refused.sum(),
        "other_errors": sum(errors_of(sent).values()),
        **quantiles(sent.ttft_ms, "first_", 50, 99),
    }


def _probe(target: str, rate: float, sizes: Sizes) -> tuple[pandas.DataFrame, dict[str, Any]]:
    """``rate`` requests per second, from a process that does nothing else."""

    async def ask() -> tuple[pandas.DataFrame, dict[str, Any]]:
        async with AsyncClient(target) as client:
            return await _window([client], [random_arrivals(rate, seed=CLIENTS)], sizes.overload_s, sizes)

    return asyncio.run(ask())


def refusals(window: pandas.DataFrame) -> dict[str, Any]:
    """How many refusals there were, and how soon they came."""
    refused_ms = window.took_ms[window.refused.astype(bool)]
    within = (refused_ms <= TARGET_MS).sum() / max(1, len(refused_ms))
    return {"count": len(refused_ms), **quantiles(refused_ms, "", 50, 90, 99, 100), f"within_{TARGET_MS:g}_ms": within}


# --- cancels ---------------------------------------------------------------------------------------------------------


async def _cancels(count: int, client: AsyncClient) -> pandas.DataFrame:
    """From a cancel to the moment at which the service tells that nothing waits or runs and all blocks are free."""
    rows = []
    for _, state in in_turns(State, count):
        async with held(client, state) as (request, blockers):
            begin_s = time.monotonic()
            request.stream.cancel()
            if not blockers:
                await asyncio.sleep(0.002)
            await until(client, partial(_is_over, begin_s, bool(blockers)))
            rows.append((state.value, (time.monotonic() - begin_s) * 1e3))
        await until(client, is_free)
    found = pandas.DataFrame(rows, columns=["state", "ms"]).groupby("state").ms.agg(["median", "max"])
    return found.set_axis(["p50", "max"], axis=1)


def _is_over(since_s: float, was_queued: bool, status: ServiceStatus) -> bool:
    """Whether nothing waits; or whether all blocks are free by reports from after ``since_s``."""
    elapsed_s = time.monotonic() - since_s
    if was_queued:
        return status.queued == 0
    return is_free(status) and all(worker.heartbeat_age_s < elapsed_s for worker in status.workers)


if __name__ == "__main__":
    run(overload)
