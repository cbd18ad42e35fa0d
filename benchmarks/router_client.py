"""Loads one gRPC server for `benchmarks.router`, with as little work per message as a client can do.

`python -m benchmarks.router_client TARGET METHOD REQUEST_HEX MESSAGES STREAMS SECONDS` keeps STREAMS streams open for
SECONDS, each followed by the next, counts those that have at least MESSAGES messages, and says `Finished`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import grpc

from experiments.messages import Message, say

OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
CONNECTIONS = 4


class Finished(Message):
    """The number of finished streams, and the milliseconds until the first message of each that was begun."""

    streams: int
    first_ms: list[float]


async def main(target: str, method: str, request: bytes, messages: int, streams: int, seconds: float) -> None:
    """Load the server, and say what came of it."""
    channels = [grpc.aio.insecure_channel(target, options=OPTIONS) for _ in range(min(CONNECTIONS, streams))]
    calls: list[Any] = [channel.unary_stream(method) for channel in channels]
    first_ms: list[float] = []
    finished = 0
    until_s = time.monotonic() + seconds

    async def stream(number: int) -> None:
        nonlocal finished
        call = calls[number % len(calls)]
        while (begun_s := time.monotonic()) < until_s:
            received = 0
            async for _ in call(request):
                if received == 0:
                    first_ms.append((time.monotonic() - begun_s) * 1e3)
                received += 1
            if received < messages:
                raise RuntimeError(f"{received} instead of {messages} messages")
            finished += 1

    await asyncio.gather(*(stream(number) for number in range(streams)))
    for channel in channels:
        await channel.close()
    say(Finished(finished, first_ms))


if __name__ == "__main__":
    given = sys.argv
    asyncio.run(main(given[1], given[2], bytes.fromhex(given[3]), int(given[4]), int(given[5]), float(given[6])))
