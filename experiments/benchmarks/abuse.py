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
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pandas
import psutil

from experiments.benchmarks.abuse_client import FLOOD, FLOOD_REQUESTS, HTTP_KINDS, KINDS, LIMITED, abusing, strangers
from experiments.benchmarks.bare_grpc import bare_server
from experiments.benchmarks.frame import (
    Only,
    Quick,
    Service,
    cpu_s,
    errors_of,
    in_turns,
    load,
    note,
    parts,
    quantiles,
    run,
    sampling,
    service,
)
from experiments.run_folder import token_hash
from experiments.workloads.arrivals import ClosedLoop, all_at_once
from experiments.workloads.conversation import Conversation, Turn, random_tokens
from experiments.workloads.synthetic import Fixed, Synthetic
from pdserve import AsyncClient, Client
from pdserve.core.request import Mode

VOCABULARY = 1000
INNOCENTS = 4
PROMPT, OUTPUTS = random_tokens("abuse", 16, VOCABULARY), 100
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
    measures = {"abuse": _abuse, "fairness": _fairness, "burst": _bursts, "strangers": _strangers}
    return parts(only, **{name: partial(measure, sizes) for name, measure in measures.items()})


async def _answered(
    served: Service,
    token: str,
    requests: Callable[[int], Iterable[Conversation]],
    seconds: float,
    clients: int = 1,
    mode: Mode = Mode.AUTO,
) -> tuple[pandas.DataFrame, list[float]]:
    """A window in which each client sends one request after another; and what memory the gateway has, in MB."""
    [gateway, *_] = served.processes
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(AsyncClient(served.target, token=token)) for _ in range(clients)]
        memory_mb = await stack.enter_async_context(sampling(0.05, lambda: gateway.memory_info().rss / 2**20))
        return await load(
            opened, [ClosedLoop(1)] * clients, map(requests, range(clients)), mode=mode, duration_s=seconds
        ), memory_mb


def _prompts(tokens: int) -> Callable[[int], Iterator[Conversation]]:
    """Prompts that no cache has, with short answers."""
    return lambda number: Synthetic(Fixed(tokens), Fixed(16)).conversations(10**9, number, VOCABULARY)


# --- abuse -----------------------------------------------------------------------------------------------------------


def _abuse(sizes: Sizes) -> dict[str, Any]:
    settings = {"model.dtype": "float32", "router.max_unread_tokens": 64}
    tokens = {"innocent": {}, "abuser": {}, "limited": {"limits": {"concurrent": 1}}}
    with bare_server("refuse") as (elsewhere, _), service(settings, http=True, tokens=tokens) as served:
        return {kind: _measure(served, kind, elsewhere, sizes) for kind in sizes.kinds}


def _measure(served: Service, kind: str, elsewhere: str, sizes: Sizes) -> dict[str, Any]:
    """The figures of a kind of abuse. ``elsewhere`` is another gRPC server, for the same abuse."""
    note(kind)
    [gateway, *_] = served.processes
    with Client(served.target, token="innocent") as client:
        expected = client.generate(PROMPT, max_tokens=OUTPUTS, ignore_eos=True).result().token_ids
    again = Conversation((Turn(PROMPT, OUTPUTS),), salt="")
    addresses = {"with": served.http if kind in HTTP_KINDS else served.target, "without": "", "beside": elsewhere}
    if kind in HTTP_KINDS:
        del addresses["beside"]  # that server speaks no HTTP/1.1
    gaps_ms: dict[str, list[float]] = {name: [] for name in addresses}
    found, memory_mb, idle_s = [], [gateway.memory_info().rss / 2**20], []
    for _, name in in_turns(addresses, sizes.rounds):
        address, token = addresses[name], "limited" if kind == LIMITED else "abuser"
        with abusing(kind, address, token) if address else contextlib.nullcontext():
            sent, meanwhile_mb = asyncio.run(
                _answered(served, "innocent", lambda _: itertools.repeat(again), sizes.window_s, INNOCENTS)
            )
        gaps_ms[name].append(max(itertools.chain(*sent.itl_ms.dropna()), default=0.0))
        if name == "with":
            found.append(sent)
            memory_mb += meanwhile_mb
            idle_s.append(_settled(lambda: gateway.cpu_percent(0.25) < 100 * IDLE_CPU))
    middle_ms = {name: pandas.Series(each).median() for name, each in gaps_ms.items()}
    sent = pandas.concat(found)
    _settled(lambda: gateway.memory_info().rss / 2**20 - memory_mb[0] <= BOUNDS["memory_after_mb"])
    figures: dict[str, Any] = {
        "longest_gap_ms": middle_ms["with"],
        "without_ms": middle_ms["without"],
        "beside_ms": middle_ms.get("beside"),
        "answers": len(sent),
        "first_attempt": (sent.attempts == 1).sum(),
        "wrong": (sent.token_hash != token_hash(expected)).sum(),
        "errors": sent.error.value_counts(),
        "memory_mb": max(memory_mb) - memory_mb[0],
        "memory_after_mb": gateway.memory_info().rss / 2**20 - memory_mb[0],
        "cpu_after_s": round(max(idle_s), 1),
    }
    held = {
        "gap": middle_ms["with"] <= BOUNDS["gap"] * max(middle_ms["without"], middle_ms.get("beside", 0.0)),
        **{name: figures[name] <= BOUNDS[name] for name in ("memory_mb", "memory_after_mb", "cpu_after_s")},
        "first attempt": figures["first_attempt"] == figures["answers"],
        "answers": figures["wrong"] == 0,
    }
    return {**figures, "not_held": [name for name, holds in held.items() if not holds]}


def _settled(is_settled: Callable[[], bool]) -> float:
    """Seconds until something is the case, at most `SETTLE_S`."""
    begin_s = time.monotonic()
    while not is_settled() and time.monotonic() < begin_s + SETTLE_S:
        time.sleep(0.1)
    return time.monotonic() - begin_s


# --- fairness --------------------------------------------------------------------------------------------------------


def _fairness(sizes: Sizes) -> dict[str, Any]:
    windows, queued = [], [MAX_QUEUE]
    settings = {"router.max_queue": MAX_QUEUE, "engine.max_num_seqs": 8}
    with service(settings, tokens={"one": {}, FLOOD: {}}) as served, Client(served.target, token="one") as client:
        asyncio.run(_answered(served, "one", _prompts(64), 2.0))  # warm-up
        for _, name in in_turns(("alone", "beside"), sizes.rounds):
            with abusing(FLOOD, served.target, FLOOD) if name == "beside" else contextlib.nullcontext():
                time.sleep(FILL_S)
                sent, _ = asyncio.run(_answered(served, "one", _prompts(64), sizes.window_s))
                windows.append(sent.assign(arm=name))
                if name == "beside":
                    queued.append(client.status().queued)
    sent = pandas.concat(windows)
    stages_ms = sent.filter(like="stages_ms.ttft.").rename(columns=lambda name: name.rpartition(".")[2])
    times_ms = {  # to the first token and the last, of which it waited, and its prompt took to compute
        "first": sent.ttft_ms,
        "last": sent.e2e_ms,
        "waited": stages_ms.route + stages_ms.prefill_queue,
        "computed": stages_ms.prefill,
    }
    figures = {}
    for name, done in sent[sent.error.isna()].groupby("arm"):
        of_arm = [quantiles(ms[done.index], f"{what}_", 50, 99) for what, ms in times_ms.items()]
        figures[name] = {"answers": len(done), **of_arm[0], **of_arm[1], **of_arm[2], **of_arm[3]}
    return {
        **figures,
        **{
            f"ratio_{what}": figures["beside"][f"{what}_p50_ms"] / figures["alone"][f"{what}_p50_ms"]
            for what in ("first", "last")
        },
        "refused": sent.refused.sum(),
        "retried": (sent.attempts > 1).sum(),
        "queued": min(queued),
    }


# --- a burst of streams ----------------------------------------------------------------------------------------------


def _bursts(sizes: Sizes) -> dict[str, Any]:
    """The figures by ``max_queue``, and those of the bare server as ``floor``."""
    result: dict[str, Any] = {}
    for max_queue in sizes.max_queues:
        with service({"router.max_queue": max_queue}) as served:
            result[str(max_queue)] = asyncio.run(_burst(served.target, served.processes[0], sizes))
    with bare_server("refuse") as (target, pid):
        result["floor"] = asyncio.run(_burst(target, psutil.Process(pid), sizes))
    return result


async def _burst(target: str, server: psutil.Process, sizes: Sizes) -> dict[str, Any]:
    clients = [AsyncClient(target) for _ in range(CONNECTIONS)]

    async def at_once(streams: int) -> pandas.DataFrame:
        workload, schedules = Synthetic(Fixed(16), Fixed(8)), [all_at_once()] * CONNECTIONS
        requests = (workload.conversations(streams // CONNECTIONS, seed, VOCABULARY) for seed in range(CONNECTIONS))
        return await load(clients, schedules, requests, mode=Mode.AUTO, timeout_s=300.0)

    await at_once(16 * CONNECTIONS)  # all connections exist, and the gateway has its buffers
    before = server.memory_info().rss
    sent = await at_once(sizes.burst)
    for client in clients:
        await client.close()
    await asyncio.sleep(sizes.settle_s)
    after = server.memory_info().rss
    refused, errors = sent.refused.astype(bool), errors_of(sent)
    return {
        "answered": sent.error.isna().sum(),
        "refused": refused.sum(),
        "other": sum(errors.values()),
        **quantiles(sent.took_ms[refused], "refused_", 50, 99),
        "memory_before_mb": before / 2**20,
        "memory_after_mb": after / 2**20,
        "memory_growth": after / before - 1,
        "errors": sorted(errors)[:5],
    }


# --- strangers -------------------------------------------------------------------------------------------------------


def _strangers(sizes: Sizes) -> dict[str, Any]:
    rows = []
    with service({"transfer.transport": "tcp"}, http=True, tokens={"bench": {}}) as served:
        processes, seconds = served.processes, sizes.strangers_window_s
        ports = sorted({
            f"{each.laddr.ip.removeprefix('::ffff:')}:{each.laddr.port}"
            for process in processes
            for each in process.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        })  # fmt: skip
        asyncio.run(_answered(served, "bench", _prompts(128), 0.1, mode=Mode.PD))  # warm-up
        for number, name in in_turns(("without", "elsewhere", "with"), sizes.strangers_rounds):
            count, where = 0 if name == "without" else sizes.strangers, ports if name == "with" else []
            with strangers(count, sizes.pace_s, where) as opened:
                before_s = cpu_s(processes)
                sent, _ = asyncio.run(_answered(served, "bench", _prompts(128), seconds, mode=Mode.PD))
                cpu_ms_per_s = (cpu_s(processes) - before_s) * 1e3 / seconds
            for error in sent.error.dropna():
                raise RuntimeError(error)
            rows.append({
                "window": name,
                "round": number,
                "requests": len(sent),
                "ttft_p50_ms": sent.ttft_ms.median(),
                **quantiles(sent.e2e_ms, "latency_", 50, 99),
                "cpu_ms_per_s": cpu_ms_per_s,
                "opened": sum(opened),
            })  # fmt: skip
        kv_refused = sum(sum(worker.kv_refused.values()) for worker in served.status().workers)
    windows = pandas.DataFrame(rows).set_index(["window", "round"])
    middle = windows[["ttft_p50_ms", "latency_p50_ms", "latency_p99_ms"]].groupby("window").median()
    return {
        "connections": sizes.strangers,
        "ports": len(ports),
        "windows": {name: windows.loc[name] for name in middle.index},
        "ratios": (middle.loc["with"] / middle.drop("with")).T,
        "kv_refused": kv_refused,
    }


if __name__ == "__main__":
    run(abuse)
