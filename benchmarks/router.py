"""The front door under load: `python -m benchmarks.router`.

The gateway, with workers that speak the real protocols and compute nothing (`benchmarks.stub_workers`), beside a bare
`grpc.aio` server that streams messages of the same shape (`benchmarks.echo_server`). The server that is measured has a
core of its own; clients and stub workers have another one. Windows alternate. A server's rate is what it does per
second of its own CPU time, which is its rate on one core however slow the clients are. Then: the latency that the
gateway adds to an idle request, the cost of a request with 2 and 200 workers and with 10,000 waiting requests, and what
metrics and traces cost the gateway, beside the CPU time of all processes of a service with engines. Tables, then one
JSON line. ``--part`` measures some of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import grpc
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.bare_server import started
from benchmarks.quick import Quick
from benchmarks.router_client import Finished
from experiments.messages import message_of
from pdserve import Client
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role
from pdserve.pb import inference_pb2 as pb
from pdserve.version import VERSION
from runtime.secret import ServiceSecret
from tests.local_cluster import free_port
from worker.spec import WorkerSpec

GENERATE = "/pdserve.v1.Inference/Generate"
ECHO = "/echo/Generate"
PROMPT = tuple(range(10, 74))
SHAPES = {"s4": 4, "s128": 128}
STREAMS = 32
FEW = 2
STEP_MS = 2.0
SCRAPE_S = 5.0
_LOG_LINES = 12
OBSERVED_MESSAGES, SERVICE_STREAMS = 33, 4
CORES = sorted(os.sched_getaffinity(0))


class Sizes(NamedTuple):
    """``rounds`` windows of each kind, after a warm-up. ``many`` workers and ``waiting`` requests are what few of them
    are compared with."""

    rounds: int
    window_s: float
    warm_up_s: float = 1.0
    many: int = 200
    waiting: int = 10_000


QUICK = Sizes(rounds=1, window_s=0.3, warm_up_s=0.0, many=8, waiting=100)


@dataclass(frozen=True)
class Server:
    """A server under load. ``request`` is what clients send for streams with a given number of messages."""

    target: str
    method: str
    processes: tuple[psutil.Process, ...]

    def cpu_s(self) -> float:
        """The CPU time so far of its processes and their children."""
        family = [each for process in self.processes for each in (process, *process.children(recursive=True))]
        return sum(times.user + times.system for times in (process.cpu_times() for process in family))

    def request(self, messages: int) -> bytes:
        """The request for a stream with so many messages, the completion included."""
        if self.method == ECHO:
            return messages.to_bytes(2, "big")
        sampling = pb.Sampling(max_tokens=messages - 1, ignore_eos=True)
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling).SerializeToString()


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


class Part(StrEnum):
    """A part of the benchmark."""

    SHAPES = "shapes"
    LATENCY = "latency"
    FLAT = "flat"
    OBSERVED = "observed"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="windows of each kind")] = 5,
    window_s: Annotated[float, typer.Option(min=0.5, help="length of a window, seconds")] = 4.0,
    part: Annotated[list[Part] | None, typer.Option(help="only this part; may be given several times")] = None,
    quick: Quick = False,
) -> None:
    """Measure."""
    console = Console(highlight=False)
    if len(CORES) < 2:
        raise SystemExit("the measured server and its clients need a core each; this process may use one only")
    os.sched_setaffinity(0, set(CORES[1:]))
    measures = {Part.SHAPES: _shapes, Part.LATENCY: _latency, Part.FLAT: _flat, Part.OBSERVED: _observed}
    result: dict[str, Any] = {}
    for each in part or Part:
        result |= measures[each](console, CORES[0], QUICK if quick else Sizes(rounds, window_s))
    print(json.dumps(result))  # noqa: T201 - the last line is for programs


def _shapes(console: Console, core: int, sizes: Sizes) -> dict[str, Any]:
    """The rate on one core, beside the echo's, for short and long streams."""
    table = Table("", "gateway", "bare echo", "ratio", box=None)
    result: dict[str, Any] = {}
    with _echo(core) as echo, _gateway(core, FEW, STEP_MS) as gateway:
        for name, messages in SHAPES.items():
            found = _alternate({"gateway": gateway, "echo": echo}, messages, STREAMS, sizes)
            per_stream = _medians_us(found)
            wall = {
                which: statistics.median(each.finished / each.wall_s for each in windows)
                for which, windows in found.items()
            }
            unit, scale = ("requests", 1) if messages == SHAPES["s4"] else ("messages", messages)
            ratio = per_stream["echo"] / per_stream["gateway"]
            rate = {which: 1e6 * scale / cost_us for which, cost_us in per_stream.items()}
            result[name] = {
                f"{unit}_per_s": round(rate["gateway"]),
                "x_echo": round(ratio, 3),
                f"echo_{unit}_per_s": round(rate["echo"]),
                f"{unit}_per_s_by_wall": round(wall["gateway"] * scale),
                f"echo_{unit}_per_s_by_wall": round(wall["echo"] * scale),
                "cpu_us": {which: round(cost_us) for which, cost_us in per_stream.items()},
            }
            table.add_row(
                f"{unit}/s of one core, {messages} messages",
                f"{rate['gateway']:.0f}",
                f"{rate['echo']:.0f}",
                f"{ratio:.2f}",
            )
    console.print(table)
    return result


def _latency(console: Console, core: int, sizes: Sizes) -> dict[str, Any]:
    """The time to the first message of one request at a time."""
    with _echo(core) as echo, _gateway(core, FEW, 0.0) as gateway:
        found = _alternate({"gateway": gateway, "echo": echo}, SHAPES["s4"], 1, sizes)
    p50 = {which: statistics.median(ms for each in windows for ms in each.first_ms) for which, windows in found.items()}
    console.print(f"first message, idle, p50: gateway {p50['gateway']:.2f} ms, bare echo {p50['echo']:.2f} ms")
    return {"added_latency_p50_ms": round(p50["gateway"] - p50["echo"], 3)}


def _flat(console: Console, core: int, sizes: Sizes) -> dict[str, Any]:
    """The gateway's CPU time per request with few and many workers, and with few and many waiting requests."""
    table = Table("CPU per request, µs", "few", "many", "ratio", box=None)
    result: dict[str, Any] = {}
    with _gateway(core, FEW, STEP_MS) as few, _gateway(core, sizes.many, STEP_MS) as many:
        found = _alternate({"few": few, "many": many}, SHAPES["s4"], STREAMS, sizes)
        idle = {which: _idle_cpu_share(server, sizes.window_s) for which, server in (("few", few), ("many", many))}
    cost = {
        which: statistics.median((each.cpu_s - idle[which] * each.wall_s) * 1e6 / each.finished for each in windows)
        for which, windows in found.items()
    }
    result["workers"] = {"few": FEW, "many": sizes.many, "us": cost, "ratio": round(cost["many"] / cost["few"], 3)}
    table.add_row(
        f"{FEW} and {sizes.many} workers",
        *(f"{cost[each]:.0f}" for each in ("few", "many")),
        f"{cost['many'] / cost['few']:.2f}",
    )
    # Prompts of which only one at a time is taken: all others of the open streams wait.
    settings = {"router.max_queue": 4 * sizes.waiting, "router.prefill_backlog_tokens": 1}
    with _gateway(core, FEW, STEP_MS, settings) as gateway:
        waits = {
            "few": [_load(gateway, 4, 8, sizes.window_s) for _ in range(sizes.rounds)],
            "many": [_load(gateway, 4, sizes.waiting, 3 * sizes.window_s)],
        }
    cost = _medians_us(waits)
    result["waiting"] = {"few": 8, "many": sizes.waiting, "us": cost, "ratio": round(cost["many"] / cost["few"], 3)}
    table.add_row(
        f"8 and {sizes.waiting} streams, one prompt at a time",
        *(f"{cost[each]:.0f}" for each in ("few", "many")),
        f"{cost['many'] / cost['few']:.2f}",
    )
    console.print(table)
    return {"flat": result}


def _observed(console: Console, core: int, sizes: Sizes) -> dict[str, Any]:
    """The gateway's CPU time per request, as it is for metrics, live view and a scrape every five seconds, with traces
    in addition, and without all of them; and what a whole service with engines takes for such a request."""
    with _collector() as endpoint, contextlib.ExitStack() as stack:
        kinds: dict[str, dict[str, Any]] = {
            "unobserved": {"module": "benchmarks.unobserved_gateway"},
            "metrics": {"scraped": True},
            "metrics and traces": {"scraped": True, "settings": {"gateway.otlp_endpoint": endpoint}},
        }
        servers = {
            kind: stack.enter_context(_gateway(core, FEW, STEP_MS, **settings)) for kind, settings in kinds.items()
        }
        found = _alternate(servers, OBSERVED_MESSAGES, STREAMS, sizes)
    cost_us = _medians_us(found)
    os.sched_setaffinity(0, set(CORES))
    with _gateway(None, 0, 0.0, module="benchmarks.unobserved_gateway") as service:
        windows = [_load(service, OBSERVED_MESSAGES, SERVICE_STREAMS, 2 * sizes.window_s) for _ in range(3)]
    service_us = statistics.median(each.cpu_us for each in windows[1:])  # after a warm-up
    os.sched_setaffinity(0, set(CORES[1:]))
    table = Table(f"CPU per request of {OBSERVED_MESSAGES} messages, µs", *kinds, "service with engines", box=None)
    table.add_row("", *(f"{each:.0f}" for each in cost_us.values()), f"{service_us:.0f}")
    console.print(table)
    return {
        "observed": {
            "messages": OBSERVED_MESSAGES,
            "gateway_us": {kind: round(each) for kind, each in cost_us.items()},
            "service_us": round(service_us),
            "added_to_service": {
                kind: round((cost_us[kind] - cost_us["unobserved"]) / service_us, 4) for kind in list(kinds)[1:]
            },
        }
    }


# --- load ------------------------------------------------------------------------------------------------------------


def _alternate(servers: dict[str, Server], messages: int, streams: int, sizes: Sizes) -> dict[str, list[Window]]:
    found: dict[str, list[Window]] = {name: [] for name in servers}
    for server in servers.values() if sizes.warm_up_s else ():
        _load(server, messages, streams, sizes.warm_up_s)
    for number in range(sizes.rounds):
        for name in list(servers) if number % 2 == 0 else list(servers)[::-1]:
            found[name].append(_load(servers[name], messages, streams, sizes.window_s))
    return found


def _medians_us(found: Mapping[str, Sequence[Window]]) -> dict[str, float]:
    return {which: statistics.median(each.cpu_us for each in windows) for which, windows in found.items()}


def _load(server: Server, messages: int, streams: int, window_s: float) -> Window:
    request = server.request(messages).hex()
    command = [server.target, server.method, request, str(messages), str(streams), str(window_s)]
    before_s, begun_s = server.cpu_s(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.router_client", *command], check=True, stdout=subprocess.PIPE
    )
    cpu_s, wall_s = server.cpu_s() - before_s, time.monotonic() - begun_s
    answer = message_of(done.stdout, Finished, "benchmarks.router_client")
    return Window(answer.streams, cpu_s, wall_s, answer.first_ms)


def _idle_cpu_share(server: Server, window_s: float) -> float:
    """CPU seconds per second without requests: heartbeats."""
    before_s = server.cpu_s()
    time.sleep(window_s)
    return (server.cpu_s() - before_s) / window_s


# --- servers ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _echo(core: int) -> Iterator[Server]:
    with started("benchmarks.echo_server") as (port, pid):
        _pin(pid, core)
        yield Server(f"127.0.0.1:{port}", ECHO, (psutil.Process(pid),))


@contextlib.contextmanager
def _gateway(
    core: int | None,
    workers: int,
    step_ms: float,
    settings: dict[str, Any] | None = None,
    *,
    module: str = "gateway",
    scraped: bool = False,
) -> Iterator[Server]:
    secret, port, http_port, registry = ServiceSecret.new(), free_port(), free_port(), f"127.0.0.1:{free_port()}"
    config = PdserveConfig.load(
        None,
        {
            **(settings or {}),
            "model.path": "tiny",
            "gateway.host": "127.0.0.1",
            "gateway.port": port,
            "gateway.http_port": http_port if scraped else 0,
        },
    )
    environment = {**os.environ, **secret.environment()}
    stopped = threading.Event()
    with contextlib.ExitStack() as stack, TemporaryDirectory(prefix="pdserve-bench-") as folder:
        log_path = Path(folder, "log")
        log = stack.enter_context(log_path.open("wb"))
        processes = []
        for arguments in (*_workers(config, workers, registry, step_ms), [module, config.model_dump_json(), registry]):
            command = [sys.executable, "-m", *arguments]
            process = stack.enter_context(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            stack.callback(process.terminate)
            processes.append(psutil.Process(process.pid))
        if core is not None:
            _pin(process.pid, core)
            processes = processes[-1:]
        target = f"127.0.0.1:{port}"
        _wait_ready(target, workers or 2, process, log_path)
        if scraped:
            scraper = threading.Thread(target=_scrape, args=(f"http://127.0.0.1:{http_port}/metrics", stopped))
            scraper.start()
            stack.callback(scraper.join)
            stack.callback(stopped.set)
        yield Server(target, GENERATE, tuple(processes))


def _workers(config: PdserveConfig, stubs: int, registry: str, step_ms: float) -> list[list[str]]:
    """The commands that start stub workers, or without any, a prefill and a decode worker with engines."""
    if stubs:
        return [["benchmarks.stub_workers", str(stubs), registry, str(step_ms)]]
    commands = []
    for role in Role:
        spec = WorkerSpec(
            worker_id=f"{role}-0",
            role=role,
            host="127.0.0.1",
            node="127.0.0.1",
            device="cpu",
            registry_addresses=(registry,),
            version=VERSION,
            num_slots=len(Role),
            config=config,
        )
        commands.append(["ops.launch.worker", json.dumps(spec.to_wire())])
    return commands


def _wait_ready(target: str, workers: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a gateway and its workers, which write to ``log``. SystemExit has the end of that if they do not come
    up."""
    until_s = time.monotonic() + 60.0
    with Client(target) as client:
        while time.monotonic() < until_s:
            if process.poll() is not None:
                raise SystemExit(f"the gateway has ended{_end_of(log)}")
            with contextlib.suppress(PdserveError):
                status = client.status()
                linked = [worker for worker in status.workers if len(worker.links) == workers // 2]
                if len(status.workers) == workers and len(linked) == workers // 2:
                    return
            time.sleep(0.1)
    raise SystemExit(f"the workers were not ready within 60 s{_end_of(log)}")


def _end_of(log: Path) -> str:
    return "; the log ends with:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _scrape(url: str, stopped: threading.Event) -> None:
    while not stopped.wait(SCRAPE_S):
        with urllib.request.urlopen(url, timeout=10) as answer:
            answer.read()


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


def _pin(pid: int, core: int) -> None:
    process = psutil.Process(pid)
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})
    process.cpu_affinity([core])


if __name__ == "__main__":
    typer.run(main)
