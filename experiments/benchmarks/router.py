"""The front door under load: `python -m experiments.benchmarks.router`.

The gateway, with workers that speak the real protocols and compute nothing (`experiments.benchmarks.stub_workers`), beside a bare
`grpc.aio` server that streams messages of the same shape. The server that is measured has a core of its own; clients
and stub workers have another one. Windows alternate. A server's rate is what it does per second of its own CPU time,
which is its rate on one core however slow the clients are. Then: the latency that the gateway adds to an idle request,
the cost of a request with 2 and 200 workers and with 10,000 waiting requests, and what metrics and traces cost the
gateway, beside the CPU time of all processes of a service with engines."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import grpc
import psutil
import typer

from experiments.benchmarks.frame import Quick, in_turns, note, run
from experiments.benchmarks.front_door import SHAPES, Server, Window, echo, gateway
from ops.launch.ports import free_port
from tests.local_cluster import local_cluster

STREAMS = 32
FEW, FEW_WAITING = 2, 8
SCRAPE_S = 5.0
OBSERVED_MESSAGES, SERVICE_STREAMS = 33, 4
UNOBSERVED = "experiments.benchmarks.unobserved_gateway"
CORES = sorted(os.sched_getaffinity(0))


class Sizes(NamedTuple):
    """``rounds`` windows of each kind, after ``warm_up`` others. ``many`` workers and ``waiting`` requests are what few
    of them are compared with."""

    rounds: int
    window_s: float
    warm_up: int = 1
    many: int = 200
    waiting: int = 10_000


QUICK = Sizes(rounds=1, window_s=0.3, warm_up=0, many=8, waiting=100)


def router(
    rounds: Annotated[int, typer.Option(min=1, help="windows of each kind")] = 5,
    window_s: Annotated[float, typer.Option(min=0.5, help="length of a window, seconds")] = 4.0,
    quick: Quick = False,
) -> dict[str, Any]:
    """Measure."""
    if len(CORES) < 2:
        raise SystemExit("the measured server and its clients need a core each; this process may use one only")
    os.sched_setaffinity(0, set(CORES[1:]))
    sizes = QUICK if quick else Sizes(rounds, window_s)
    core = CORES[0]
    result = {}
    with echo(core) as bare:
        with gateway(core, FEW) as server:
            for name, messages in SHAPES.items():
                result[name] = _shape({"gateway": server, "echo": bare}, name, messages, sizes)
        with gateway(core, FEW, 0.0) as server:
            found = _alternate({"gateway": server, "echo": bare}, SHAPES["s4"], 1, sizes)
    first_ms = {
        which: statistics.median(ms for each in windows for ms in each.first_ms) for which, windows in found.items()
    }
    return {
        **result,
        "added_latency_p50_ms": first_ms["gateway"] - first_ms["echo"],
        "flat": {"workers": _many_workers(core, sizes), "waiting": _many_waiting(core, sizes)},
        "observed": _observed(core, sizes),
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
    with gateway(core, FEW) as few, gateway(core, sizes.many) as many:
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
    with gateway(core, FEW, settings=settings) as server:
        few = [server.load(4, FEW_WAITING, sizes.window_s) for _ in range(sizes.rounds)]
        cost_us = _costs_us({"few": few, "many": [server.load(4, sizes.waiting, 3 * sizes.window_s)]})
    return {"few": FEW_WAITING, "many": sizes.waiting, "us": cost_us, "ratio": cost_us["many"] / cost_us["few"]}


def _observed(core: int, sizes: Sizes) -> dict[str, Any]:
    """The gateway's CPU time per request, as it is for metrics, live view and a scrape every five seconds, with traces
    in addition, and without all of them; and what a whole service with engines takes for such a request."""
    with contextlib.ExitStack() as stack:
        traces = {"gateway.otlp_endpoint": stack.enter_context(_collector())}
        servers = {"unobserved": stack.enter_context(gateway(core, FEW, module=UNOBSERVED))}
        for name, settings in (("metrics", {}), ("metrics and traces", traces)):
            http_port = free_port("127.0.0.1", 0)
            server = gateway(core, FEW, settings={**settings, "gateway.http_port": http_port})
            servers[name] = stack.enter_context(server)
            stack.enter_context(_scraped(f"http://127.0.0.1:{http_port}/metrics"))
        cost_us = _costs_us(_alternate(servers, OBSERVED_MESSAGES, STREAMS, sizes))
    os.sched_setaffinity(0, set(CORES))
    note("a service with engines")
    with local_cluster({"model": {"path": "tiny"}}) as cluster:
        processes = tuple(psutil.Process(process.pid) for process in cluster.processes.values())
        service = Server(cluster.target, processes)
        windows = [service.load(OBSERVED_MESSAGES, SERVICE_STREAMS, 2 * sizes.window_s) for _ in range(3)]
    service_us = statistics.median(each.cpu_us for each in windows[1:])  # after a warm-up
    return {
        "messages": OBSERVED_MESSAGES,
        "gateway_us": cost_us,
        "service_us": service_us,
        "added_to_service": {
            name: (cost_us[name] - cost_us["unobserved"]) / service_us for name in cost_us if name != "unobserved"
        },
    }


def _alternate(servers: Mapping[str, Server], messages: int, streams: int, sizes: Sizes) -> dict[str, list[Window]]:
    found: dict[str, list[Window]] = {name: [] for name in servers}
    for number, name in in_turns(servers, sizes.rounds, sizes.warm_up):
        window = servers[name].load(messages, streams, sizes.window_s)
        if number >= 0:
            found[name].append(window)
    return found


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


if __name__ == "__main__":
    run(router)
