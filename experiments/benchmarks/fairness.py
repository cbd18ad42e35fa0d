"""What one client's flood costs another: `python -m experiments.benchmarks.fairness`, and part of `python -m experiments.benchmarks.abuse`.

A client with a token of its own sends one request after another, alone, and beside a client (in a process of its own)
that has more requests in progress than the queue has places. The windows alternate. Reported: the time to the first
token and to the last, how much of it the request waited (for its turn, and for the step that ran on the prefill worker)
and how much its prompt took to compute; ratios; refusals."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from experiments.benchmarks.abuse_client import FLOOD, FLOOD_REQUESTS, abusing
from experiments.benchmarks.frame import Quick, in_turns, quantile, run, service
from pdserve import AsyncClient
from pdserve.core.errors import CapacityExceeded
from pdserve.core.timeline import Figure

MAX_QUEUE = FLOOD_REQUESTS // 3
PROMPT_TOKENS, OUTPUTS = 64, 16
FILL_S = 2.0
WAITS = ("route", "prefill_queue")
Times = dict[str, list[float]]
"""Milliseconds of the answers by name."""


def measure(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    return fairness(1, 1.0) if quick else fairness(5, 6.0)


def fairness(rounds: int, window_s: float) -> dict[str, Any]:
    """The figures of so many windows of each kind."""
    settings = {"router.max_queue": MAX_QUEUE, "engine.max_num_seqs": 8}
    with service(settings, tokens={"one": {}, FLOOD: {}}) as served:
        return asyncio.run(_windows(served.target, rounds, window_s))


async def _windows(target: str, rounds: int, window_s: float) -> dict[str, Any]:
    times: dict[str, Times] = {"alone": {}, "beside": {}}
    refused, retried, queued = 0, 0, MAX_QUEUE
    async with AsyncClient(target, token="one") as client:

        async def window(seconds: float, into: Times) -> None:
            nonlocal refused, retried
            until_s, number = time.monotonic() + seconds, 0
            while time.monotonic() < until_s:
                number += 1
                try:
                    attempts = await _request(client, number, into)
                    retried += attempts > 1
                except CapacityExceeded:
                    refused += 1
                await asyncio.sleep(0.02)

        await window(2.0, {})  # warm-up
        for _, name in in_turns(times, rounds):
            with abusing(FLOOD, target, FLOOD) if name == "beside" else contextlib.nullcontext():
                await asyncio.sleep(FILL_S if name == "beside" else 1.0)
                await window(window_s, times[name])
                if name == "beside":
                    queued = min(queued, (await client.status()).queued)

    def ratio(name: str) -> float | None:
        alone, beside = (quantile(each.get(name, []), 0.5) for each in times.values())
        return beside / alone if alone and beside else None

    return {
        **{
            name: {
                "answers": len(each["first"]),
                **{f"{what}_p{q}_ms": quantile(ms, q / 100) for what, ms in each.items() for q in (50, 99)},
            }
            for name, each in times.items()
        },
        "ratio_first": ratio("first"),
        "ratio_last": ratio("last"),
        "refused": refused,
        "retried": retried,
        "queued": queued,
    }


async def _request(client: AsyncClient, number: int, times: Times) -> int:
    """Adds its times; returns its attempts."""
    prompt = [(number * 31 + index) % 4000 + 5 for index in range(PROMPT_TOKENS)]
    begin_s = time.monotonic()
    stream = client.generate(prompt, max_tokens=OUTPUTS, ignore_eos=True, timeout_s=100)
    await anext(stream)
    first_s = time.monotonic()
    result = await stream.result()
    stages = result.breakdowns[Figure.TTFT].stages_ms
    for name, ms in {
        "first": (first_s - begin_s) * 1e3,
        "last": (time.monotonic() - begin_s) * 1e3,
        "waited": sum(stages[stage] for stage in WAITS),
        "computed": stages["prefill"],
    }.items():
        times.setdefault(name, []).append(ms)
    return result.attempts


if __name__ == "__main__":
    run(measure)
