"""Is a cached prefix quicker fetched or computed? `python -m experiments.benchmarks.prefix_fetch`.

One service with two prefill workers. Each prompt is new, and is sent to one of them, which computes it, then to the
other one, which fetches the prefix from the first one's cache (``router.prefix_fetch: always``). The workers take
turns, requests want a single token, and nothing else runs. The figures are medians of TTFT and of the fetch, and the
bytes that it moved. The break-even is the length at which the lines through both TTFTs meet."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer

from experiments.benchmarks.frame import Quick, in_turns, run, service
from pdserve import AsyncClient, Generation

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


def prefix_fetch(
    transport: Annotated[str, typer.Option(help="transfer.transport")] = "auto", quick: Quick = False
) -> dict[str, Any]:
    """Measure."""
    model, lengths, rounds = ("tiny", (64, 128), 1) if quick else ("dummy:135m", (64, 128, 256, 512, 1024), 5)
    with service({**SETTINGS, "model.path": model, "transfer.transport": transport}) as served:
        figures = asyncio.run(_measure(served.target, lengths, rounds))
    return {"model": model, "transport": transport, **figures}


async def _measure(target: str, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    computed: dict[int, list[float]] = {length: [] for length in lengths}
    fetched: dict[int, list[float]] = {length: [] for length in lengths}
    fetches: dict[int, list[float]] = {length: [] for length in lengths}
    kv_bytes = {}
    async with AsyncClient(target) as client:
        vocab_size = (await client.status()).vocab_size

        async def ask(prompt: list[int], session: str) -> Generation:
            return await client.generate(prompt, max_tokens=1, mode="pd", session_id=session).result()

        def prompt_of(length: int) -> list[int]:
            tokens: list[int] = draw.integers(10, vocab_size, length + TAIL).tolist()
            return tokens

        # Sessions of each worker; names are drawn until both have one.
        sessions: dict[str, str] = {}
        for number in itertools.count():
            sessions[(await ask(prompt_of(1), f"s{number}")).prefill_worker] = f"s{number}"
            if len(sessions) == 2:
                break
        for turn, length in in_turns(lengths, rounds, warm_up=1):  # which opens the links
            first, second = sorted(sessions, reverse=bool(turn % 2))
            prompt = prompt_of(length)
            cold = await ask(prompt, sessions[first])
            await asyncio.sleep(SETTLE_S)
            warm = await ask(prompt, sessions[second])
            fetch = warm.prefix_fetch
            if fetch is None or fetch.tokens != length or fetch.kv_bytes != fetch.kv_bytes_expected:
                raise SystemExit(f"no fetch of {length} tokens: {fetch}, {warm.placements}")
            if turn >= 0:
                computed[length].append(cold.ttft_ms)
                fetched[length].append(warm.ttft_ms)
                fetches[length].append(fetch.duration_ms)
                kv_bytes[length] = fetch.kv_bytes
    computed_ms, fetched_ms, fetch_ms = (
        {length: statistics.median(ms) for length, ms in found.items()} for found in (computed, fetched, fetches)
    )
    return {
        "ttft_computed_ms": computed_ms,
        "ttft_fetched_ms": fetched_ms,
        "fetch_ms": fetch_ms,
        "kv_bytes": kv_bytes,
        "break_even_tokens": _break_even(computed_ms, fetched_ms),
    }


def _break_even(computed_ms: dict[int, float], fetched_ms: dict[int, float]) -> float | None:
    """The length from which on a fetch is quicker, by the lines through both; None if it is at no length."""
    (slope, intercept), fetched = (np.polyfit(list(ms), list(ms.values()), 1) for ms in (computed_ms, fetched_ms))
    slope, intercept = slope - fetched[0], intercept - fetched[1]
    return None if slope <= 0 else max(0.0, -float(intercept) / float(slope))


if __name__ == "__main__":
    run(prefix_fetch)
