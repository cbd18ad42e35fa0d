"""What HTTP costs beside gRPC: time to first token of single requests, and CPU time of the gateway per token.

`python -m experiments.benchmarks.api` starts the embedded model on one prefill and one decode worker. Requests
alternate between the two APIs, so that both meet the same machine. The HTTP client is a bare socket, because the
clients of the field cost more than the server."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from experiments.benchmarks.frame import Quick, Service, cpu_s, in_turns, run, service
from experiments.statistics import plain_mean
from pdserve import AsyncClient

PROMPT = list(range(5, 21))
Send = Callable[[int], Awaitable[float]]
"""Sends a request for that many tokens; returns the seconds to the first one, after the last one has come."""


def api(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    requests, rounds, streams, tokens = (3, 1, 4, 128) if quick else (200, 5, 8, 256)
    with service({}, http=True) as served:
        ttft_ms, cpu_us = asyncio.run(_measure(served, requests, rounds, streams, tokens))
    added_ms = [http - grpc for grpc, http in zip(ttft_ms["grpc"], ttft_ms["http"], strict=True)]
    return {
        "ttft_p50_ms": {name: statistics.median(values) for name, values in ttft_ms.items()},
        "added_ttft_p50_ms": statistics.median(added_ms),
        "added_ttft_mean_ms": plain_mean(added_ms),
        "gateway_cpu_us_per_token": {name: statistics.median(values) for name, values in cpu_us.items()},
        "cpu_ratio": statistics.median(h / g for g, h in zip(cpu_us["grpc"], cpu_us["http"], strict=True)),
        "requests": requests,
        "tokens": rounds * streams * tokens,
    }


async def _measure(
    served: Service, requests: int, rounds: int, streams: int, tokens: int
) -> tuple[Mapping[str, list[float]], Mapping[str, list[float]]]:
    """By API: milliseconds to the first token of so many requests that are sent alone, and the gateway's CPU time in
    microseconds per token of each round of streams at once."""
    ttft_ms: dict[str, list[float]] = {"grpc": [], "http": []}
    cpu_us: dict[str, list[float]] = {"grpc": [], "http": []}
    gateway = served.gateway
    async with AsyncClient(served.target) as client:
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        senders: dict[str, Send] = {
            "grpc": lambda tokens: _send_grpc(client, tokens),
            "http": lambda tokens: _send_http(served.http, idle, tokens),
        }
        for number, name in in_turns(senders, requests, warm_up=5):
            took_s = await senders[name](2)
            if number >= 0:
                ttft_ms[name].append(took_s * 1e3)
        for _, name in in_turns(senders, rounds):
            before_s = cpu_s([gateway])
            await asyncio.gather(*(senders[name](tokens) for _ in range(streams)))
            cpu_us[name].append((cpu_s([gateway]) - before_s) * 1e6 / (streams * tokens))
        for _, writer in idle:
            writer.close()
    return ttft_ms, cpu_us


async def _send_grpc(client: AsyncClient, tokens: int) -> float:
    request = client.generate(PROMPT, max_tokens=tokens, ignore_eos=True, salt=str(time.monotonic_ns()))
    return (await request.result()).ttft_ms / 1e3


async def _send_http(target: str, idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]], tokens: int) -> float:
    """Stream a completion over a connection of ``idle``, or a new one, which is kept there afterwards."""
    reader, writer = idle.pop() if idle else await asyncio.open_connection(*target.split(":"))
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
         "cache_salt": str(time.monotonic_ns())}
    )  # fmt: skip
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    begun_s = time.perf_counter()
    writer.write((head + body).encode())
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read(1000)!r}")
    await reader.readuntil(b"data: ")
    first_s = time.perf_counter() - begun_s
    await reader.readuntil(b"data: [DONE]\n\n")
    await reader.readuntil(b"0\r\n\r\n")  # the end of a chunked body
    idle.append((reader, writer))
    return first_s


if __name__ == "__main__":
    run(api)
