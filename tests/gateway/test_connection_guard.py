"""Connections that flood the gRPC port are closed, whatever they send, and others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from experiments.benchmarks.http2_attacks import ATTACKS, PREFACE, SETTINGS, Attack, frame
from gateway.grpc_api import connection_guard, server_options
from pdserve import AsyncClient
from pdserve.client.generation import Generation
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc
from tests.gateway.conftest import PATIENT, Service, StartService
from tests.gateway.test_callers import entry, save

PROMPT = [5, 6, 7]
MOST_BYTES = 256 * 2**20
WAIT_S = 60.0
UPDATE = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))


def address_of(service: Service) -> str:
    return f"127.0.0.1:{service.gateway.port}"


async def attacked(address: str, kind: str) -> Attack:
    """An attack that has gone on until its connection was closed, or for so many bytes that it should have been."""

    def send() -> Attack:
        attack = Attack(kind, address)
        while not attack.is_over and attack.sent_bytes < MOST_BYTES:
            attack.send()
        attack.close()
        return attack

    return await asyncio.to_thread(send)


@contextlib.asynccontextmanager
async def innocents(service: Service, token: str = "") -> Any:
    """Clients that stream one answer after another meanwhile, over connections of their own. All answers are right, at
    the first attempt."""
    results: list[Generation] = []
    over = asyncio.Event()

    async def stream() -> None:
        async with AsyncClient(address_of(service), token=token) as client:
            while not over.is_set():
                results.append(await client.generate(PROMPT, max_tokens=20).result())

    service.fleet["d0"].delay_s = {"decode_more": 0.002, "run_more": 0.002}
    tasks = [asyncio.create_task(stream()) for _ in range(3)]
    await service.until(lambda: len(results) >= 3)
    try:
        yield results
    finally:
        over.set()
        await asyncio.gather(*tasks)
    assert {result.token_ids for result in results} == {tuple(range(8, 28))}
    assert {result.attempts for result in results} == {1}


# What else is sent without a request, such as pings, counts to the guard as settings do.
QUICK = ("resets", "open-streams", "empty-data", "message")


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.soak) for kind in ATTACKS]
)
async def test_a_connection_that_floods_is_closed(service: Service, kind: str) -> None:
    async with innocents(service):
        attack = await attacked(address_of(service), kind)
    assert attack.is_over
    service.check_idle()


@pytest.mark.parametrize("kind", ["resets", "message"])
async def test_strangers_to_a_service_with_tokens_are_closed(
    start_service: StartService, tmp_path: Path, kind: str
) -> None:
    tokens = save(tmp_path / "tokens", entry("good", "good-token"))
    service = await start_service(
        "p0", "d0", router=PATIENT, gateway={"host": "127.0.0.1", "port": 0, "tokens": str(tokens)}
    )
    async with innocents(service, "good-token"):
        assert (await attacked(address_of(service), kind)).is_over


@pytest.mark.parametrize("scale", [8, pytest.param(1, marks=pytest.mark.soak)])
async def test_what_honest_clients_send_closes_nothing(
    start_service: StartService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, scale: int
) -> None:
    """The longest messages, as many streams as there may be at once and more, and many that are cancelled at once."""
    caplog.set_level(logging.WARNING, logger="gateway.grpc_api.connection_guard")
    monkeypatch.setattr(server_options, "MAX_STREAMS", connection_guard.MAX_STREAMS // scale)
    for bound in ("EMPTY_CALLS", "FREE_BYTES", "KNOWN_FREE_BYTES"):
        monkeypatch.setattr(connection_guard, bound, getattr(connection_guard, bound) // scale)
    many = 3000 // scale
    service = await start_service("p0", "d0", router={**PATIENT, "max_queue": many})
    stub: Any = inference_pb2_grpc.InferenceStub(service.channel)
    long = pb.GenerateRequest(text="x" * 900_000)

    async def refused() -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(long).read()
        return caught.value.code()

    for _ in range(max(2, 8 // scale)):
        answers = await asyncio.gather(*(refused() for _ in range(16)))
        assert set(answers) == {grpc.StatusCode.INVALID_ARGUMENT}
    short = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.Sampling(max_tokens=1))

    async def served(stub: Any = stub) -> int:
        return len([message async for message in stub.Generate(short, timeout=WAIT_S)])

    async with grpc.aio.insecure_channel(address_of(service), [("grpc.use_local_subchannel_pool", 1)]) as second:
        stubs = stub, inference_pb2_grpc.InferenceStub(second)
        assert set(await asyncio.gather(*(served(stubs[number % 2]) for number in range(many)))) == {2}
    for _ in range(3):
        calls = [stub.Generate(short) for _ in range(many // 6)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*(call.code() for call in calls))
        # For gRPC's client a cancelled call counts as a stream of the connection until its object is deleted, which
        # reference cycles delay.
        del calls, call
        gc.collect()
    assert await served() == 2
    assert not caplog.records
    await service.until(lambda: service.is_idle)


async def test_clients_that_are_refused_keep_their_connection(
    start_service: StartService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their messages come, and are not read."""
    monkeypatch.setattr(connection_guard, "KNOWN_FREE_BYTES", 2**20)
    caplog.set_level(logging.WARNING, logger="gateway.grpc_api.connection_guard")
    service = await start_service("p0", "d0", router={**PATIENT, "max_queue": 1, "prefill_backlog_tokens": 1})
    service.fleet["p0"].hangs = {"prefill"}
    stub: Any = inference_pb2_grpc.InferenceStub(service.channel)
    options: Any = {"sampling": pb.Sampling(max_tokens=2), "mode": pb.MODE_PD}
    short = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), **options)
    running = [stub.Generate(short) for _ in range(2)]  # one waits
    await service.until(lambda: service.gateway.router.queued == 1)
    prompt = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(5, 1_005)), **options)
    for _ in range(30):
        codes = await asyncio.gather(*(stub.Generate(prompt).code() for _ in range(30)))
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    await asyncio.sleep(0.3)
    assert not caplog.records
    for call in running:
        call.cancel()
    await service.until(lambda: service.is_idle)


async def test_calls_that_are_reset_before_their_message_are_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_guard, "EMPTY_CALLS", 64)
    caplog.set_level(logging.WARNING, logger="gateway.grpc_api.connection_guard")
    generate: Any = service.channel.stream_stream("/pdserve.v1.Inference/Generate")
    for _ in range(20):
        calls = [generate() for _ in range(20)]
        waits = (call.wait_for_connection() for call in calls)
        await asyncio.gather(*waits, return_exceptions=True)  # the guard may close the connection meanwhile
        await asyncio.sleep(0.02)  # the handlers run
        for call in calls:
            call.cancel()
        if caplog.records:
            break
    await service.until(lambda: bool(caplog.records))
    assert "calls had no valid token, or were reset before their message came" in caplog.text
    service.check_idle()


@contextlib.contextmanager
def connected(service: Service, count: int) -> Iterator[list[socket.socket]]:
    """Connections without a call."""
    with contextlib.ExitStack() as opened:
        sockets = []
        for _ in range(count):
            each = opened.enter_context(socket.create_connection(("127.0.0.1", service.gateway.port)))
            each.sendall(PREFACE + frame(SETTINGS, 0, 0))
            each.setblocking(False)
            sockets.append(each)
        yield sockets


def closed(sockets: list[socket.socket]) -> list[int]:
    """Which of them the server has closed."""

    def is_closed(each: socket.socket) -> bool:
        try:
            while each.recv(2**16):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    return [number for number, each in enumerate(sockets) if is_closed(each)]


async def test_connections_without_a_call_make_room_for_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_guard, "MAX_UNKNOWN", 4)
    async with innocents(service):
        with connected(service, 4) as first:
            await asyncio.sleep(0.5)  # the guard has seen them
            with connected(service, 2) as second:
                await service.until(lambda: len(closed(first)) == 2)
                await asyncio.sleep(0.5)
                assert (len(closed(first)), closed(second)) == (2, [])


async def test_one_host_has_so_many_connections(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async with innocents(service):
        monkeypatch.setattr(connection_guard, "MAX_FROM_ONE_HOST", 8)
        with connected(service, 8) as sockets:
            await service.until(lambda: len(closed(sockets)) >= 3)  # beside three innocents and the test's own channel
            await asyncio.sleep(0.5)
            assert len(closed(sockets)) in (3, 4)


async def test_a_host_that_floods_again_and_again_has_less_each_time(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    part = UPDATE * (connection_guard.FREE_BYTES // 4 // len(UPDATE))

    async def send_part() -> list[int]:
        with connected(service, 1) as sockets:
            sender = threading.Thread(target=lambda: _send_all(sockets[0], part))
            sender.start()
            await asyncio.sleep(1.0)
            sender.join()
            return closed(sockets)

    async with innocents(service):
        assert await send_part() == []
        assert (await attacked(address_of(service), "settings")).is_over
        assert await send_part() == [0]
        async with AsyncClient(address_of(service)) as client:  # from the same host
            assert (await client.generate(PROMPT, max_tokens=2).result()).attempts == 1
    assert "a connection from 127.0.0.1 is closed: " in caplog.text


def _send_all(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.setblocking(True)
        connection.sendall(data)
        connection.setblocking(False)


async def test_a_client_that_ends_its_call_without_a_request_is_told_so(service: Service) -> None:
    generate: Any = service.channel.stream_stream("/pdserve.v1.Inference/Generate")
    call = generate()
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await call.details()).startswith("message: the call ended without one")
    service.check_idle()
