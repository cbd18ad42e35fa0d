"""Is a cached prefix quicker fetched or computed? `python -m experiments.benchmarks.prefix_fetch`.

One service with two prefill workers. Each prompt is new, and is sent to one of them, which computes it, then to the
other one, which fetches the prefix from the first one's cache (``router.prefix_fetch: always``). The workers take
turns, requests want a single token, and nothing else runs. The figures are medians of TTFT and of the fetch, and the
bytes that it moved. The break-even is the length at which the lines through both TTFTs meet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import pandas
import typer

from experiments.benchmarks.frame import Quick, in_turns, run, service
from experiments.workloads.conversation import random_tokens
from pdserve import AsyncClient, Generation

TAIL = 8
"""Tokens after the prefix, which are always computed."""
HEARTBEAT_S = 0.1
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
        figures = served.client(partial(_measure, lengths, rounds))
    lines = [np.polyfit(figures.index, figures[f"ttft_{how}_ms"], 1) for how in ("computed", "fetched")]
    slope, intercept = np.subtract(*lines)
    even = max(0.0, -float(intercept / slope)) if slope > 0 else None
    return {"model": model, "transport": transport, **figures.drop(columns="turn"), "break_even_tokens": even}


async def _measure(lengths: Sequence[int], rounds: int, client: AsyncClient) -> pandas.DataFrame:
    """Medians by length."""
    vocab_size = (await client.status()).vocab_size

    async def ask(name: str, length: int, session: str) -> Generation:
        prompt = random_tokens(name, length + TAIL, vocab_size)
        return await client.generate(prompt, max_tokens=1, mode="pd", session_id=session).result()

    sessions: dict[str, str] = {}  # of each worker; names are drawn until both have one
    for number in itertools.takewhile(lambda _: len(sessions) < 2, itertools.count()):
        sessions[(await ask(f"session {number}", 1, f"s{number}")).prefill_worker] = f"s{number}"
    rows = []
    for turn, length in in_turns(lengths, rounds, warm_up=1):  # which opens the links
        first, second = sorted(sessions, reverse=bool(turn % 2))
        cold = await ask(f"{turn}/{length}", length, sessions[first])
        await asyncio.sleep(10 * HEARTBEAT_S)  # the router knows by then what a worker has cached
        warm = await ask(f"{turn}/{length}", length, sessions[second])
        fetch = warm.prefix_fetch
        if fetch is None or fetch.tokens != length or fetch.kv_bytes != fetch.kv_bytes_expected:
            raise SystemExit(f"no fetch of {length} tokens: {fetch}, {warm.placements}")
        rows.append((turn, length, cold.ttft_ms, warm.ttft_ms, fetch.duration_ms, fetch.kv_bytes))
    columns = ["turn", "length", "ttft_computed_ms", "ttft_fetched_ms", "fetch_ms", "kv_bytes"]
    return (
        pandas.DataFrame(rows, columns=columns).query("turn >= 0").groupby("length").median().astype({"kv_bytes": int})
    )


if __name__ == "__main__":
    run(prefix_fetch)
