"""What bounds a front door: a bare `grpc.aio` server with one method and the gateway's limits, in a process of its own.

`started` runs a program that calls `serve`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from experiments.messages import Message, message_of, say

PENDING = [("grpc.server.max_pending_requests", 10**6), ("grpc.server.max_pending_requests_hard_limit", 10**6)]


class Listening(Message):
    """The server's port on 127.0.0.1."""

    port: int


@contextlib.contextmanager
def started(module: str) -> Iterator[tuple[int, int]]:
    """Run the server ``module``; its port and process id."""
    with subprocess.Popen([sys.executable, "-m", module], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield message_of(process.stdout.readline(), Listening, module).port, process.pid
        finally:
            process.terminate()


async def serve(service: str, answer: Callable[..., Any], serialize: Callable[[Any], bytes] | None = None) -> None:
    """Serve ``service`` with the method Generate, whose calls ``answer`` gets with the request's bytes, until ended.
    Says `Listening` on any free port."""
    server = grpc.aio.server(options=PENDING)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(answer, response_serializer=serialize)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(Listening(port))
    await server.wait_for_termination()
