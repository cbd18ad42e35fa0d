"""What HTTP costs beside gRPC: time to first token of single requests, and CPU time of the gateway per token.

`python -m experiments.benchmarks.api` starts the embedded model on one prefill and one decode worker. Requests
alternate between the two APIs, so that both meet the same machine. The HTTP client is a bare socket, because the
clients of the field cost more than the server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pandas

from experiments.benchmarks.frame import Quick, Service, cpu_s, in_turns, run, service
from experiments.statistics import plain_mean
from pdserve import AsyncClient

PROMPT = list(range(5, 21))
Idle = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


def api(quick: Quick = False) -> dict[str, Any]:
    """Measure."""
    requests, rounds, streams, tokens = (3, 1, 4, 128) if quick else (200, 5, 8, 256)
    with service({}, http=True) as served:
        ttft_ms, cpu_us = served.client(
            lambda client: _measure(client, served, {1: (requests, 5, 2), streams: (rounds, 0, tokens)})
        )
    added_ms = ttft_ms.http - ttft_ms.grpc
    return {
        "ttft_p50_ms": ttft_ms.median(),
        "added_ttft_p50_ms": added_ms.median(),
        "added_ttft_mean_ms": plain_mean(added_ms.tolist()),
        "gateway_cpu_us_per_token": cpu_us.median(),
        "cpu_ratio": (cpu_us.http / cpu_us.grpc).median(),
        "requests": requests,
        "tokens": rounds * streams * tokens,
    }


async def _measure(
    client: AsyncClient, served: Service, plan: dict[int, tuple[int, int, int]]
) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Rounds, after others as warm-up, of so many streams of so many tokens at once, by the number of streams. By API
    and round: of single ones the milliseconds to the first token, of several ones the gateway's CPU time in
    microseconds per token."""
    idle: Idle = []
    gateway, rows = served.processes[:1], []
    for streams, (rounds, warm_up, tokens) in plan.items():
        for number, name in in_turns(("grpc", "http"), rounds, warm_up):
            before_s = cpu_s(gateway)
            sending = [
                _send_grpc(client, tokens) if name == "grpc" else _send_http(served.http, idle, tokens)
                for _ in range(streams)
            ]
            [first_ms, *_] = await asyncio.gather(*sending)
            cpu_us = (cpu_s(gateway) - before_s) * 1e6 / (streams * tokens)
            rows.append({"streams": streams, "repeat": number, "arm": name, "ttft_ms": first_ms, "cpu_us": cpu_us})
    for _, writer in idle:
        writer.close()
    found = pandas.DataFrame(rows).query("repeat >= 0")
    single, several = (found[found.streams == streams] for streams in plan)
    return tuple(
        each.pivot(index="repeat", columns="arm", values=value)
        for each, value in ((single, "ttft_ms"), (several, "cpu_us"))
    )


async def _send_grpc(client: AsyncClient, tokens: int) -> float:
    """Send a request for that many tokens; the milliseconds to the first one, once the last one has come."""
    request = client.generate(PROMPT, max_tokens=tokens, ignore_eos=True, salt=str(time.monotonic_ns()))
    return (await request.result()).ttft_ms


async def _send_http(target: str, idle: Idle, tokens: int) -> float:
    """The same over a connection of ``idle``, or a new one, which is kept there afterwards."""
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
    first_ms = (time.perf_counter() - begun_s) * 1e3
    await reader.readuntil(b"data: [DONE]\n\n")
    await reader.readuntil(b"0\r\n\r\n")  # the end of a chunked body
    idle.append((reader, writer))
    return first_ms


if __name__ == "__main__":
    run(api)
