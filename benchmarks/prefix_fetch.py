"""Is a cached prefix quicker fetched or computed? `python -m benchmarks.prefix_fetch [--lengths N,…]`.

One service with two prefill workers. Each prompt is new, and is sent to one of them, which computes it, then to the
other one, which fetches the prefix from the first one's cache (``router.prefix_fetch: always``). The workers take
turns, requests want a single token, and nothing else runs. The table has medians of TTFT and of the fetch, and the
bytes that it moved. The break-even is the length at which the lines through both TTFTs meet; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console

from experiments.deployment import Deployment
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.target import Target

console = Console(highlight=False)

TAIL = 8
"""Tokens after the prefix, which are always computed."""
HEARTBEAT_S = 0.1
SETTLE_S = 10 * HEARTBEAT_S
"""The router knows by then what a worker has cached."""
SETTINGS = {
    "cluster.prefill": 2,
    "cluster.decode": 1,
    "cluster.oversubscribe": True,
    "router.policy": "session",
    "router.prefix_fetch": "always",
    "router.heartbeat_s": HEARTBEAT_S,
    "router.prefill_backlog_tokens": 65_536,
}


@dataclass
class Measured:
    """Of prefixes of one length, each in milliseconds but for ``num_bytes``."""

    computed: list[float] = field(default_factory=list)
    fetched: list[float] = field(default_factory=list)
    fetches: list[float] = field(default_factory=list)
    num_bytes: int = 0


async def compare(target: str | Target, lengths: Sequence[int], rounds: int) -> dict[str, object]:
    """Measure, print a table, and return the figures."""
    draw = np.random.default_rng(1)
    async with AsyncClient(target) as client:
        status = await client.status()

        async def ask(prompt: list[int], session: str) -> Generation:
            return await client.generate(prompt, max_tokens=1, mode="pd", session_id=session).result()

        def prompt_of(length: int) -> list[int]:
            tokens: list[int] = draw.integers(10, status.vocab_size, length + TAIL).tolist()
            return tokens

        # Sessions of each worker; names are drawn until both have one.
        sessions: dict[str, str] = {}
        for number in itertools.count():
            sessions[(await ask(prompt_of(1), f"s{number}")).prefill_worker] = f"s{number}"
            if len(sessions) == 2:
                break
        results = {length: Measured() for length in lengths}
        for turn in range(rounds + 1):
            for length in lengths:
                first, second = sorted(sessions, reverse=bool(turn % 2))
                prompt = prompt_of(length)
                cold = await ask(prompt, sessions[first])
                await asyncio.sleep(SETTLE_S)
                warm = await ask(prompt, sessions[second])
                fetch = warm.prefix_fetch
                if fetch is None or fetch.tokens != length or fetch.kv_bytes != fetch.kv_bytes_expected:
                    sys.exit(f"no fetch of {length} tokens: {fetch}, {warm.placements}")
                if turn == 0:
                    continue  # opens the links and warms up
                its = results[length]
                its.computed.append(cold.ttft_ms)
                its.fetched.append(warm.ttft_ms)
                its.fetches.append(fetch.duration_ms)
                its.num_bytes = fetch.kv_bytes
    console.print(f"{'prefix':>7} {'computed':>9} {'fetched':>9} {'times':>6} {'fetch':>8} {'KV':>9}   (TTFT, ms)")
    for length, its in results.items():
        computed, fetched = statistics.median(its.computed), statistics.median(its.fetched)
        console.print(
            f"{length:>7} {computed:9.1f} {fetched:9.1f} {computed / fetched:6.2f} "
            f"{statistics.median(its.fetches):8.2f} {its.num_bytes / 1e6:6.1f} MB"
        )
    return {
        "ttft_computed_ms": {n: round(statistics.median(its.computed), 2) for n, its in results.items()},
        "ttft_fetched_ms": {n: round(statistics.median(its.fetched), 2) for n, its in results.items()},
        "fetch_ms": {n: round(statistics.median(its.fetches), 2) for n, its in results.items()},
        "kv_bytes": {n: its.num_bytes for n, its in results.items()},
        "break_even_tokens": break_even(results),
    }


def break_even(results: dict[int, Measured]) -> float | None:
    """The length from which on a fetch is quicker, by the lines through the medians; None if it is at no length."""
    lengths = list(results)
    computed = np.polyfit(lengths, [statistics.median(its.computed) for its in results.values()], 1)
    fetched = np.polyfit(lengths, [statistics.median(its.fetched) for its in results.values()], 1)
    slope, intercept = computed - fetched
    return None if slope <= 0 else round(max(0.0, -float(intercept) / float(slope)), 1)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a running service with these settings; default: one of its own")
    parser.add_argument("--model", default="dummy:135m")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--lengths", default="64,128,256,512,1024", help="tokens of the prefixes: whole blocks")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    settings = {**SETTINGS, "model.path": options.model, "transfer.transport": options.transport}
    with Deployment(options.target, settings=settings, report=console.print) as deployment:
        figures = asyncio.run(compare(deployment.provide({}), lengths, options.rounds))
    figures = {"model": options.model, "transport": options.transport, **figures}
    print(json.dumps(figures))  # noqa: T201 - the last line is for programs


if __name__ == "__main__":
    main()
