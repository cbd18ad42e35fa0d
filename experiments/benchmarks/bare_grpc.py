"""Both ends of gRPC with as little work as possible, each in a process of its own: what bounds a front door.

- `python -m experiments.benchmarks.bare_grpc echo` streams messages back at once; a request's first two bytes are their
  number.
- `… refuse` refuses every request, as the gateway does when its queue is full.
- `… load TARGET METHOD REQUEST_HEX MESSAGES STREAMS SECONDS` keeps STREAMS streams open for SECONDS, each followed by
  the next, and counts those that have at least MESSAGES messages."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from experiments.child_process import ChildProcess, program
from experiments.messages import Message, say
from pdserve.core.errors import ERROR_KIND_KEY, RETRY_AFTER_KEY
from pdserve.pb import inference_pb2 as pb
from runtime.process import end_with_parent

PENDING = [("grpc.server.max_pending_requests", 10**6), ("grpc.server.max_pending_requests_hard_limit", 10**6)]
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
CONNECTIONS = 4
ECHO = "/echo/Generate"
GENERATE = "/pdserve.v1.Inference/Generate"
MESSAGE = pb.GenerateResponse(token=pb.Token(token_id=300, text=" word", index=7))
_MODULE = "experiments.benchmarks.bare_grpc"
_START_S = 60.0


class Listening(Message):
    """The server's port on 127.0.0.1."""

    port: int


class Finished(Message):
    """The number of finished streams, and the milliseconds until the first message of each that was begun."""

    streams: int
    first_ms: list[float]


@contextlib.contextmanager
def bare_server(kind: str) -> Iterator[tuple[str, int]]:
    """Run a server, ``echo`` or ``refuse``; its address and process id."""
    with ChildProcess(f"the server of kind {kind}", program(_MODULE, kind)) as child:
        yield f"127.0.0.1:{child.receive(_START_S, Listening).port}", child.pid


def bare_load(target: str, method: str, request: bytes, messages: int, streams: int, seconds: float) -> Finished:
    """Load a server from a process of its own."""
    given = (target, method, request.hex(), str(messages), str(streams), str(seconds))
    with ChildProcess("the bare client", program(_MODULE, "load", *given)) as child:
        return child.receive(_START_S + 10 * seconds, Finished)


async def _echo(data: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> AsyncIterator[pb.GenerateResponse]:
    for _ in range(int.from_bytes(data[:2], "big")):
        yield MESSAGE


async def _refuse(data: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> None:
    metadata = ((ERROR_KIND_KEY, "CapacityExceeded"), (RETRY_AFTER_KEY, "500"))
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue: it is full", metadata)


async def _serve(kind: str) -> None:
    """Serve until ended. Says `Listening` on any free port."""
    server = grpc.aio.server(options=PENDING)
    service, answer = {"echo": (ECHO, _echo), "refuse": (GENERATE, _refuse)}[kind]
    handler: grpc.RpcMethodHandler[bytes, Any] = grpc.unary_stream_rpc_method_handler(
        answer, response_serializer=pb.GenerateResponse.SerializeToString
    )
    name, method = service[1:].split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(Listening(port))
    await server.wait_for_termination()


async def _load(target: str, method: str, request: bytes, messages: int, streams: int, seconds: float) -> None:
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
    end_with_parent()
    role, *given = sys.argv[1:]
    if role == "load":
        asyncio.run(_load(given[0], given[1], bytes.fromhex(given[2]), int(given[3]), int(given[4]), float(given[5])))
    else:
        asyncio.run(_serve(role))
