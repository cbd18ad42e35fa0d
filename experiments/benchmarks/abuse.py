"""What one client's abuse costs others, and which bounds hold: `python -m experiments.benchmarks.abuse`.

Abuse: four clients stream answers while a fifth, in a process of its own, misbehaves: with a token by gRPC and HTTP, or
as a stranger with frames of HTTP/2 that no library sends. Windows without it, with the same abuse of another server
beside (what the load alone costs this machine), and with it alternate; the figure is the longest gap between two tokens
of a window, as a median over the windows. Each kind is held against `BOUNDS`. Then the fairness between two clients
(`experiments.benchmarks.fairness`), and what a burst of streams gets: 3,000 at once, with a queue for fewer and for more of them,
and what the same streams get from a bare gRPC server that refuses all."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from typing import Any, NamedTuple

import psutil

from experiments.benchmarks.abuse_client import HTTP_KINDS, KINDS, LIMITED, abusing
from experiments.benchmarks.bare_grpc import bare_server
from experiments.benchmarks.fairness import fairness
from experiments.benchmarks.frame import Quick, Service, in_turns, memory_of, note, quantile, run, service
from pdserve import AsyncClient, Client, Generation
from pdserve.core.errors import CapacityExceeded, PdserveError

PROMPT = "def read_lines(path):\n    with open(path) as file:\n"
CONNECTIONS = 8


class Burst(NamedTuple):
    """``streams`` at once, to services with these ``max_queues``; the memory is looked at ``settle_s`` later."""

    streams: int
    max_queues: tuple[int, ...]
    settle_s: float


BURST = Burst(3_000, (50, 1024, 6_000), 30.0)
QUICK_BURST = Burst(200, (1,), 0.5)
INNOCENTS = 4
PAUSE_S = 0.1
DRAWN: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 7}
QUICK_KINDS = ("resets", LIMITED, "http-lists", "h2-resets")
BOUNDS = {"gap": 3.0, "memory_mb": 200.0, "memory_after_mb": 50.0, "cpu_after_s": 5.0}
"""How many times as long the longest gap may be (as without the abuse, or as beside it); how much the gateway's memory
may grow, and how much of that may be left after 30 s; and how soon its CPU is idle again."""
SETTLE_S = 30.0
IDLE_CPU = 0.2


def abuse(quick: Quick = False) -> dict[str, Any]:
    """Measure all of it."""
    rounds, window_s, burst, kinds = (1, 1.0, QUICK_BURST, QUICK_KINDS) if quick else (3, 5.0, BURST, KINDS)
    settings = {"model.dtype": "float32", "router.max_unread_tokens": 64}
    tokens = {"innocent": {}, "abuser": {}, "limited": {"limits": {"concurrent": 1}}}
    with bare_server("refuse") as (elsewhere, _), service(settings, http=True, tokens=tokens) as served:
        found = {kind: _measure(served, kind, elsewhere, rounds, window_s) for kind in kinds}
    return {"abuse": found, "fairness": fairness(rounds, window_s), "burst": _bursts(burst)}


def _measure(served: Service, kind: str, elsewhere: str, rounds: int, window_s: float) -> dict[str, Any]:
    """The figures of a kind of abuse. ``elsewhere`` is another gRPC server, for the same abuse."""
    note(kind)
    gateway = served.gateway
    with Client(served.target, token="innocent") as client:
        expected = client.generate(PROMPT, **DRAWN).result().token_ids
    addresses = {"with": served.http if kind in HTTP_KINDS else served.target, "without": "", "beside": elsewhere}
    if kind in HTTP_KINDS:
        del addresses["beside"]  # that server speaks no HTTP/1.1
    gaps_ms: dict[str, list[float]] = {name: [] for name in addresses}
    answers: list[Generation] = []
    errors: Counter[str] = Counter()
    memory = [gateway.memory_info().rss]
    cpu_after_s = 0.0
    for _, name in in_turns(addresses, rounds):
        address = addresses[name]
        token = "limited" if kind == LIMITED else "abuser"
        with abusing(kind, address, token) if address else contextlib.nullcontext():
            window = asyncio.run(_window(served.target, gateway, window_s))
        gaps_ms[name].append(window[0])
        if name == "with":
            answers += window[1]
            errors.update(window[2])
            memory += window[3]
            cpu_after_s = max(cpu_after_s, _idle_after_s(gateway))
    middle_ms = {name: statistics.median(each) for name, each in gaps_ms.items()}
    figures: dict[str, Any] = {
        "longest_gap_ms": middle_ms["with"],
        "without_ms": middle_ms["without"],
        "beside_ms": middle_ms.get("beside"),
        "answers": len(answers) + errors.total(),
        "first_attempt": sum(answer.attempts == 1 for answer in answers),
        "wrong": sum(answer.token_ids != expected for answer in answers) + errors.total(),
        "errors": dict(errors),
        "memory_mb": (max(memory) - memory[0]) / 2**20,
        "memory_after_mb": _settled_mb(gateway, memory[0]),
        "cpu_after_s": round(cpu_after_s, 1),
    }
    held = {
        "gap": middle_ms["with"] <= BOUNDS["gap"] * max(middle_ms["without"], middle_ms.get("beside", 0.0)),
        **{name: figures[name] <= BOUNDS[name] for name in ("memory_mb", "memory_after_mb", "cpu_after_s")},
        "first attempt": figures["first_attempt"] == figures["answers"],
        "answers": figures["wrong"] == 0,
    }
    return {**figures, "not_held": [name for name, holds in held.items() if not holds]}


def _settled_mb(process: psutil.Process, before: int) -> float:
    """How much larger its memory is than ``before``, once that is within its bound or after `SETTLE_S`."""
    until_s = time.monotonic() + SETTLE_S
    while (left := (process.memory_info().rss - before) / 2**20) > BOUNDS["memory_after_mb"]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.5)
    return left


def _idle_after_s(process: psutil.Process) -> float:
    """Seconds until a process, which has nothing to do, uses less than `IDLE_CPU` of a core; 30 if it goes on."""
    begin_s = time.monotonic()
    while (waited_s := time.monotonic() - begin_s) < SETTLE_S:
        if process.cpu_percent(0.25) < 100 * IDLE_CPU:
            return waited_s
    return SETTLE_S


async def _window(
    target: str, gateway: psutil.Process, window_s: float
) -> tuple[float, list[Generation], list[str], list[int]]:
    """The longest gap between tokens in a window in milliseconds, the answers, what failed, and the gateway's memory
    meanwhile."""
    answers: list[Generation] = []
    errors: list[str] = []
    longest_s = 0.0
    until_s = time.monotonic() + window_s

    async def innocent() -> None:
        nonlocal longest_s
        async with AsyncClient(target, token="innocent") as client:
            while time.monotonic() < until_s:
                stream = client.generate(PROMPT, **DRAWN)
                last_s = 0.0
                try:
                    async for _ in stream:
                        now_s = time.monotonic()
                        if last_s:
                            longest_s = max(longest_s, now_s - last_s)
                        last_s = now_s
                    answers.append(await stream.result())
                except PdserveError as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(PAUSE_S)

    async with memory_of(gateway, 0.05) as memory:
        await asyncio.gather(*(innocent() for _ in range(INNOCENTS)))
    return longest_s * 1e3, answers, errors, memory


# --- a burst of streams -----------------------------------------------------------------------------------------------


def _bursts(burst: Burst) -> dict[str, Any]:
    """The figures by ``max_queue``, and those of the bare server as ``floor``."""
    result: dict[str, Any] = {}
    for max_queue in burst.max_queues:
        with service({"router.max_queue": max_queue}) as served:
            result[str(max_queue)] = asyncio.run(_burst(served.target, served.gateway, burst))
    with bare_server("refuse") as (target, pid):
        result["floor"] = asyncio.run(_burst(target, psutil.Process(pid), burst))
    return result


async def _burst(target: str, server: psutil.Process, burst: Burst) -> dict[str, Any]:
    refused_ms: list[float] = []
    errors: list[str] = []
    answered = 0
    clients = [AsyncClient(target) for _ in range(CONNECTIONS)]
    for client in clients:  # all connections exist, and the gateway has its buffers
        first = (client.generate(PROMPT, max_tokens=2).result() for _ in range(16))
        await asyncio.gather(*first, return_exceptions=True)
    before = server.memory_info().rss

    async def one(index: int) -> None:
        nonlocal answered
        started_s = time.monotonic()
        try:
            await clients[index % CONNECTIONS].generate(PROMPT, max_tokens=8, timeout_s=300).result()
            answered += 1
        except CapacityExceeded as error:
            if error.retry_after_s is None:
                errors.append(str(error))
            else:
                refused_ms.append((time.monotonic() - started_s) * 1e3)
        except PdserveError as error:
            errors.append(f"{type(error).__name__}: {error}")

    tasks = []
    for index in range(burst.streams):
        tasks.append(asyncio.create_task(one(index)))
        if index % 8 == 7:
            await asyncio.sleep(0)  # keeps the creation of tasks out of the measurement
    await asyncio.gather(*tasks)
    for client in clients:
        await client.close()
    await asyncio.sleep(burst.settle_s)
    after = server.memory_info().rss
    return {
        "answered": answered,
        "refused": len(refused_ms),
        "other": len(errors),
        "refused_p50_ms": quantile(refused_ms, 0.5),
        "refused_p99_ms": quantile(refused_ms, 0.99),
        "memory_before_mb": before / 2**20,
        "memory_after_mb": after / 2**20,
        "memory_growth": after / before - 1,
        "errors": sorted(set(errors))[:5],
    }


if __name__ == "__main__":
    run(abuse)
