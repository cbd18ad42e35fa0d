"""Is mode ``auto`` as good as the better of its two choices? `python -m experiments.benchmarks.auto_mode`.

One service (a prefill and a decode worker) gets a mixed trace at several loads: questions with short prompts and long
answers, and documents with long prompts and short answers. At each load the same requests are sent at the same times
in mode ``pd``, ``colocated`` and ``auto``, in turns. Before the first load, requests of mode ``auto`` teach the service
its costs. The figure is the mean time of a request, from when it was due until its last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas

from experiments.benchmarks.frame import Quick, in_turns, load, note, run, service
from experiments.statistics import percentile
from experiments.workloads.arrivals import ClosedLoop, random_arrivals
from experiments.workloads.conversation import Conversation, Turn
from pdserve import AsyncClient
from pdserve.core.request import Mode

DOCUMENTS = 0.25
"""Share of the requests with long prompts."""


def auto_mode(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    lessons, rates, seconds, rounds = (10, (3,), 2.0, 1) if quick else (240, (2, 6, 12), 12.0, 3)
    with service({}) as served:
        loads = served.client(lambda client: _measure(client, lessons, rates, seconds, rounds))
    latency_ms = pandas.DataFrame({rate: figures.latency_ms for rate, figures in loads.items()}).T
    return {"requests_per_s": loads, "auto_over_better": latency_ms.auto / latency_ms[["pd", "colocated"]].min(axis=1)}


async def _measure(
    client: AsyncClient, lessons: int, rates: Sequence[int], seconds: float, rounds: int
) -> dict[int, pandas.DataFrame]:
    """Figures by mode at each load (requests per second), after so many lessons. ``alone``: share of the requests that
    ran on one worker."""
    results = {}
    mixed = partial(_mixed, (await client.status()).vocab_size)
    await load([client], [ClosedLoop(2)], [mixed(1, lessons)], mode=Mode.AUTO)
    for rate in rates:
        note(f"{rate:g} requests/s")
        found = []
        for number, mode in in_turns((Mode.PD, Mode.COLOCATED, Mode.AUTO), rounds):
            requests = mixed(100 + number, max(4, round(rate * seconds)))
            sent = await load([client], [random_arrivals(rate, 100 + number)], [requests], mode=mode)
            found.append(sent.assign(arm=mode.value))
        every = pandas.concat(found)
        every = every.assign(
            latency_ms=every.e2e_ms + every.lag_ms,
            ttft_ms=every.ttft_ms + every.lag_ms,
            alone=every["mode"] == "colocated",
            failed=every.error.notna(),
        )
        figures = dict.fromkeys(("latency_ms", "ttft_ms", "alone"), "mean") | {"itl_ms": _p99, "failed": "sum"}
        results[rate] = every.groupby("arm").agg(figures).rename(columns={"itl_ms": "itl_p99_ms"})
    for line in (await client.status()).costs:
        note(line)
    return results


def _p99(gaps: pandas.Series) -> float | None:
    return percentile(gaps.explode().dropna().tolist(), 99)


def _mixed(vocab_size: int, seed: int, count: int) -> Iterator[Conversation]:
    """Questions of 8 … 64 tokens with answers of 32 … 96, and documents of 512 … 1536 with 4 … 16. Equal seeds give
    equal requests."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        prompt, output = ((512, 1536), (4, 16)) if draw.random() < DOCUMENTS else ((8, 64), (32, 96))
        tokens = draw.integers(10, vocab_size, int(draw.integers(*prompt)))
        yield Conversation((Turn(tuple(tokens.tolist()), int(draw.integers(*output))),))


if __name__ == "__main__":
    run(auto_mode)
