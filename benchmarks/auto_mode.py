"""Is mode ``auto`` as good as the better of its two choices? `python -m benchmarks.auto_mode [--rates R,…]`.

One service (a prefill and a decode worker) gets a mixed trace at several loads: questions with short prompts and long
answers, and documents with long prompts and short answers. At each load the same requests are sent at the same times
in mode ``pd``, ``colocated`` and ``auto``, in turns. Before the first load, requests of mode ``auto`` teach the service
its costs. The figure is the mean time of a request, from when it was due until its last token; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from experiments.deployment import Deployment
from experiments.load import Outcome, run_load
from experiments.workloads.arrivals import ClosedLoop, random_arrivals
from experiments.workloads.conversation import Conversation, Turn
from pdserve.client.async_client import AsyncClient
from pdserve.client.target import Target
from pdserve.core.request import Mode

console = Console(highlight=False)

ARMS = (Mode.PD, Mode.COLOCATED, Mode.AUTO)
LESSONS = 240
"""Requests of mode ``auto`` before the first load."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """Questions of 8 … 64 tokens with answers of 32 … 96, and a share of documents of 512 … 1536 with 4 … 16."""

    documents: float

    def conversations(self, count: int, seed: int, vocab_size: int) -> Iterator[Conversation]:
        """Equal seeds give equal requests."""
        draw = np.random.default_rng(seed)
        for _ in range(count):
            prompt, output = ((512, 1536), (4, 16)) if draw.random() < self.documents else ((8, 64), (32, 96))
            tokens = draw.integers(10, vocab_size, int(draw.integers(*prompt)))
            yield Conversation((Turn(tuple(tokens.tolist()), int(draw.integers(*output))),))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one arm at one load. ``alone``: share of the requests that ran on one worker."""

    latency_ms: float
    ttft_ms: float
    itl_p99_ms: float
    alone: float
    failed: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Figures:
        """The figures of all rounds together."""
        done = [(o.lag_s * 1e3, o.generation) for o in outcomes if o.generation is not None]
        gaps = [gap for _, generation in done for gap in generation.itl_ms]
        return cls(
            statistics.fmean([lag_ms + generation.total_ms for lag_ms, generation in done]),
            statistics.fmean([lag_ms + generation.ttft_ms for lag_ms, generation in done]),
            float(np.percentile(gaps, 99)),
            statistics.fmean([generation.mode == "colocated" for _, generation in done]),
            len(outcomes) - len(done),
        )


async def compare(target: str | Target, rates: Sequence[float], seconds: float, rounds: int, documents: float) -> None:
    """Measure and print a table, the costs that the service has learned, and a JSON line."""
    trace = Mixed(documents)
    async with AsyncClient(target) as client:
        vocab_size = (await client.status()).vocab_size
        await run_load(client, trace.conversations(LESSONS, 1, vocab_size), ClosedLoop(2), mode=Mode.AUTO)
        results: dict[float, dict[str, Figures]] = {}
        console.print(f"{'load':>8} {'mode':>10} {'latency':>9} {'ttft':>9} {'itl p99':>9} {'alone':>6}   (ms)")
        for rate in rates:
            outcomes: dict[Mode, list[Outcome]] = {mode: [] for mode in ARMS}
            for number in range(rounds):
                for turn in range(len(ARMS)):
                    mode = ARMS[(number + turn) % len(ARMS)]
                    count, seed = max(4, round(rate * seconds)), 100 + number
                    requests = trace.conversations(count, seed, vocab_size)
                    load = await run_load(client, requests, random_arrivals(rate, seed), mode=mode)
                    outcomes[mode] += load.outcomes
            results[rate] = {mode.value: Figures.of(outcomes[mode]) for mode in ARMS}
            for name, its in results[rate].items():
                failed = f"   {its.failed} failed" if its.failed else ""
                console.print(
                    f"{rate:>6.3g}/s {name:>10} {its.latency_ms:9.1f} {its.ttft_ms:9.1f} {its.itl_p99_ms:9.1f} "
                    f"{its.alone:6.0%}{failed}"
                )
        for line in (await client.status()).costs:
            console.print(line)
    ratios = {
        f"{rate:g}": round(its["auto"].latency_ms / min(its["pd"].latency_ms, its["colocated"].latency_ms), 3)
        for rate, its in results.items()
    }
    print(json.dumps({"auto_over_better": ratios}))  # noqa: T201 - the last line is for programs


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a running service; default: one of its own")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rates", default="2,6,12", help="requests per second")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=float, default=0.25, help="share of the requests with long prompts")
    options = parser.parse_args()
    rates = [float(rate) for rate in options.rates.split(",")]
    with Deployment(options.target, settings={"model.path": options.model}, report=console.print) as deployment:
        target = deployment.provide({})
        asyncio.run(compare(target, rates, options.seconds, options.rounds, options.documents))


if __name__ == "__main__":
    main()
