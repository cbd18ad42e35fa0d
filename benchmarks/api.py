"""What HTTP costs beside gRPC: time to first token of single requests, and CPU time of the gateway per token.

`python -m benchmarks.api` starts the embedded model on one prefill and one decode worker. Requests alternate between
the two APIs, so that both meet the same machine. The HTTP client is a bare socket, because the clients of the field
cost more than the server. A table, then one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.quick import HELP
from experiments.statistics import mean_interval
from ops.launch.detach import start_detached, stop_detached
from ops.launch.state import ServiceState
from pdserve import AsyncClient, Client
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError
from tests.local_cluster import free_port

PROMPT = list(range(5, 21))
Send = Callable[[int], Awaitable[float]]
"""Sends a request for that many tokens; returns the seconds to the first one, after the last one has come."""


class Sizes(NamedTuple):
    """``requests`` that are sent alone over each API, then ``rounds`` of ``streams`` at once with so many tokens."""

    requests: int = 200
    rounds: int = 5
    streams: int = 8
    tokens: int = 256


QUICK = Sizes(requests=3, rounds=1, streams=4, tokens=128)


class HttpClient:
    """Connections to one service, which are used again."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, tokens: int) -> float:
        """Stream a completion."""
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        body = json.dumps(
            {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
             "cache_salt": str(time.monotonic_ns())}
        ).encode()  # fmt: skip
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        begun_s = time.perf_counter()
        writer.write(head + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {await reader.read(1000)!r}")
        await reader.readuntil(b"data: ")
        first_s = time.perf_counter() - begun_s
        await reader.readuntil(b"data: [DONE]\n\n")
        await reader.readuntil(b"0\r\n\r\n")  # the end of a chunked body
        self._idle.append((reader, writer))
        return first_s

    def close(self) -> None:
        """Close the connections."""
        for _, writer in self._idle:
            writer.close()


def grpc_sender(client: AsyncClient) -> Send:
    """Sends over gRPC."""

    async def send(tokens: int) -> float:
        begun_s = time.perf_counter()
        stream = client.generate(PROMPT, max_tokens=tokens, ignore_eos=True, salt=str(time.monotonic_ns()))
        await anext(stream)
        first_s = time.perf_counter() - begun_s
        await stream.result()
        return first_s

    return send


async def first_tokens(senders: dict[str, Send], sizes: Sizes) -> dict[str, list[float]]:
    """Milliseconds to the first token of single requests, in alternation."""
    taken_ms: dict[str, list[float]] = {name: [] for name in senders}
    for number in range(sizes.requests + 5):
        for name in senders if number % 2 else reversed(senders):
            took_s = await senders[name](2)
            if number >= 5:  # warm-up
                taken_ms[name].append(took_s * 1e3)
    return taken_ms


async def cpu_per_token(senders: dict[str, Send], gateway: psutil.Process, sizes: Sizes) -> dict[str, list[float]]:
    """Microseconds of CPU time of the gateway per token, of each round."""
    taken_us: dict[str, list[float]] = {name: [] for name in senders}
    for number in range(sizes.rounds):
        for name in senders if number % 2 else reversed(senders):
            before = gateway.cpu_times()
            await asyncio.gather(*(senders[name](sizes.tokens) for _ in range(sizes.streams)))
            after = gateway.cpu_times()
            used_s = after.user + after.system - before.user - before.system
            taken_us[name].append(used_s * 1e6 / (sizes.streams * sizes.tokens))
    return taken_us


async def measure(
    target: str, url: str, pid: int, sizes: Sizes
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Both figures over both APIs."""
    http = HttpClient(url)
    async with AsyncClient(target) as client:
        senders = {"grpc": grpc_sender(client), "http": http.send}
        ttft_ms = await first_tokens(senders, sizes)
        cpu_us = await cpu_per_token(senders, psutil.Process(pid), sizes)
    http.close()
    return ttft_ms, cpu_us


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=HELP)
    sizes = QUICK if parser.parse_args().quick else Sizes()
    console = Console(stderr=True, highlight=False)
    http_port = free_port()
    config = PdserveConfig.load(None, {"gateway.port": 0, "gateway.http_port": http_port, "gateway.host": "127.0.0.1"})
    with console.status("starting the service"):
        port = start_detached(config)
    try:
        if (state := ServiceState.at(f"127.0.0.1:{port}")) is None:
            raise LaunchError(f"the service on port {port} has ended")
        with Client(state.operator) as operator:
            pid = operator.status().pid
        with console.status("measuring, about two minutes"):
            ttft_ms, cpu_us = asyncio.run(measure(f"127.0.0.1:{port}", f"http://127.0.0.1:{http_port}", pid, sizes))
    finally:
        stop_detached(port, 0.0)
    differences = [http - grpc for grpc, http in zip(ttft_ms["grpc"], ttft_ms["http"], strict=True)]
    added, ratios = mean_interval(differences, 0), [h / g for g, h in zip(cpu_us["grpc"], cpu_us["http"], strict=True)]
    table = Table("", "gRPC", "HTTP", "HTTP beside gRPC", box=None)
    p50 = {name: statistics.median(values) for name, values in ttft_ms.items()}
    cpu = {name: statistics.median(values) for name, values in cpu_us.items()}
    table.add_row("TTFT, p50, ms", f"{p50['grpc']:.2f}", f"{p50['http']:.2f}", f"{statistics.median(differences):+.2f}")
    table.add_row("CPU per token, µs", f"{cpu['grpc']:.0f}", f"{cpu['http']:.0f}", f"× {statistics.median(ratios):.2f}")
    Console(highlight=False).print(table)
    print(  # noqa: T201
        json.dumps(
            {
                "ttft_p50_ms": p50,
                "added_ttft_p50_ms": statistics.median(differences),
                "added_ttft_mean_ms": None if added is None else added.to_dict(),
                "gateway_cpu_us_per_token": cpu,
                "cpu_ratio": statistics.median(ratios),
                "requests": sizes.requests,
                "tokens": sizes.rounds * sizes.streams * sizes.tokens,
            }
        )
    )


if __name__ == "__main__":
    main()
