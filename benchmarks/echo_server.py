"""The upper bound for a front door: a bare `grpc.aio` server that streams messages back at once (`python -m
benchmarks.echo_server`). It prints its port. A request's first two bytes are the number of messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pdserve.core.process import end_with_parent
from pdserve.pb import inference_pb2 as pb

PENDING = [("grpc.server.max_pending_requests", 10**6), ("grpc.server.max_pending_requests_hard_limit", 10**6)]
MESSAGE = pb.GenerateResponse(token=pb.Token(token_id=300, text=" word", index=7))


async def echo(data: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> AsyncIterator[pb.GenerateResponse]:
    """Answer one request."""
    for _ in range(int.from_bytes(data[:2], "big")):
        yield MESSAGE


async def main() -> None:
    """Serve until ended."""
    server = grpc.aio.server(options=PENDING)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            echo, response_serializer=pb.GenerateResponse.SerializeToString
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)  # noqa: T201 - for the process that has started this one
    await server.wait_for_termination()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(main())
