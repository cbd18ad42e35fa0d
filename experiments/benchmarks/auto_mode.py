"""Is mode ``auto`` as good as the better of its two choices? `python -m experiments.benchmarks.auto_mode`.

One service (a prefill and a decode worker) gets a mixed trace at several loads: questions with short prompts and long
answers, and documents with long prompts and short answers. At each load the same requests are sent at the same times
in mode ``pd``, ``colocated`` and ``auto``, in turns. Before the first load, requests of mode ``auto`` teach the service
its costs. The figure is the mean time of a request, from when it was due until its last token."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.benchmarks.frame import Quick, in_turns, note, run, service
from experiments.load import Outcome, run_load
from experiments.workloads.arrivals import ClosedLoop, random_arrivals
from experiments.workloads.conversation import Conversation, Turn
from pdserve import AsyncClient
from pdserve.core.request import Mode

ARMS = (Mode.PD, Mode.COLOCATED, Mode.AUTO)
DOCUMENTS = 0.25
"""Share of the requests with long prompts."""


def auto_mode(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    lessons, rates, seconds, rounds = (10, (3,), 2.0, 1) if quick else (240, (2, 6, 12), 12.0, 3)
    with service({}) as served:
        loads = asyncio.run(_measure(served.target, lessons, rates, seconds, rounds))
    ratios = {
        rate: its["auto"]["latency_ms"] / min(its["pd"]["latency_ms"], its["colocated"]["latency_ms"])
        for rate, its in loads.items()
    }
    return {"requests_per_s": loads, "auto_over_better": ratios}


async def _measure(
    target: str, lessons: int, rates: Sequence[float], seconds: float, rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by load (requests per second) and mode, after so many lessons."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    async with AsyncClient(target) as client:
        vocab_size = (await client.status()).vocab_size
        await run_load(client, itertools.islice(_mixed(1, vocab_size), lessons), ClosedLoop(2), mode=Mode.AUTO)
        for rate in rates:
            note(f"{rate:g} requests/s")
            outcomes: dict[Mode, list[Outcome]] = {mode: [] for mode in ARMS}
            for number, mode in in_turns(ARMS, rounds):
                seed = 100 + number
                requests = itertools.islice(_mixed(seed, vocab_size), max(4, round(rate * seconds)))
                load = await run_load(client, requests, random_arrivals(rate, seed), mode=mode)
                outcomes[mode] += load.outcomes
            results[f"{rate:g}"] = {mode.value: _figures(outcomes[mode]) for mode in ARMS}
        for line in (await client.status()).costs:
            note(line)
    return results


def _mixed(seed: int, vocab_size: int) -> Iterator[Conversation]:
    """Questions of 8 … 64 tokens with answers of 32 … 96, and documents of 512 … 1536 with 4 … 16. Equal seeds give
    equal requests."""
    draw = np.random.default_rng(seed)
    while True:
        prompt, output = ((512, 1536), (4, 16)) if draw.random() < DOCUMENTS else ((8, 64), (32, 96))
        tokens = draw.integers(10, vocab_size, int(draw.integers(*prompt)))
        yield Conversation((Turn(tuple(tokens.tolist()), int(draw.integers(*output))),))


def _figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of one mode at one load. ``alone``: share of the requests that ran on one worker."""
    done = [(each.lag_s * 1e3, each.generation) for each in outcomes if each.generation is not None]
    return {
        "latency_ms": statistics.fmean(lag_ms + generation.total_ms for lag_ms, generation in done),
        "ttft_ms": statistics.fmean(lag_ms + generation.ttft_ms for lag_ms, generation in done),
        "itl_p99_ms": float(np.percentile([gap for _, generation in done for gap in generation.itl_ms], 99)),
        "alone": statistics.fmean(generation.mode == "colocated" for _, generation in done),
        "failed": len(outcomes) - len(done),
    }


if __name__ == "__main__":
    run(auto_mode)
