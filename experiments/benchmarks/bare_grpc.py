"""Both ends of gRPC with as little work as possible, each in a process of its own: what bounds a front door."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import grpc

from experiments.child_process import ChildProcess, call
from experiments.messages import Done, say
from pdserve.core.errors import ERROR_KIND_KEY, RETRY_AFTER_KEY
from pdserve.pb import inference_pb2 as pb

PENDING = [("grpc.server.max_pending_requests", 10**6), ("grpc.server.max_pending_requests_hard_limit", 10**6)]
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
CONNECTIONS = 4
CONNECTION_STREAMS = 1024
"""No more on one connection: before the server has told a new one its limit, further ones would be refused."""
ECHO = "/echo/Generate"
GENERATE = "/pdserve.v1.Inference/Generate"
MESSAGE = pb.GenerateResponse(token=pb.Token(token_id=300, text=" word", index=7))
_START_S = 60.0


class Finished(NamedTuple):
    """The number of finished streams, and the milliseconds until the first message of each that was begun."""

    streams: int
    first_ms: list[float]


@contextlib.contextmanager
def bare_server(kind: str) -> Iterator[tuple[str, int]]:
    """A server that streams messages back at once (``echo``; a request's first two bytes are their number), or refuses
    every request, as the gateway does when its queue is full (``refuse``); its address and process id."""
    with ChildProcess(f"the server of kind {kind}", call(serve, kind)) as child:
        yield f"127.0.0.1:{child.result(_START_S)}", child.pid


def bare_load(target: str, method: str, request: bytes, messages: int, streams: int, seconds: float) -> Finished:
    """From a process of its own, keep ``streams`` open for so many seconds, each followed by the next, and count those
    that have at least ``messages`` messages."""
    with ChildProcess(
        "the bare client", call(send, target, method, request.hex(), messages, streams, seconds)
    ) as child:
        return Finished(*child.result(_START_S + 10 * seconds))


async def _echo(data: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> AsyncIterator[pb.GenerateResponse]:
    for _ in range(int.from_bytes(data[:2], "big")):
        yield MESSAGE


async def _refuse(data: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> None:
    metadata = ((ERROR_KIND_KEY, "CapacityExceeded"), (RETRY_AFTER_KEY, "500"))
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue: it is full", metadata)


async def serve(kind: str) -> None:
    """Serve until ended, on any free port, which is said."""
    server = grpc.aio.server(options=PENDING)
    service, answer = {"echo": (ECHO, _echo), "refuse": (GENERATE, _refuse)}[kind]
    handler: grpc.RpcMethodHandler[bytes, Any] = grpc.unary_stream_rpc_method_handler(
        answer, response_serializer=pb.GenerateResponse.SerializeToString
    )
    name, method = service[1:].split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(Done(port))
    await server.wait_for_termination()


async def send(target: str, method: str, request: str, messages: int, streams: int, seconds: float) -> Finished:
    """The client; the request is in hexadecimal."""
    connections = max(min(CONNECTIONS, streams), math.ceil(streams / CONNECTION_STREAMS))
    channels = [grpc.aio.insecure_channel(target, options=OPTIONS) for _ in range(connections)]
    stubs: list[Any] = [channel.unary_stream(method) for channel in channels]
    first_ms: list[float] = []
    finished = 0
    until_s = time.monotonic() + seconds

    async def stream(number: int) -> None:
        nonlocal finished
        stub = stubs[number % len(stubs)]
        while (begun_s := time.monotonic()) < until_s:
            received = 0
            async for _ in stub(bytes.fromhex(request)):
                if received == 0:
                    first_ms.append((time.monotonic() - begun_s) * 1e3)
                received += 1
            if received < messages:
                raise RuntimeError(f"{received} instead of {messages} messages")
            finished += 1

    await asyncio.gather(*(stream(number) for number in range(streams)))
    for channel in channels:
        await channel.close()
    return Finished(finished, first_ms)
