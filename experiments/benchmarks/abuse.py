"""What one client's abuse costs others, and which bounds hold: `python -m experiments.benchmarks.abuse`. Its parts:

- ``abuse``: four clients stream answers while a fifth misbehaves, with a token by gRPC and HTTP, or as a stranger with
  frames of HTTP/2 that no library sends. The figure is the longest gap between two tokens of a window, as a median over
  the windows. Each kind is held against `BOUNDS`.
- ``fairness``: a client with a token of its own sends one request after another, alone, and beside a client that has
  more requests in progress than the queue has places. Reported: the time to the first token and to the last, how much
  of it the request waited (for its turn, and for the step that ran on the prefill worker) and how much its prompt took
  to compute; ratios; refusals.
- ``burst``: what 3,000 streams at once get, with a queue for fewer and for more of them, and what they get from a bare
  gRPC server that refuses all.
- ``strangers``: a client sends requests one after another while 1,000 connections without tokens or the service's
  secret stay open on all ports of its processes: gRPC, HTTP, registry, control, KV, and Ray's. The CPU time that the
  service's processes use per second tells what strangers take of it.

What misbehaves is a process of its own. Windows without it, with it at another server beside (what the load alone
costs this machine), and with it at the service alternate."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import psutil

from experiments.benchmarks.abuse_client import FLOOD, FLOOD_REQUESTS, HTTP_KINDS, KINDS, LIMITED, abusing, strangers
from experiments.benchmarks.bare_grpc import bare_server
from experiments.benchmarks.frame import (
    Only,
    Quick,
    Service,
    Window,
    cpu_s,
    in_turns,
    loads,
    memory_of,
    note,
    parts,
    run,
    service,
)
from experiments.load import Outcome
from experiments.statistics import percentile
from experiments.workloads.arrivals import ClosedLoop, all_at_once
from experiments.workloads.conversation import Conversation, Turn, random_tokens
from experiments.workloads.synthetic import Fixed, Synthetic
from pdserve import AsyncClient, Client, Generation
from pdserve.core.errors import CapacityExceeded
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure

VOCABULARY = 1000
INNOCENTS = 4
ANSWER = Conversation((Turn(random_tokens("abuse", 16, VOCABULARY), 100),), salt="")
"""What each innocent client asks for again and again."""
BOUNDS = {"gap": 3.0, "memory_mb": 200.0, "memory_after_mb": 50.0, "cpu_after_s": 5.0}
"""How many times as long the longest gap may be (as without the abuse, or as beside it); how much the gateway's memory
may grow, and how much of that may be left after 30 s; and how soon its CPU is idle again."""
SETTLE_S = 30.0
IDLE_CPU = 0.2
MAX_QUEUE = FLOOD_REQUESTS // 3
FILL_S = 2.0
CONNECTIONS = 8


class Sizes(NamedTuple):
    """``rounds`` of windows of so many seconds; ``burst`` streams at once, to services with these ``max_queues``, whose
    memory is looked at ``settle_s`` later; windows of strangers, whose connections last ``pace_s``."""

    kinds: tuple[str, ...] = KINDS
    rounds: int = 3
    window_s: float = 5.0
    burst: int = 3_000
    max_queues: tuple[int, ...] = (50, 1024, 6_000)
    settle_s: float = 30.0
    strangers: int = 1000
    strangers_rounds: int = 2
    strangers_window_s: float = 60.0
    pace_s: float = 5.0


QUICK = Sizes(("resets", LIMITED, "http-lists", "h2-resets"), 1, 1.0, 200, (1,), 0.5, 20, 1, 1.0, pace_s=1.0)


def abuse(only: Only = "", quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    sizes = QUICK if quick else Sizes()
    return parts(
        only,
        abuse=lambda: _abuse(sizes),
        fairness=lambda: _fairness(sizes),
        burst=lambda: _bursts(sizes),
        strangers=lambda: _strangers(sizes),
    )


async def _answered(
    target: str,
    token: str,
    requests: Callable[[int], Iterable[Conversation]],
    seconds: float,
    clients: int = 1,
    mode: Mode = Mode.AUTO,
) -> list[Outcome]:
    """A window in which each client sends one request after another."""
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(AsyncClient(target, token=token)) for _ in range(clients)]
        return await loads(opened, [ClosedLoop(1)] * clients, requests, mode=mode, duration_s=seconds)


def _prompts(tokens: int) -> Callable[[int], Iterator[Conversation]]:
    """Prompts that no cache has, with short answers."""
    return lambda number: Synthetic(Fixed(tokens), Fixed(16)).conversations(10**9, number, VOCABULARY)


def _done(outcomes: Iterable[Outcome]) -> list[Generation]:
    return [each.generation for each in outcomes if each.generation is not None]


# --- abuse -----------------------------------------------------------------------------------------------------------


def _abuse(sizes: Sizes) -> dict[str, Any]:
    settings = {"model.dtype": "float32", "router.max_unread_tokens": 64}
    tokens = {"innocent": {}, "abuser": {}, "limited": {"limits": {"concurrent": 1}}}
    with bare_server("refuse") as (elsewhere, _), service(settings, http=True, tokens=tokens) as served:
        return {kind: _measure(served, kind, elsewhere, sizes) for kind in sizes.kinds}


def _measure(served: Service, kind: str, elsewhere: str, sizes: Sizes) -> dict[str, Any]:
    """The figures of a kind of abuse. ``elsewhere`` is another gRPC server, for the same abuse."""
    note(kind)
    gateway = served.gateway
    with Client(served.target, token="innocent") as client:
        [turn] = ANSWER.turns
        expected = client.generate(turn.token_ids, max_tokens=turn.output_len, ignore_eos=True).result().token_ids
    addresses = {"with": served.http if kind in HTTP_KINDS else served.target, "without": "", "beside": elsewhere}
    if kind in HTTP_KINDS:
        del addresses["beside"]  # that server speaks no HTTP/1.1
    gaps_ms: dict[str, list[float]] = {name: [] for name in addresses}
    outcomes: list[Outcome] = []
    memory = [gateway.memory_info().rss]
    cpu_after_s = 0.0

    async def window() -> list[Outcome]:
        async with memory_of(gateway, 0.05) as meanwhile:
            found = await _answered(
                served.target, "innocent", lambda number: itertools.repeat(ANSWER), sizes.window_s, INNOCENTS
            )
        if name == "with":
            memory.extend(meanwhile)
        return found

    for _, name in in_turns(addresses, sizes.rounds):
        address, token = addresses[name], "limited" if kind == LIMITED else "abuser"
        with abusing(kind, address, token) if address else contextlib.nullcontext():
            found = asyncio.run(window())
        gaps_ms[name].append(max((gap for each in _done(found) for gap in each.itl_ms), default=0.0))
        if name == "with":
            outcomes += found
            cpu_after_s = max(cpu_after_s, _idle_after_s(gateway))
    middle_ms = {name: statistics.median(each) for name, each in gaps_ms.items()}
    answers = _done(outcomes)
    errors = Counter(f"{type(each.error).__name__}: {each.error}" for each in outcomes if each.error is not None)
    figures: dict[str, Any] = {
        "longest_gap_ms": middle_ms["with"],
        "without_ms": middle_ms["without"],
        "beside_ms": middle_ms.get("beside"),
        "answers": len(outcomes),
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


# --- fairness --------------------------------------------------------------------------------------------------------


def _fairness(sizes: Sizes) -> dict[str, Any]:
    windows: dict[str, list[Outcome]] = {"alone": [], "beside": []}
    queued = MAX_QUEUE
    settings = {"router.max_queue": MAX_QUEUE, "engine.max_num_seqs": 8}
    with service(settings, tokens={"one": {}, FLOOD: {}}) as served, Client(served.target, token="one") as client:
        asyncio.run(_answered(served.target, "one", _prompts(64), 2.0))  # warm-up
        for _, name in in_turns(windows, sizes.rounds):
            with abusing(FLOOD, served.target, FLOOD) if name == "beside" else contextlib.nullcontext():
                time.sleep(FILL_S)
                windows[name] += asyncio.run(_answered(served.target, "one", _prompts(64), sizes.window_s))
                if name == "beside":
                    queued = min(queued, client.status().queued)
    times = {name: _times_ms(_done(outcomes)) for name, outcomes in windows.items()}
    middle = {name: {what: percentile(ms, 50) or 0.0 for what, ms in each.items()} for name, each in times.items()}
    both = [each for outcomes in windows.values() for each in outcomes]
    return {
        **{
            name: {
                "answers": len(each["first"]),
                **{f"{what}_p{q}_ms": percentile(ms, q) for what, ms in each.items() for q in (50, 99)},
            }
            for name, each in times.items()
        },
        **{f"ratio_{what}": middle["beside"][what] / middle["alone"][what] for what in ("first", "last")},
        "refused": sum(isinstance(each.error, CapacityExceeded) for each in both),
        "retried": sum(each.attempts > 1 for each in _done(both)),
        "queued": queued,
    }


def _times_ms(answers: Iterable[Generation]) -> Mapping[str, list[float]]:
    """Of each answer the time to its first and last token, that it waited, and that its prompt took to compute."""
    found: dict[str, list[float]] = {name: [] for name in ("first", "last", "waited", "computed")}
    for answer in answers:
        stages = answer.breakdowns[Figure.TTFT].stages_ms
        waited = stages["route"] + stages["prefill_queue"]
        for times, ms in zip(found.values(), (answer.ttft_ms, answer.total_ms, waited, stages["prefill"]), strict=True):
            times.append(ms)
    return found


# --- a burst of streams ----------------------------------------------------------------------------------------------


def _bursts(sizes: Sizes) -> dict[str, Any]:
    """The figures by ``max_queue``, and those of the bare server as ``floor``."""
    result: dict[str, Any] = {}
    for max_queue in sizes.max_queues:
        with service({"router.max_queue": max_queue}) as served:
            result[str(max_queue)] = asyncio.run(_burst(served.target, served.gateway, sizes))
    with bare_server("refuse") as (target, pid):
        result["floor"] = asyncio.run(_burst(target, psutil.Process(pid), sizes))
    return result


async def _burst(target: str, server: psutil.Process, sizes: Sizes) -> dict[str, Any]:
    clients = [AsyncClient(target) for _ in range(CONNECTIONS)]

    async def at_once(streams: int) -> list[Outcome]:
        def requests(number: int) -> Iterator[Conversation]:
            return Synthetic(Fixed(16), Fixed(8)).conversations(streams // CONNECTIONS, number, VOCABULARY)

        return await loads(clients, [all_at_once()] * CONNECTIONS, requests, mode=Mode.AUTO, timeout_s=300.0)

    await at_once(16 * CONNECTIONS)  # all connections exist, and the gateway has its buffers
    before = server.memory_info().rss
    burst = Window.of(math.inf, await at_once(sizes.burst))
    for client in clients:
        await client.close()
    await asyncio.sleep(sizes.settle_s)
    after = server.memory_info().rss
    return {
        "answered": len(burst.first_ms),
        "refused": len(burst.refused_ms),
        "other": burst.errors.total(),
        "refused_p50_ms": percentile(burst.refused_ms, 50),
        "refused_p99_ms": percentile(burst.refused_ms, 99),
        "memory_before_mb": before / 2**20,
        "memory_after_mb": after / 2**20,
        "memory_growth": after / before - 1,
        "errors": sorted(burst.errors)[:5],
    }


# --- strangers -------------------------------------------------------------------------------------------------------


def _strangers(sizes: Sizes) -> dict[str, Any]:
    tokens: dict[str, dict[str, Any]] = {"bench": {}}
    windows: dict[str, dict[int, dict[str, float]]] = {"without": {}, "elsewhere": {}, "with": {}}
    with service({"transfer.transport": "tcp"}, http=True, tokens=tokens) as served:
        processes, seconds = served.processes, sizes.strangers_window_s
        ports = sorted({address for each in processes for address in _listening(each)})
        count = {"without": 0, "elsewhere": sizes.strangers, "with": sizes.strangers}
        asyncio.run(_answered(served.target, "bench", _prompts(128), 0.1, mode=Mode.PD))  # warm-up
        for number, name in in_turns(windows, sizes.strangers_rounds):
            with strangers(count[name], sizes.pace_s, ports if name == "with" else []) as opened:
                before_s = cpu_s(processes)
                found = asyncio.run(_answered(served.target, "bench", _prompts(128), seconds, mode=Mode.PD))
                cpu_ms_per_s = (cpu_s(processes) - before_s) * 1e3 / seconds
            if failed := [each.error for each in found if each.error is not None]:
                raise failed[0]
            total_ms = [each.total_ms for each in _done(found)]
            windows[name][number] = {
                "requests": len(found),
                "ttft_p50_ms": statistics.median(each.ttft_ms for each in _done(found)),
                "latency_p50_ms": statistics.median(total_ms),
                "latency_p99_ms": percentile(total_ms, 99) or 0.0,
                "cpu_ms_per_s": cpu_ms_per_s,
                "opened": sum(opened),
            }
        kv_refused = sum(sum(worker.kv_refused.values()) for worker in served.status().workers)

    def middle(name: str, figure: str) -> float:
        return statistics.median(window[figure] for window in windows[name].values())

    return {
        "connections": sizes.strangers,
        "ports": len(ports),
        "windows": windows,
        "ratios": {
            figure: {other: middle("with", figure) / middle(other, figure) for other in ("without", "elsewhere")}
            for figure in ("ttft_p50_ms", "latency_p50_ms", "latency_p99_ms")
        },
        "kv_refused": kv_refused,
    }


def _listening(process: psutil.Process) -> Iterator[str]:
    for connection in process.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            yield f"{connection.laddr.ip.removeprefix('::ffff:')}:{connection.laddr.port}"


if __name__ == "__main__":
    run(abuse)
