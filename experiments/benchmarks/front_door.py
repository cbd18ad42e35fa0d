"""The front door under load: `python -m experiments.benchmarks.front_door`. Its parts:

- ``router``: the gateway, with workers that speak the real protocols and compute nothing
  (`experiments.benchmarks.front_door_ends`), beside a bare `grpc.aio` server that streams messages of the same shape.
  The server that is measured has a core of its own; clients and stub workers have another one. Windows alternate. A
  server's rate is what it does per second of its own CPU time, which is its rate on one core however slow the clients
  are. Then: the latency that the gateway adds to an idle request, the cost of a request with 2 and 200 workers and with
  10,000 waiting requests, and what metrics and traces cost the gateway, beside the CPU time of all processes of a
  service with engines.
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
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import psutil

from experiments.benchmarks.bare_grpc import ECHO, GENERATE, bare_load, bare_server
from experiments.benchmarks.frame import Only, Quick, cpu_s, measured, note, parts, run
from experiments.child_process import ChildProcess
from ops.launch.ports import free_port, free_ports
from pdserve import AsyncClient, AsyncStream, Client
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from pdserve.pb import inference_pb2 as pb
from runtime.secret import ServiceSecret
from tests.local_cluster import local_cluster

ENDS = "experiments.benchmarks.front_door_ends"
START_S = 60.0
PROMPT = tuple(range(10, 74))
SHAPES = {"s4": 4, "s128": 128}
"""Messages of a stream, the completion included."""
STEP_MS = 2.0
STREAMS = 32
FEW, FEW_WAITING = 2, 8
SCRAPE_S = 5.0
OBSERVED_MESSAGES, SERVICE_STREAMS = 33, 4
CORES = sorted(os.sched_getaffinity(0))
GATEWAYS_WORKERS, GATEWAY_STREAMS = 4, 16
"""Of the part ``gateways``: workers, and streams that are open on each gateway. Fewer would cost more each, because a
gateway gets the tokens of all its requests of a step in one message."""
KILLED_STREAMS = 32
SLOW_STEP_MS = 10.0


class Sizes(NamedTuple):
    """``rounds`` windows of each kind, after ``warm_up`` others. ``many`` workers and ``waiting`` requests are what few
    of them are compared with; ``tokens`` has each stream whose gateway is killed."""

    rounds: int = 5
    window_s: float = 4.0
    warm_up: int = 1
    many: int = 200
    waiting: int = 10_000
    tokens: int = 1000


QUICK = Sizes(rounds=1, window_s=0.3, warm_up=0, many=8, waiting=100, tokens=400)


def front_door(only: Only = "", quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    sizes = QUICK if quick else Sizes()
    return parts(only, router=lambda: _router(sizes), gateways=lambda: _gateways(sizes))


# --- servers under load ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """A window of load: finished streams, the server's CPU seconds, wall seconds, milliseconds to the first message."""

    finished: int
    cpu_s: float
    wall_s: float
    first_ms: Sequence[float]

    @property
    def cpu_us(self) -> float:
        """The server's CPU time per stream in microseconds."""
        return self.cpu_s * 1e6 / self.finished


@dataclass(frozen=True)
class Server:
    """A server under load, which is called by ``method``."""

    target: str
    processes: tuple[psutil.Process, ...]
    method: str = GENERATE

    def cpu_s(self) -> float:
        """The CPU time so far of its processes and their children."""
        return cpu_s(each for process in self.processes for each in (process, *process.children(recursive=True)))

    def load(self, messages: int, streams: int, seconds: float) -> Window:
        """Keep so many streams open, each with that many messages."""
        request = messages.to_bytes(2, "big")
        if self.method == GENERATE:
            sampling = pb.Sampling(max_tokens=messages - 1, ignore_eos=True)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling).SerializeToString()
        before_s, begun_s = self.cpu_s(), time.monotonic()
        done = bare_load(self.target, self.method, request, messages, streams, seconds)
        return Window(done.streams, self.cpu_s() - before_s, time.monotonic() - begun_s, done.first_ms)


@contextlib.contextmanager
def _echo(core: int) -> Iterator[Server]:
    """A bare server that streams messages back."""
    with bare_server("echo") as (target, pid):
        process = psutil.Process(pid)
        _pin(process, core)
        yield Server(target, (process,), ECHO)


@contextlib.contextmanager
def _gateway(core: int, workers: int, step_ms: float = STEP_MS, **options: Any) -> Iterator[Server]:
    """One gateway, on a core of its own."""
    with _servers(1, workers, step_ms, **options) as (server,):
        _pin(server.processes[0], core)
        yield server


@contextlib.contextmanager
def _servers(
    count: int, workers: int, step_ms: float, *, settings: Mapping[str, Any] | None = None, observed: bool = True
) -> Iterator[list[Server]]:
    """So many gateways over the same stub workers, which are ready. SystemExit, with the end of their logs, if they do
    not come up."""
    secret, port, registry_port = ServiceSecret.new(), *(free_ports("127.0.0.1", 0, count) for _ in range(2))
    overrides = {"model.path": "tiny", "gateway.host": "127.0.0.1", "gateway.port": port, "gateway.replicas": count}
    config = PdserveConfig.load(None, {**(settings or {}), **overrides})
    registries = [f"127.0.0.1:{registry_port + number}" for number in range(count)]
    program = ("gateway",) if observed else (ENDS, "unobserved")
    commands = [(ENDS, "workers", str(workers), ",".join(registries), str(step_ms))]
    for number, registry in enumerate(registries):
        own = config.model_copy(update={"gateway": config.gateway.replica(number)})
        commands.append((*program, own.model_dump_json(), registry))
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(ChildProcess(command[0], *command, environment=secret.environment()))
            for command in commands
        ]
        servers = [
            Server(f"127.0.0.1:{port + number}", (psutil.Process(child.pid),))
            for number, child in enumerate(children[1:])
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


def _pin(process: psutil.Process, core: int) -> None:
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})
    process.cpu_affinity([core])


# --- one gateway beside a bare server --------------------------------------------------------------------------------


def _router(sizes: Sizes) -> dict[str, Any]:
    if len(CORES) < 2:
        raise SystemExit("the measured server and its clients need a core each; this process may use one only")
    os.sched_setaffinity(0, set(CORES[1:]))
    core = CORES[0]
    try:
        with _echo(core) as bare:
            with _gateway(core, FEW) as server:
                servers = {"gateway": server, "echo": bare}
                result = {name: _shape(servers, name, messages, sizes) for name, messages in SHAPES.items()}
            with _gateway(core, FEW, 0.0) as server:
                found = _alternate({"gateway": server, "echo": bare}, SHAPES["s4"], 1, sizes)
        first_ms = {name: statistics.median(ms for each in its for ms in each.first_ms) for name, its in found.items()}
        flat = {"workers": _many_workers(core, sizes), "waiting": _many_waiting(core, sizes)}
        gateway_us = _observed(core, sizes)
    finally:
        os.sched_setaffinity(0, set(CORES))
    service_us = _service_us(sizes)
    return {
        **result,
        "added_latency_p50_ms": first_ms["gateway"] - first_ms["echo"],
        "flat": flat,
        "observed": {
            "messages": OBSERVED_MESSAGES,
            "gateway_us": gateway_us,
            "service_us": service_us,
            "added_to_service": {
                name: (cost_us - gateway_us["unobserved"]) / service_us
                for name, cost_us in gateway_us.items()
                if name != "unobserved"
            },
        },
    }


def _shape(servers: Mapping[str, Server], name: str, messages: int, sizes: Sizes) -> dict[str, Any]:
    """The rate on one core, beside the echo's."""
    found = _alternate(servers, messages, STREAMS, sizes)
    cost_us = _costs_us(found)
    unit, scale = ("requests", 1) if name == "s4" else ("messages", messages)
    rates: dict[str, Any] = {}
    for which, prefix in (("gateway", ""), ("echo", "echo_")):
        rates[f"{prefix}{unit}_per_s"] = 1e6 * scale / cost_us[which]
        by_wall = statistics.median(each.finished / each.wall_s for each in found[which])
        rates[f"{prefix}{unit}_per_s_by_wall"] = scale * by_wall
    return {**rates, "x_echo": cost_us["echo"] / cost_us["gateway"], "cpu_us": cost_us}


def _many_workers(core: int, sizes: Sizes) -> dict[str, Any]:
    """The gateway's CPU time per request, less that of heartbeats, with few and many workers."""
    with _gateway(core, FEW) as few, _gateway(core, sizes.many) as many:
        servers = {"few": few, "many": many}
        found = _alternate(servers, SHAPES["s4"], STREAMS, sizes)
        idle = {}
        for which, server in servers.items():
            before_s = server.cpu_s()
            time.sleep(sizes.window_s)
            idle[which] = (server.cpu_s() - before_s) / sizes.window_s
    cost_us = {
        which: statistics.median((each.cpu_s - idle[which] * each.wall_s) * 1e6 / each.finished for each in windows)
        for which, windows in found.items()
    }
    return {"few": FEW, "many": sizes.many, "us": cost_us, "ratio": cost_us["many"] / cost_us["few"]}


def _many_waiting(core: int, sizes: Sizes) -> dict[str, Any]:
    """The same with few and many waiting requests. One prompt at a time is taken: all other open streams wait."""
    settings = {"router.max_queue": 4 * sizes.waiting, "router.prefill_backlog_tokens": 1}
    with _gateway(core, FEW, settings=settings) as server:
        few = [server.load(4, FEW_WAITING, sizes.window_s) for _ in range(sizes.rounds)]
        cost_us = _costs_us({"few": few, "many": [server.load(4, sizes.waiting, 3 * sizes.window_s)]})
    return {"few": FEW_WAITING, "many": sizes.waiting, "us": cost_us, "ratio": cost_us["many"] / cost_us["few"]}


def _observed(core: int, sizes: Sizes) -> dict[str, float]:
    """The gateway's CPU time per request, as it is for metrics, live view and a scrape every five seconds, with traces
    in addition, and without all of them."""
    with contextlib.ExitStack() as stack:
        traces = {"gateway.otlp_endpoint": stack.enter_context(_collector())}
        servers = {"unobserved": stack.enter_context(_gateway(core, FEW, observed=False))}
        for name, settings in (("metrics", {}), ("metrics and traces", traces)):
            http_port = free_port("127.0.0.1", 0)
            server = _gateway(core, FEW, settings={**settings, "gateway.http_port": http_port})
            servers[name] = stack.enter_context(server)
            stack.enter_context(_scraped(f"http://127.0.0.1:{http_port}/metrics"))
        return _costs_us(_alternate(servers, OBSERVED_MESSAGES, STREAMS, sizes))


def _service_us(sizes: Sizes) -> float:
    """What a whole service with engines takes for such a request."""
    note("a service with engines")
    with local_cluster({"model": {"path": "tiny"}}) as cluster:
        processes = tuple(psutil.Process(process.pid) for process in cluster.processes.values())
        service = Server(cluster.target, processes)
        windows = [service.load(OBSERVED_MESSAGES, SERVICE_STREAMS, 2 * sizes.window_s) for _ in range(3)]
    return statistics.median(each.cpu_us for each in windows[1:])  # after a warm-up


def _alternate(servers: Mapping[str, Server], messages: int, streams: int, sizes: Sizes) -> dict[str, list[Window]]:
    def load(name: str) -> Window:
        return servers[name].load(messages, streams, sizes.window_s)

    return measured(servers, load, sizes.rounds, sizes.warm_up)


def _costs_us(found: Mapping[str, Sequence[Window]]) -> dict[str, float]:
    return {which: statistics.median(each.cpu_us for each in windows) for which, windows in found.items()}


@contextlib.contextmanager
def _scraped(url: str) -> Iterator[None]:
    """Read metrics, as Prometheus does."""
    stopped = threading.Event()

    def scrape() -> None:
        while not stopped.wait(SCRAPE_S):
            with urllib.request.urlopen(url, timeout=10) as answer:
                answer.read()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(scrape)
        try:
            yield
        finally:
            stopped.set()


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Takes traces and drops them."""
    server = grpc.server(ThreadPoolExecutor(2))
    drop: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(lambda data, context: b"")
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": drop}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


# --- several gateways ------------------------------------------------------------------------------------------------


def _gateways(sizes: Sizes) -> dict[str, Any]:
    one_us, two_us = (_gateways_us(count, sizes) for count in (1, 2))
    gaps_s = asyncio.run(_killed(sizes.tokens))
    return {
        **{
            name: {
                "us_per_request_1": one_us[name],
                "us_per_request_2": two_us[name],
                "x": 2 * one_us[name] / two_us[name],
            }
            for name in SHAPES
        },
        "resumed": len(gaps_s),
        "resume_p50_s": statistics.median(gaps_s),
        "resume_max_s": max(gaps_s),
    }


def _gateways_us(count: int, sizes: Sizes) -> dict[str, float]:
    """CPU microseconds per request, over all gateways, by shape."""
    with _servers(count, GATEWAYS_WORKERS, STEP_MS) as servers, ThreadPoolExecutor(count) as threads:

        def cost_us(name: str) -> float:
            loads = [threads.submit(server.load, SHAPES[name], GATEWAY_STREAMS, sizes.window_s) for server in servers]
            windows = [load.result() for load in loads]
            return 1e6 * sum(window.cpu_s for window in windows) / sum(window.finished for window in windows)

        found = measured(SHAPES, cost_us, sizes.rounds, sizes.warm_up)
    return {name: statistics.median(costs) for name, costs in found.items()}


async def _killed(tokens: int) -> list[float]:
    """Seconds from a gateway's death to the next token of each of its streams, which have so many tokens."""
    with _servers(2, GATEWAYS_WORKERS, SLOW_STEP_MS) as servers:
        async with AsyncClient([server.target for server in servers]) as client:
            streams = [client.generate(PROMPT, max_tokens=tokens, ignore_eos=True) for _ in range(KILLED_STREAMS)]
            await asyncio.gather(*(_read(stream, 20) for stream in streams))
            hit = [stream for stream in streams if stream.target == servers[0].target]
            reading = [asyncio.create_task(stream.result()) for stream in streams]
            await asyncio.sleep(0.5)
            servers[0].processes[0].kill()
            killed_s = time.monotonic()
            generations = await asyncio.gather(*reading)
    gaps_s = []
    for stream, generation in zip(streams, generations, strict=True):
        if len(generation.token_ids) != tokens or generation.resumes != (stream in hit):
            raise SystemExit(f"a stream has {len(generation.token_ids)} tokens after {generation.resumes} resumes")
        if generation.resumes:
            gaps_s.append(min(t.arrived_s for t in generation.tokens if t.arrived_s > killed_s) - killed_s)
    return gaps_s


async def _read(stream: AsyncStream, count: int) -> None:
    for _ in range(count):
        await anext(stream)


if __name__ == "__main__":
    run(front_door)
