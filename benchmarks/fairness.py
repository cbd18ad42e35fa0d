"""What one client's flood costs another: `python -m benchmarks.fairness`, and part of `python -m benchmarks.abuse`.

A client with a token of its own sends one request after another, alone, and beside a client (in a process of its own)
that has more requests in progress than the queue has places. The windows alternate. Reported: the time to the first
token and to the last, how much of it the request waited (for its turn, and for the step that ran on the prefill worker)
and how much its prompt took to compute; ratios; refusals. A table, then one JSON line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.abuse_client import FLOOD, FLOOD_REQUESTS
from benchmarks.quick import Quick
from gateway.token_file import digest_of
from ops.launch.detach import start_detached, stop_detached
from pdserve import AsyncClient
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import CapacityExceeded
from pdserve.core.timeline import Figure

MAX_QUEUE = FLOOD_REQUESTS // 3
PROMPT_TOKENS, OUTPUTS = 64, 16
FILL_S = 2.0
WAITS = ("route", "prefill_queue")


@dataclass
class Answers:
    """What the client got in the windows of one kind."""

    first_ms: list[float] = field(default_factory=list)
    last_ms: list[float] = field(default_factory=list)
    waited_ms: list[float] = field(default_factory=list)
    computed_ms: list[float] = field(default_factory=list)
    refused: int = 0
    retried: int = 0


def main(
    rounds: Annotated[int, typer.Option(min=1, help="windows of each kind")] = 5,
    window_s: Annotated[float, typer.Option(min=1.0, help="length of a window")] = 6.0,
    quick: Quick = False,
) -> None:
    """Measure."""
    rounds, window_s = (1, 1.0) if quick else (rounds, window_s)
    print(json.dumps(fairness(Console(), rounds, window_s)))  # noqa: T201 - the last line is for programs


def fairness(console: Console, rounds: int, window_s: float) -> dict[str, Any]:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        tokens = Path(folder, "tokens.yaml")
        entries = [{"name": name, "sha256": digest_of(name).hex()} for name in ("one", "flood")]
        tokens.touch(mode=0o600)
        tokens.write_text(yaml.safe_dump({"tokens": entries}))
        settings = {
            "model.path": "tiny",
            "gateway.port": 0,
            "gateway.tokens": str(tokens),
            "router.max_queue": MAX_QUEUE,
            "engine.max_num_seqs": 8,
        }
        port = start_detached(PdserveConfig.load(None, settings), lambda stage: None)
        try:
            alone, beside, queued = asyncio.run(_windows(f"localhost:{port}", rounds, window_s))
        finally:
            stop_detached(port)
    table = Table(
        "one client's requests",
        "answers",
        "first token p50, ms",
        "p99",
        "waited",
        "prefill",
        "last",
        "refused",
        box=None,
    )
    for name, answers in (("alone", alone), ("beside a flood", beside)):
        figures = _figures(answers)
        shown = [figures[f"{each}_ms"] for each in ("first_p50", "first_p99", "waited_p50", "computed_p50", "last_p50")]
        table.add_row(name, str(figures["answers"]), *(f"{ms:.0f}" for ms in shown), str(answers.refused))
    console.print(table)
    return {
        "alone": _figures(alone),
        "beside": _figures(beside),
        "ratio_first": round(_quantile(beside.first_ms, 0.5) / _quantile(alone.first_ms, 0.5), 2),
        "ratio_last": round(_quantile(beside.last_ms, 0.5) / _quantile(alone.last_ms, 0.5), 2),
        "refused": alone.refused + beside.refused,
        "retried": alone.retried + beside.retried,
        "queued": queued,
    }


async def _windows(target: str, rounds: int, window_s: float) -> tuple[Answers, Answers, int]:
    """What the client got, and the fewest requests that waited during the floods."""
    alone, beside, queued = Answers(), Answers(), MAX_QUEUE
    async with AsyncClient(target, token="one") as client:
        await _window(client, 2.0, Answers())
        for _ in range(rounds):
            await _window(client, window_s, alone)
            with _flood(target):
                await asyncio.sleep(FILL_S)
                await _window(client, window_s, beside)
                queued = min(queued, (await client.status()).queued)
            await asyncio.sleep(1.0)
    return alone, beside, queued


async def _window(client: AsyncClient, seconds: float, answers: Answers) -> None:
    until_s = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until_s:
        number += 1
        await _request(client, answers, number)
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def _flood(target: str) -> Iterator[None]:
    flood = subprocess.Popen([sys.executable, "-m", "benchmarks.abuse_client", FLOOD, target, "flood"])
    try:
        yield
    finally:
        flood.terminate()
        flood.wait(30)


async def _request(client: AsyncClient, answers: Answers, number: int) -> None:
    prompt = [(number * 31 + index) % 4000 + 5 for index in range(PROMPT_TOKENS)]
    begin_s = time.monotonic()
    stream = client.generate(prompt, max_tokens=OUTPUTS, ignore_eos=True, timeout_s=100)
    try:
        await anext(stream)
        first_ms = (time.monotonic() - begin_s) * 1e3
        result = await stream.result()
    except CapacityExceeded:
        answers.refused += 1
        return
    answers.first_ms.append(first_ms)
    answers.last_ms.append((time.monotonic() - begin_s) * 1e3)
    answers.retried += result.attempts > 1
    stages = result.breakdowns[Figure.TTFT].stages_ms
    answers.waited_ms.append(sum(stages[stage] for stage in WAITS))
    answers.computed_ms.append(stages["prefill"])


def _figures(answers: Answers) -> dict[str, float]:
    times = ("first", "last", "waited", "computed")
    quantiles = {
        f"{time}_p{q}_ms": round(_quantile(getattr(answers, f"{time}_ms"), q / 100), 1)
        for time in times
        for q in (50, 99)
    }
    return {"answers": len(answers.last_ms), **quantiles}


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


if __name__ == "__main__":
    typer.run(main)
