"""The front door under load: `python -m experiments.benchmarks.front_door`. Its parts:

- ``router``: the gateway, with workers that speak the real protocols and compute nothing
  (`experiments.benchmarks.stub_workers`), beside a bare `grpc.aio` server that streams messages of the same shape.
  The server that is measured has a core of its own; clients and stub workers have another one. Windows alternate. A
  server's rate is what it does per second of its own CPU time, which is its rate on one core however slow the clients
  are. Then: the latency that the gateway adds to an idle request, and the cost of a request with 2 and 200 workers and
  with 10,000 waiting requests.
- ``gateways``: one gateway, then two over the same workers, with clients that keep streams open on all gateways at
  once. Gateways, workers and clients share this machine's cores, so the wall clock says little. What is measured is the
  CPU time of the gateways per request: a gateway is one process with one thread at work, so N gateways with a core each
  bear N divided by that per second. The ratio of two to one is 2 if a second gateway costs the first nothing. Then one
  of two gateways is killed while clients that know both read streams: the time until each of its streams has its next
  token, at another gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pandas
import psutil

from experiments.benchmarks.bare_grpc import ECHO, GENERATE, bare_load, bare_server
from experiments.benchmarks.frame import Only, Quick, cpu_s, in_turns, parts, run
from experiments.benchmarks.stub_workers import work
from experiments.child_process import ChildProcess, call, program
from ops.launch.ports import free_ports
from pdserve import AsyncClient, Client
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from pdserve.pb import inference_pb2 as pb
from runtime.secret import ServiceSecret

START_S = 60.0
PROMPT = tuple(range(10, 74))
SHAPES = {"s4": 4, "s128": 128}
"""Messages of a stream, the completion included."""
STEP_MS, SLOW_STEP_MS = 2.0, 10.0
STREAMS = 32
FEW, FEW_WAITING = 2, 8
CORES = sorted(os.sched_getaffinity(0))
GATEWAYS_WORKERS, GATEWAY_STREAMS = 4, 16
"""Of the part ``gateways``: workers, and streams that are open on each gateway. Fewer would cost more each, because a
gateway gets the tokens of all its requests of a step in one message."""


class Sizes(NamedTuple):
    """``rounds`` windows of each kind, after ``warm_up`` others. ``many`` workers and ``waiting`` requests are what few
    of them are compared with; ``tokens`` has each stream whose gateway is killed."""

    rounds: int = 5
    window_s: float = 4.0
    warm_up: int = 1
    many: int = 200
    waiting: int = 8_000  # the gateway has room for some more calls that wait for a handler
    tokens: int = 1000


QUICK = Sizes(rounds=1, window_s=0.3, warm_up=0, many=8, waiting=100, tokens=400)


def front_door(only: Only = "", quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    sizes = QUICK if quick else Sizes()
    return parts(only, router=lambda: _router(sizes), gateways=lambda: _gateways(sizes))


# --- servers under load ----------------------------------------------------------------------------------------------


class Server(NamedTuple):
    """A server under load, which is called by ``method``."""

    target: str
    process: psutil.Process
    method: str = GENERATE

    def load(self, messages: int, streams: int, seconds: float) -> dict[str, float]:
        """Keep so many streams open, each with that many messages: how many ended, the median time to the first message
        in milliseconds, wall seconds, and the server's CPU microseconds per stream."""
        request = messages.to_bytes(2, "big")
        if self.method == GENERATE:
            sampling = pb.Sampling(max_tokens=messages - 1, ignore_eos=True)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling).SerializeToString()
        before_s, begun_s = cpu_s([self.process]), time.monotonic()
        done = bare_load(self.target, self.method, request, messages, streams, seconds)
        cpu_us, wall_s = (cpu_s([self.process]) - before_s) * 1e6, time.monotonic() - begun_s
        first_ms = pandas.Series(done.first_ms).median()
        return {"finished": done.streams, "first_ms": first_ms, "wall_s": wall_s, "cpu_us": cpu_us / done.streams}


def _windows(servers: Mapping[str, Server], messages: int, streams: int, sizes: Sizes) -> pandas.DataFrame:
    """Medians of windows of load, by server."""
    rows = [
        {"repeat": number, "server": name, **servers[name].load(messages, streams, sizes.window_s)}
        for number, name in in_turns(servers, sizes.rounds, sizes.warm_up)
    ]
    return pandas.DataFrame(rows).query("repeat >= 0").groupby("server").median()


@contextlib.contextmanager
def _gateway(core: int, workers: int, step_ms: float = STEP_MS, settings: Mapping[str, Any] | None = None) -> Any:
    """One gateway, on a core of its own."""
    with _gateways_over(1, workers, step_ms, settings or {}) as (server,):
        yield _pinned(server, core)


@contextlib.contextmanager
def _gateways_over(count: int, workers: int, step_ms: float, settings: Mapping[str, Any]) -> Iterator[list[Server]]:
    """So many gateways over the same stub workers, which are ready. SystemExit, with the end of their logs, if they do
    not come up."""
    secret, port, registry_port = ServiceSecret.new(), *(free_ports("127.0.0.1", count=count) for _ in range(2))
    overrides = {"model.path": "tiny", "gateway.host": "127.0.0.1", "gateway.port": port, "gateway.replicas": count}
    config = PdserveConfig.load(None, {**settings, **overrides})
    registries = [f"127.0.0.1:{registry_port + number}" for number in range(count)]
    stubs = call(work, workers, registries, step_ms / 1e3)
    replicas = (config.model_copy(update={"gateway": config.gateway.replica(number)}) for number in range(count))
    programs = [program("gateway", own.model_dump_json(), each) for own, each in zip(replicas, registries, strict=True)]
    with contextlib.ExitStack() as stack:
        _, *gateways = children = [
            stack.enter_context(ChildProcess(command[3], command, secret.environment(), talks=False))
            for command in (stubs, *programs)
        ]
        servers = [
            Server(f"127.0.0.1:{port + number}", psutil.Process(child.pid)) for number, child in enumerate(gateways)
        ]
        until_s = time.monotonic() + START_S
        while not all(_is_ready(server.target, workers) for server in servers):
            if time.monotonic() > until_s:
                logs = "".join(child.log_tail() for child in children)
                raise SystemExit(f"gateway and workers were not ready within {START_S:g} s{logs}")
            time.sleep(0.1)
        yield servers


def _is_ready(target: str, workers: int) -> bool:
    with Client(target) as client, contextlib.suppress(PdserveError):
        linked = [len(worker.links) == workers // 2 for worker in client.status().workers]
        return len(linked) == workers and sum(linked) == workers // 2
    return False


def _pinned(server: Server, core: int) -> Server:
    for thread in server.process.threads():
        os.sched_setaffinity(thread.id, {core})
    server.process.cpu_affinity([core])
    return server


# --- one gateway beside a bare server --------------------------------------------------------------------------------


def _router(sizes: Sizes) -> dict[str, Any]:
    if len(CORES) < 2:
        raise SystemExit("the measured server and its clients need a core each; this process may use one only")
    core, *others = CORES
    os.sched_setaffinity(0, others)
    try:
        with bare_server("echo") as (target, pid):
            bare = _pinned(Server(target, psutil.Process(pid), ECHO), core)
            with _gateway(core, FEW) as server:
                servers = {"gateway": server, "echo": bare}
                result = {name: _shape(servers, name, messages, sizes) for name, messages in SHAPES.items()}
            with _gateway(core, FEW, 0.0) as server:
                first_ms = _windows({"gateway": server, "echo": bare}, SHAPES["s4"], 1, sizes).first_ms
        flat = {"workers": _many_workers(core, sizes), "waiting": _many_waiting(core, sizes)}
    finally:
        os.sched_setaffinity(0, CORES)
    return {**result, "added_latency_p50_ms": first_ms["gateway"] - first_ms["echo"], "flat": flat}


def _shape(servers: Mapping[str, Server], name: str, messages: int, sizes: Sizes) -> dict[str, Any]:
    """The rate on one core, beside the echo's."""
    found = _windows(servers, messages, STREAMS, sizes)
    unit, scale = ("requests", 1) if name == "s4" else ("messages", messages)
    rates = pandas.DataFrame({
        f"{unit}_per_s": 1e6 * scale / found.cpu_us,
        f"{unit}_per_s_by_wall": scale * found.finished / found.wall_s,
    })  # fmt: skip
    cost_us = found.cpu_us
    return {
        **rates.loc["gateway"],
        **rates.loc["echo"].add_prefix("echo_"),
        "x_echo": cost_us["echo"] / cost_us["gateway"],
        "cpu_us": cost_us,
    }


def _many_workers(core: int, sizes: Sizes) -> dict[str, Any]:
    """The gateway's CPU time per request, less that of heartbeats, with few and many workers."""
    with _gateway(core, FEW) as few, _gateway(core, sizes.many) as many:
        servers = {"few": few, "many": many}
        found = _windows(servers, SHAPES["s4"], STREAMS, sizes)
        idle = {}
        for name, server in servers.items():
            before_s = cpu_s([server.process])
            time.sleep(sizes.window_s)
            idle[name] = (cpu_s([server.process]) - before_s) / sizes.window_s
    return _ratio(FEW, sizes.many, found.cpu_us - pandas.Series(idle) * found.wall_s * 1e6 / found.finished)


def _many_waiting(core: int, sizes: Sizes) -> dict[str, Any]:
    """The same with few and many waiting requests. One prompt at a time is taken: all other open streams wait."""
    settings = {"router.max_queue": 4 * sizes.waiting, "router.prefill_backlog_tokens": 1}
    with _gateway(core, FEW, settings=settings) as server:
        few = _windows({"few": server}, SHAPES["s4"], FEW_WAITING, sizes).cpu_us["few"]
        many = server.load(SHAPES["s4"], sizes.waiting, 3 * sizes.window_s)["cpu_us"]
    return _ratio(FEW_WAITING, sizes.waiting, {"few": few, "many": many})


def _ratio(few: int, many: int, cost_us: Any) -> dict[str, Any]:
    return {"few": few, "many": many, "us": cost_us, "ratio": cost_us["many"] / cost_us["few"]}


# --- several gateways ------------------------------------------------------------------------------------------------


def _gateways(sizes: Sizes) -> dict[str, Any]:
    one_us, two_us = (_gateways_us(count, sizes) for count in (1, 2))
    costs = pandas.DataFrame({"us_per_request_1": one_us, "us_per_request_2": two_us, "x": 2 * one_us / two_us})
    gaps_s = pandas.Series(asyncio.run(_killed(sizes.tokens)))
    resumed = {"resumed": len(gaps_s), "resume_p50_s": gaps_s.median(), "resume_max_s": gaps_s.max()}
    return {**costs.T, **resumed}


def _gateways_us(count: int, sizes: Sizes) -> pandas.Series:
    """CPU microseconds per request, over all gateways, by shape."""
    rows = []
    with _gateways_over(count, GATEWAYS_WORKERS, STEP_MS, {}) as servers, ThreadPoolExecutor(count) as threads:
        for number, name in in_turns(SHAPES, sizes.rounds, sizes.warm_up):
            loads = [threads.submit(server.load, SHAPES[name], GATEWAY_STREAMS, sizes.window_s) for server in servers]
            found = pandas.DataFrame([load.result() for load in loads])
            rows.append((number, name, (found.cpu_us * found.finished).sum() / found.finished.sum()))
    costs = pandas.DataFrame(rows, columns=["repeat", "shape", "us"])
    return costs.query("repeat >= 0").groupby("shape").us.median()


async def _killed(tokens: int) -> list[float]:
    """Seconds from a gateway's death to the next token of each of its streams, which have so many tokens."""
    with _gateways_over(2, GATEWAYS_WORKERS, SLOW_STEP_MS, {}) as servers:
        async with AsyncClient([server.target for server in servers]) as client:
            streams = [client.generate(PROMPT, max_tokens=tokens, ignore_eos=True) for _ in range(STREAMS)]
            for _ in range(20):
                await asyncio.gather(*(anext(stream) for stream in streams))
            hit = [stream for stream in streams if stream.target == servers[0].target]
            reading = [asyncio.create_task(stream.result()) for stream in streams]
            await asyncio.sleep(0.5)
            servers[0].process.kill()
            killed_s = time.monotonic()
            generations = await asyncio.gather(*reading)
    gaps_s = []
    for stream, generation in zip(streams, generations, strict=True):
        if len(generation.token_ids) != tokens or generation.resumes != (stream in hit):
            raise SystemExit(f"a stream has {len(generation.token_ids)} tokens after {generation.resumes} resumes")
        if generation.resumes:
            gaps_s.append(min(t.arrived_s for t in generation.tokens if t.arrived_s > killed_s) - killed_s)
    return gaps_s


if __name__ == "__main__":
    run(front_door)
