"""What the clients say of requests that a server does not take: never that they were aborted, unless the caller did."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio
import pytest

from pdserve import AsyncClient, Client
from pdserve.core.errors import (
    CapacityExceeded,
    InvalidRequest,
    NotReady,
    PdserveError,
    RequestAborted,
    from_wire,
    to_wire,
)
from tests.pdserve.http2_server import Connection, HTTP2Server
from tests.pdserve.scripted_service import ScriptedService
from tests.pdserve.test_client import refused

REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM = 7, 8, 11


def reset(code: int) -> Callable[[Connection, int], None]:
    return lambda connection, stream: connection.reset(stream, code)


@pytest.mark.parametrize(
    ("answer", "kind", "remedy"),
    [
        (reset(CANCEL), CapacityExceeded, "send fewer at a time"),
        (reset(ENHANCE_YOUR_CALM), CapacityExceeded, "send fewer at a time"),
        (reset(REFUSED_STREAM), NotReady, "try again later"),
        (lambda connection, stream: connection.go_away(0, 0), NotReady, "try again later"),
    ],
    ids=["CANCEL", "ENHANCE_YOUR_CALM", "REFUSED_STREAM", "GOAWAY"],
)
async def test_a_server_that_resets_streams(
    answer: Callable[[Connection, int], None], kind: type[PdserveError], remedy: str
) -> None:
    with HTTP2Server(answer) as server:
        error = str(await refused(server.target, "x", kind, timeout_s=10))
    assert remedy in error
    assert server.target in error
    assert "nothing answers" not in error  # something did


@pytest.fixture
def full_server() -> Iterator[tuple[str, threading.Event]]:
    """A gRPC server that never comes to its requests until the event is set, and lets very few wait."""
    loop, address, relent = asyncio.new_event_loop(), list[str](), threading.Event()
    listening, stopped = threading.Event(), asyncio.Event()

    async def handle(request: bytes, context: Any) -> Any:
        yield b""

    def hang() -> None:
        listening.set()
        relent.wait(30)

    async def serve() -> None:
        limits = [("grpc.server.max_pending_requests", 1), ("grpc.server.max_pending_requests_hard_limit", 1)]
        server = grpc.aio.server(options=limits)
        handlers: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(handle)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pdserve.v1.Inference", handlers),))
        address.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        loop.call_later(0.1, hang)
        await stopped.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert listening.wait(10)
    try:
        yield address[0], relent
    finally:
        relent.set()
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        loop.close()


async def test_a_server_with_too_many_open_streams_is_said_to_be_full(
    full_server: tuple[str, threading.Event],
) -> None:
    target, relent = full_server
    errors: list[PdserveError] = []
    async with AsyncClient(target) as client:

        async def one() -> None:
            with pytest.raises(PdserveError) as error:  # those that are taken get no completion
                await client.generate("x").result()
            errors.append(error.value)
            relent.set()

        await asyncio.gather(*(one() for _ in range(20)))
    refused = [error for error in errors if isinstance(error, CapacityExceeded)]
    assert refused
    assert not [error for error in errors if isinstance(error, RequestAborted)]
    assert all("send fewer at a time" in str(error) for error in refused)


async def test_broken_off_in_mid_stream_is_not_full(service: ScriptedService) -> None:
    """The same status after tokens have come is the end of one request, not a refusal."""
    with Client(service.target) as client:
        stream = client.generate("token fail CANCELLED CANCELLED")
        assert next(stream).text == "a"
        with pytest.raises(NotReady, match="cancelled the request"):
            stream.result()


@pytest.mark.parametrize(
    ("code", "named", "kind", "milliseconds", "retry_after_s"),
    [
        ("RESOURCE_EXHAUSTED", "CapacityExceeded", CapacityExceeded, "250", 0.25),
        ("RESOURCE_EXHAUSTED", "AnErrorOfALaterVersion", CapacityExceeded, "1500", 1.5),
        ("UNAVAILABLE", "NotReady", NotReady, "0", 0.0),
        ("RESOURCE_EXHAUSTED", "CapacityExceeded", CapacityExceeded, "soon", None),
        ("RESOURCE_EXHAUSTED", "CapacityExceeded", CapacityExceeded, "-5", None),
        ("RESOURCE_EXHAUSTED", "CapacityExceeded", CapacityExceeded, "nan", None),
        ("RESOURCE_EXHAUSTED", "CapacityExceeded", CapacityExceeded, "1e300", None),
    ],
)
async def test_a_refusal_tells_when_to_come_back(
    service: ScriptedService,
    code: str,
    named: str,
    kind: type[CapacityExceeded] | type[NotReady],
    milliseconds: str,
    retry_after_s: float | None,
) -> None:
    error = await refused(service.target, f"refuse {code} {named} {milliseconds} the queue is full", kind)
    assert (error.retry_after_s, str(error)) == (retry_after_s, "the queue is full")


def test_no_other_error_has_a_time_to_come_back(service: ScriptedService) -> None:
    with Client(service.target) as client, pytest.raises(InvalidRequest) as error:
        client.generate("refuse INVALID_ARGUMENT InvalidRequest 250 prompt: empty").result()
    assert error.value.retry_after_s is None
    with Client(service.target) as client, pytest.raises(CapacityExceeded) as silent:
        client.generate("fail RESOURCE_EXHAUSTED the queue is full").result()
    assert silent.value.retry_after_s is None


@pytest.mark.parametrize("kind", [CapacityExceeded, NotReady])
def test_the_time_to_come_back_is_no_part_of_the_wire(kind: type[CapacityExceeded] | type[NotReady]) -> None:
    error = kind("the queue is full", retry_after_s=0.5)
    assert to_wire(error) == (kind.__name__, "the queue is full")
    again = from_wire(*to_wire(error))
    assert type(again) is kind
    assert getattr(again, "retry_after_s", 0.0) is None
