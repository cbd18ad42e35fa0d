"""What strangers cost others: `python -m benchmarks.strangers`.

A client sends requests one after another, prefilled and decoded by two workers, while 1,000 connections without tokens
or the service's secret stay open on all ports of its processes: gRPC, HTTP, registry, control, KV, and Ray's. Windows
without strangers, with the same number at a server that closes them at once (what the load alone costs this machine),
and with them at the service alternate. The strangers' process gets the time that others leave, because it stands for
other machines. The CPU time that the service's processes use per second tells what strangers take of it. A table, then
one JSON line.
"""

from __future__ import annotations

import contextlib
import json
import socketserver
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.quick import Quick
from benchmarks.strangers_client import Opened
from experiments.messages import message_of
from gateway.token_file import digest_of, new_token
from ops.launch.detach import start_detached, stop_detached
from ops.launch.state import ServiceState
from pdserve import Client
from pdserve.core.config import PdserveConfig
from tests.local_cluster import free_port

PROMPT = "def read_lines(path):\n    with open(path) as file:\n" * 8
WINDOWS = ("without", "elsewhere", "with")


def main(
    connections: Annotated[int, typer.Option(min=1, help="connections of strangers")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="windows of each kind")] = 2,
    window_s: Annotated[float, typer.Option(min=1.0, help="length of a window, seconds")] = 60.0,
    quick: Quick = False,
) -> None:
    """Measure."""
    pace_s = 5.0
    if quick:
        connections, rounds, window_s, pace_s = 20, 1, 1.0, 1.0
    console = Console(highlight=False)
    with _service() as (target, token, processes), _closing_server() as elsewhere:
        addresses = sorted({address for each in processes for address in _listening(each)})
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in WINDOWS}
        with Client(target, token=token) as client:
            client.generate(PROMPT, max_tokens=16, mode="pd").result()
            for number in range(rounds):
                for name in WINDOWS if number % 2 == 0 else WINDOWS[::-1]:
                    attacked = {"without": [], "elsewhere": [elsewhere], "with": addresses}[name]
                    with _strangers(connections, pace_s, attacked) as opened:
                        before_s = _cpu_s(processes)
                        window = _window(client, window_s)
                        window["cpu_ms_per_s"] = round((_cpu_s(processes) - before_s) * 1e3 / window_s, 1)
                    measured[name].append({**window, "opened": sum(opened)})
                    console.print(f"{name}: {measured[name][-1]}", style="dim")
            kv_refused = sum(sum(worker.kv_refused.values()) for worker in client.status().workers)
    middle = {
        name: {figure: statistics.median(window[figure] for window in windows) for figure in windows[0]}
        for name, windows in measured.items()
    }
    table = Table("", *WINDOWS, "with / without", "with / elsewhere", box=None)
    ratios: dict[str, Any] = {}
    for figure in ("ttft_p50_ms", "latency_p50_ms", "latency_p99_ms"):
        values = {name: middle[name][figure] for name in WINDOWS}
        ratios[figure] = {other: round(values["with"] / values[other], 3) for other in ("without", "elsewhere")}
        table.add_row(
            figure,
            *(f"{value:.2f}" for value in values.values()),
            *(f"× {ratio:.2f}" for ratio in ratios[figure].values()),
        )
    table.add_row("cpu_ms_per_s of gateway and workers", *(f"{middle[name]['cpu_ms_per_s']:.0f}" for name in WINDOWS))
    console.print(table)
    result = {"connections": connections, "ports": len(addresses), "windows": measured, "ratios": ratios}
    print(json.dumps({**result, "kv_refused": kv_refused}))  # noqa: T201 - the last line is for programs


@contextlib.contextmanager
def _service() -> Iterator[tuple[str, str, list[psutil.Process]]]:
    """A service with tokens; its target, a token, and the processes of its gateway and its workers."""
    with TemporaryDirectory() as folder:
        token = new_token()
        path = Path(folder) / "tokens.yaml"
        path.write_text(f"tokens:\n- name: bench\n  sha256: {digest_of(token).hex()}\n")
        path.chmod(0o600)
        settings = {"gateway.port": 0, "gateway.http_port": free_port(), "gateway.tokens": str(path)}
        config = PdserveConfig.load(None, {**settings, "model.path": "tiny", "transfer.transport": "tcp"})
        port = start_detached(config, lambda stage: None)
        try:
            with Client(ServiceState.read(port).operator) as operator:
                status = operator.status()
            processes = [psutil.Process(pid) for pid in (status.pid, *(worker.pid for worker in status.workers))]
            yield f"localhost:{port}", token, processes
        finally:
            stop_detached(port)


def _listening(process: psutil.Process) -> Iterator[str]:
    for connection in process.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            yield f"{connection.laddr.ip.removeprefix('::ffff:')}:{connection.laddr.port}"


def _cpu_s(processes: list[psutil.Process]) -> float:
    """The CPU time so far of the processes. Their engines, which strangers do not reach, are not among them."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _window(client: Client, window_s: float) -> dict[str, float]:
    ttft_ms, latency_ms = [], []
    until_s = time.monotonic() + window_s
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        result = client.generate(PROMPT, max_tokens=16, ignore_eos=True, mode="pd", salt=str(began_s)).result()
        latency_ms.append((time.monotonic() - began_s) * 1e3)
        ttft_ms.append(result.ttft_ms)
    return {
        "requests": len(latency_ms),
        "ttft_p50_ms": round(statistics.median(ttft_ms), 2),
        "latency_p50_ms": round(statistics.median(latency_ms), 2),
        "latency_p99_ms": round(sorted(latency_ms)[int(len(latency_ms) * 0.99)], 2),
    }


@contextlib.contextmanager
def _strangers(count: int, pace_s: float, addresses: list[str]) -> Iterator[list[int]]:
    """Keep connections of strangers open, each opened again ``pace_s`` later if it was closed. The list that is yielded
    gets the number of those that were opened."""
    opened: list[int] = []
    if not addresses:
        yield opened
        return
    command = [sys.executable, "-m", "benchmarks.strangers_client", str(count), str(pace_s), *addresses]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as strangers:
        try:
            time.sleep(pace_s)  # until all are connected
            yield opened
        finally:
            strangers.terminate()
            said = strangers.communicate(timeout=30)[0]
            opened.append(message_of(said, Opened, "benchmarks.strangers_client").connections)


@contextlib.contextmanager
def _closing_server() -> Iterator[str]:
    class Server(socketserver.TCPServer):
        allow_reuse_address = True
        request_queue_size = 1024

    with Server(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


if __name__ == "__main__":
    typer.run(main)
