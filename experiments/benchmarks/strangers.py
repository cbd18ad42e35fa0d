"""What strangers cost others: `python -m experiments.benchmarks.strangers`.

A client sends requests one after another, prefilled and decoded by two workers, while 1,000 connections without tokens
or the service's secret stay open on all ports of its processes: gRPC, HTTP, registry, control, KV, and Ray's. Windows
without strangers, with the same number at a server that closes them at once (what the load alone costs this machine),
and with them at the service alternate. The CPU time that the service's processes use per second tells what strangers
take of it."""

from __future__ import annotations

import contextlib
import socketserver
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from experiments.benchmarks.frame import Quick, cpu_s, in_turns, quantile, run, service
from experiments.benchmarks.strangers_client import Opened
from experiments.messages import message_of
from pdserve import Client

PROMPT = "def read_lines(path):\n    with open(path) as file:\n" * 8
TOKEN = "bench"


def strangers(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    connections, rounds, window_s, pace_s = (20, 1, 1.0, 1.0) if quick else (1000, 2, 60.0, 5.0)
    with (
        service({"transfer.transport": "tcp"}, http=True, tokens={TOKEN: {}}) as served,
        _closing_server() as elsewhere,
        Client(served.target, token=TOKEN) as client,
    ):
        processes = served.processes
        ports = sorted({address for each in processes for address in _listening(each)})
        addresses = {"without": [], "elsewhere": [elsewhere], "with": ports}
        windows: dict[str, dict[int, dict[str, float]]] = {name: {} for name in addresses}
        client.generate(PROMPT, max_tokens=16, mode="pd").result()
        for number, name in in_turns(addresses, rounds):
            with _strangers(connections, pace_s, addresses[name]) as opened:
                before_s = cpu_s(processes)
                window = _window(client, window_s)
                window["cpu_ms_per_s"] = (cpu_s(processes) - before_s) * 1e3 / window_s
            windows[name][number] = {**window, "opened": sum(opened)}
        kv_refused = sum(sum(worker.kv_refused.values()) for worker in client.status().workers)

    def middle(name: str, figure: str) -> float:
        return statistics.median(window[figure] for window in windows[name].values())

    return {
        "connections": connections,
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


def _window(client: Client, window_s: float) -> dict[str, Any]:
    ttft_ms, latency_ms = [], []
    until_s = time.monotonic() + window_s
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        result = client.generate(PROMPT, max_tokens=16, ignore_eos=True, mode="pd", salt=str(began_s)).result()
        latency_ms.append((time.monotonic() - began_s) * 1e3)
        ttft_ms.append(result.ttft_ms)
    return {
        "requests": len(latency_ms),
        "ttft_p50_ms": statistics.median(ttft_ms),
        "latency_p50_ms": statistics.median(latency_ms),
        "latency_p99_ms": quantile(latency_ms, 0.99),
    }


@contextlib.contextmanager
def _strangers(count: int, pace_s: float, addresses: list[str]) -> Iterator[list[int]]:
    """Keep connections of strangers open, each opened again ``pace_s`` later if it was closed. The list that is yielded
    gets the number of those that were opened."""
    opened: list[int] = []
    if not addresses:
        yield opened
        return
    command = [sys.executable, "-m", "experiments.benchmarks.strangers_client", str(count), str(pace_s), *addresses]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            time.sleep(pace_s)  # until all are connected
            yield opened
        finally:
            process.terminate()
            said = process.communicate(timeout=30)[0]
            opened.append(message_of(said, Opened, "experiments.benchmarks.strangers_client").connections)


@contextlib.contextmanager
def _closing_server() -> Iterator[str]:
    """A server that closes connections at once."""

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
    run(strangers)
