"""What bounds a front door from above: a bare `grpc.aio` server with one method and the gateway's limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

PENDING = [("grpc.server.max_pending_requests", 10**6), ("grpc.server.max_pending_requests_hard_limit", 10**6)]


async def serve(service: str, answer: Callable[..., Any], serialize: Callable[[Any], bytes] | None = None) -> None:
    """Serve ``service`` with the method Generate, whose calls ``answer`` gets with the request's bytes, until ended.
    Prints the port, which is any free one."""
    server = grpc.aio.server(options=PENDING)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(answer, response_serializer=serialize)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)  # noqa: T201 - for the process that has started this one
    await server.wait_for_termination()
