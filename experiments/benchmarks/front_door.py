"""Gateways in processes of their own, over stub workers and without Ray, and what a window of load costs them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from experiments.benchmarks.bare_grpc import ECHO, GENERATE, bare_load, bare_server
from experiments.benchmarks.frame import cpu_s
from ops.launch.ports import free_ports
from pdserve import Client
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from pdserve.pb import inference_pb2 as pb
from runtime.secret import ServiceSecret

PROMPT = tuple(range(10, 74))
SHAPES = {"s4": 4, "s128": 128}
"""Messages of a stream, the completion included."""
STEP_MS = 2.0
_START_S = 60.0
_LOG_BYTES = 2000


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
def echo(core: int) -> Iterator[Server]:
    """A bare server that streams messages back."""
    with bare_server("echo") as (target, pid):
        process = psutil.Process(pid)
        _pin(process, core)
        yield Server(target, (process,), ECHO)


@contextlib.contextmanager
def gateway(core: int, workers: int, step_ms: float = STEP_MS, **options: Any) -> Iterator[Server]:
    """One of `gateways`, on a core of its own."""
    with gateways(1, workers, step_ms, **options) as (server,):
        _pin(server.processes[0], core)
        yield server


@contextlib.contextmanager
def gateways(
    count: int, workers: int, step_ms: float, *, settings: Mapping[str, Any] | None = None, module: str = "gateway"
) -> Iterator[list[Server]]:
    """So many gateways over the same stub workers, which are ready. SystemExit, with the end of their log, if they do
    not come up."""
    secret, port, registry_port = ServiceSecret.new(), _ports(count), _ports(count)
    overrides = {"model.path": "tiny", "gateway.host": "127.0.0.1", "gateway.port": port, "gateway.replicas": count}
    config = PdserveConfig.load(None, {**(settings or {}), **overrides})
    registries = [f"127.0.0.1:{registry_port + number}" for number in range(count)]
    commands = [["experiments.benchmarks.stub_workers", str(workers), ",".join(registries), str(step_ms)]]
    for number, registry in enumerate(registries):
        own = config.model_copy(update={"gateway": config.gateway.replica(number)})
        commands.append([module, own.model_dump_json(), registry])
    with contextlib.ExitStack() as stack, tempfile.TemporaryFile() as log:
        processes = []
        for arguments in commands:
            command = [sys.executable, "-m", *arguments]
            environment = {**os.environ, **secret.environment()}
            process = stack.enter_context(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            stack.callback(process.terminate)
            processes.append(psutil.Process(process.pid))
        servers = [Server(f"127.0.0.1:{port + number}", (each,)) for number, each in enumerate(processes[1:])]
        until_s = time.monotonic() + _START_S
        while not all(_is_ready(server.target, workers) for server in servers):
            if time.monotonic() > until_s:
                log.seek(-min(_LOG_BYTES, log.tell()), os.SEEK_END)
                raise SystemExit(f"gateway and workers were not ready within {_START_S:g} s:\n{log.read().decode()}")
            time.sleep(0.1)
        yield servers


def _is_ready(target: str, workers: int) -> bool:
    with Client(target) as client, contextlib.suppress(PdserveError):
        linked = [len(worker.links) == workers // 2 for worker in client.status().workers]
        return len(linked) == workers and sum(linked) == workers // 2
    return False


def _ports(count: int) -> int:
    return free_ports("127.0.0.1", 0, count)


def _pin(process: psutil.Process, core: int) -> None:
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})
    process.cpu_affinity([core])
