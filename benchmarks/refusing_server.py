"""The lower bound for a refusal: a gRPC server that refuses every request at once (`python -m
benchmarks.refusing_server`)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from benchmarks.bare_server import serve
from pdserve.core.errors import ERROR_KIND_KEY, RETRY_AFTER_KEY


async def refuse(data: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> None:
    """Refuse one request as the gateway does when its queue is full."""
    metadata = ((ERROR_KIND_KEY, "CapacityExceeded"), (RETRY_AFTER_KEY, "500"))
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue: it is full", metadata)


if __name__ == "__main__":
    asyncio.run(serve("pdserve.v1.Inference", refuse))
