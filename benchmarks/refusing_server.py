"""The lower bound for a refusal: a gRPC server that refuses every request at once (`python -m
benchmarks.refusing_server`). It prints its port."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from pdserve.core.errors import ERROR_KIND_KEY, RETRY_AFTER_KEY

PENDING = [("grpc.server.max_pending_requests", 10**6), ("grpc.server.max_pending_requests_hard_limit", 10**6)]


async def refuse(data: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> None:
    """Refuse one request as the gateway does when its queue is full."""
    metadata = ((ERROR_KIND_KEY, "CapacityExceeded"), (RETRY_AFTER_KEY, "500"))
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue: it is full", metadata)


async def main() -> None:
    """Serve until ended."""
    server = grpc.aio.server(options=PENDING)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, Any]] = {"Generate": grpc.unary_stream_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pdserve.v1.Inference", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)  # noqa: T201 - for the process that has started this one
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
