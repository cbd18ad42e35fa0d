"""The upper bound for a front door: a bare `grpc.aio` server that streams messages back at once (`python -m
benchmarks.echo_server`). A request's first two bytes are the number of messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from benchmarks.bare_server import serve
from pdserve.pb import inference_pb2 as pb
from runtime.process import end_with_parent

MESSAGE = pb.GenerateResponse(token=pb.Token(token_id=300, text=" word", index=7))


async def echo(data: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> AsyncIterator[pb.GenerateResponse]:
    """Answer one request."""
    for _ in range(int.from_bytes(data[:2], "big")):
        yield MESSAGE


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(serve("echo", echo, pb.GenerateResponse.SerializeToString))
