"""Several gateways over the same workers: `python -m benchmarks.gateways`.

One gateway, then two, with stub workers (`benchmarks.stub_workers`) and clients that keep streams open on all gateways
at once. Gateways, workers and clients share this machine's cores, so the wall clock says little. What is measured is
the CPU time of the gateways per request: a gateway is one process with one thread at work, so N gateways with a core
each bear N divided by that per second. The ratio of two to one is 2 if a second gateway costs the first nothing.

Then one of two gateways is killed while clients that know both read streams: the time until each of its streams has its
next token, at another gateway. A table, then one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.quick import Quick
from benchmarks.router import GENERATE, PROMPT, SHAPES, STEP_MS, Server, _load, _wait_ready
from pdserve import AsyncClient, AsyncStream
from pdserve.core.config import PdserveConfig
from runtime.secret import ServiceSecret
from tests.local_cluster import free_ports

WORKERS = 4
STREAMS = 16
"""Streams that are open on each gateway. Fewer would cost more each, because a gateway gets the tokens of all its
requests of a step in one message."""
KILLED_STREAMS = 32
SLOW_STEP_MS = 10.0


def main(
    rounds: Annotated[int, typer.Option(min=1, help="windows of each kind")] = 3,
    window_s: Annotated[float, typer.Option(min=0.5, help="length of a window, seconds")] = 4.0,
    quick: Quick = False,
) -> None:
    """Measure."""
    warm_up_s, killed_tokens = 1.0, 1000
    if quick:
        rounds, window_s, warm_up_s, killed_tokens = 1, 0.3, 0.0, 400
    console = Console(highlight=False)
    result: dict[str, object] = {}
    table = Table("", "1 gateway", "2 gateways", "throughput of 2, a core each", box=None)
    cost_us = {count: _costs(count, rounds, window_s, warm_up_s) for count in (1, 2)}
    for name in SHAPES:
        one, two = cost_us[1][name], cost_us[2][name]
        result[name] = {"us_per_request_1": round(one), "us_per_request_2": round(two), "x": round(2 * one / two, 2)}
        table.add_row(
            f"CPU us per request, {SHAPES[name]} messages", f"{one:.0f}", f"{two:.0f}", f"{2 * one / two:.2f}x"
        )
    gaps_s = asyncio.run(_killed(killed_tokens))
    result["resumed"] = len(gaps_s)
    result["resume_p50_s"], result["resume_max_s"] = round(statistics.median(gaps_s), 3), round(max(gaps_s), 3)
    console.print(table)
    console.print(
        f"one of two killed: {len(gaps_s)} streams go on after {result['resume_p50_s']} s (p50), "
        f"{result['resume_max_s']} s (max)"
    )
    print(json.dumps(result))  # noqa: T201 - the last line is for programs


def _costs(count: int, rounds: int, window_s: float, warm_up_s: float) -> dict[str, float]:
    """CPU microseconds per request, over all gateways, by shape."""
    found: dict[str, float] = {}
    with _service(count, STEP_MS) as servers, ThreadPoolExecutor(count) as threads:
        for name, messages in SHAPES.items():

            def load(server: Server, messages: int = messages, seconds: float = window_s) -> tuple[float, int]:
                window = _load(server, messages, STREAMS, seconds)
                return window.cpu_s, window.finished

            if warm_up_s:
                list(threads.map(lambda server: load(server, seconds=warm_up_s), servers))
            costs = []
            for _ in range(rounds):
                windows = list(threads.map(load, servers))
                costs.append(1e6 * sum(cpu_s for cpu_s, _ in windows) / sum(finished for _, finished in windows))
            found[name] = statistics.median(costs)
    return found


async def _killed(tokens: int) -> Sequence[float]:
    """Seconds from a gateway's death to the next token of each of its streams, which have so many tokens."""
    with _service(2, SLOW_STEP_MS) as servers:
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


@contextlib.contextmanager
def _service(count: int, step_ms: float) -> Iterator[list[Server]]:
    """So many gateways over the same stub workers."""
    secret, port, registry_port = ServiceSecret.new(), free_ports(count), free_ports(count)
    overrides = {"model.path": "tiny", "gateway.host": "127.0.0.1", "gateway.port": port, "gateway.replicas": count}
    config = PdserveConfig.load(None, overrides)
    registries = [f"127.0.0.1:{registry_port + number}" for number in range(count)]
    commands = [["benchmarks.stub_workers", str(WORKERS), ",".join(registries), str(step_ms)]]
    for number, registry in enumerate(registries):
        own = config.model_copy(update={"gateway": config.gateway.replica(number)})
        commands.append(["gateway", own.model_dump_json(), registry])
    environment = {**os.environ, **secret.environment()}
    with contextlib.ExitStack() as stack, TemporaryDirectory(prefix="pdserve-bench-") as folder:
        log_path = Path(folder, "log")
        log = stack.enter_context(log_path.open("wb"))
        processes = []
        for arguments in commands:
            command = [sys.executable, "-m", *arguments]
            process = stack.enter_context(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            stack.callback(process.terminate)
            processes.append(process)
        servers = []
        for number, process in enumerate(processes[1:]):
            target = f"127.0.0.1:{port + number}"
            _wait_ready(target, WORKERS, process, log_path)
            servers.append(Server(target, GENERATE, (psutil.Process(process.pid),)))
        yield servers


if __name__ == "__main__":
    typer.run(main)
