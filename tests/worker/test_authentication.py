"""Strangers on the control port and the registry port, and workers among strangers: a real worker, and real streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import decode_worker.receive
import prefill_worker.push
from pdserve.core.errors import PdserveError, WorkerLost
from pdserve.core.worker import Role, WorkerInfo
from runtime.secret import ServiceSecret
from runtime.stream_proof import MEET, StreamDialler, StreamListener
from tests.loopback import SECRET
from tests.output_stream import sent
from tests.random_models import save_random_model
from tests.worker.test_heartbeat import registry_at
from tests.worker.test_requests import check_idle, outputs, request_for, running
from worker.authentication import CONTROL, REGISTRY, Context, StreamService, open_stream, proven_server, stream_channel
from worker.client import WorkerClient
from worker.messages import Ping, Run, encode

DECODE = decode_worker.receive.HANDLERS
OTHER = ServiceSecret.new()
SOON_S = 15.0
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)
"""What gRPC tells the client of a call that is refused. INTERNAL: the refusal came while the client wrote."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


@contextlib.asynccontextmanager
async def echo(service: StreamService, secret: ServiceSecret = SECRET) -> AsyncIterator[StreamListener]:
    """A server that answers each message of a proven peer with itself."""

    async def serve(requests: AsyncIterator[bytes], _: Context) -> AsyncGenerator[bytes, None]:
        async for data in requests:
            yield data

    proofs = StreamListener(secret, service.purpose, "")
    server = proven_server(service, proofs, serve, 2**20)
    proofs.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield proofs
    finally:
        await server.stop(None)


async def is_refused(channel: grpc.aio.Channel, method: str, metadata: Any = ()) -> bool:
    """Whether a call with one message is refused, and gets no answer before."""
    stub: Any = channel.stream_stream(method)
    call = stub(metadata=metadata, timeout=SOON_S)
    answers: list[bytes] = []
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(encode(Ping(1)))
        answers.extend([answer async for answer in call])
    return await call.code() in REFUSED and not answers


@pytest.mark.parametrize("service", [CONTROL, REGISTRY], ids=lambda service: service.purpose)
async def test_streams_carry_messages_of_any_size_between_proven_ends(service: StreamService) -> None:
    async with echo(service) as proofs, stream_channel(proofs.address, 2**20) as channel:
        for _ in range(50):
            stream = await open_stream(channel, service, SECRET, proofs.address)
            for size in (0, 1, 2**16, 2**20 - 100):
                await stream.write(bytes(size))
                assert await stream.read() == bytes(size)
            stream.cancel()
        assert proofs.refused == 0


@pytest.mark.parametrize("service", [CONTROL, REGISTRY], ids=lambda service: service.purpose)
async def test_a_stranger_is_refused_before_its_message_is_read(service: StreamService) -> None:
    method = f"/{service.name}/{service.method}"
    async with echo(service) as proofs, grpc.aio.insecure_channel(proofs.address) as channel:
        dialler = StreamDialler(SECRET, service.purpose, proofs.address)
        meet: Any = channel.stream_stream(f"/{service.name}/{MEET}")
        challenge = await meet(metadata=dialler.greeting).trailing_metadata()
        proof = dialler.answer(challenge)
        short = tuple((key, value[:-1]) for key, value in proof)
        wrong = (*proof[:2], (proof[2][0], bytes(32)))
        reflected = (*proof[:2], (proof[2][0], dict(challenge)[proof[2][0]]))
        for number, metadata in enumerate(((), dialler.greeting, short, wrong, reflected), 1):
            assert await is_refused(channel, method, metadata)
            assert proofs.refused == number
        async with grpc.aio.insecure_channel(proofs.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            assert await is_refused(other, method, proof)  # from another connection
        assert await is_refused(channel, f"/{service.name}/{MEET}")
        stub: Any = channel.stream_stream(method)
        stream = stub(metadata=proof)
        await stream.write(b"proven")
        assert await stream.read() == b"proven"
        assert await is_refused(channel, method, proof)  # the second time


@pytest.mark.parametrize("service", [CONTROL, REGISTRY], ids=lambda service: service.purpose)
async def test_a_server_that_is_not_the_dialled_one_of_the_service_gets_nothing(service: StreamService) -> None:
    other = REGISTRY if service is CONTROL else CONTROL
    for rogue in (echo(service, OTHER), echo(StreamService(service.name, service.method, other.purpose))):
        async with rogue as proofs, stream_channel(proofs.address, 2**20) as channel:
            with pytest.raises(PdserveError, match="the peer does not know the service's secret"):
                await open_stream(channel, service, SECRET, proofs.address)
    async with echo(service) as proofs, stream_channel(proofs.address, 2**20) as channel:
        with pytest.raises(PdserveError, match="the peer does not know the service's secret"):
            await open_stream(channel, service, SECRET, "10.0.0.1:20001")  # which a relay would pass on


async def test_a_gateway_of_another_service_controls_no_worker(model: Path) -> None:
    async with running(model, Role.DECODE, DECODE) as (worker, client):
        with pytest.raises(WorkerLost, match="the peer does not know the service's secret"):
            await WorkerClient.connect(client.info, OTHER)
        bad = encode(Run(request_for("bad", max_tokens=1)))
        async with grpc.aio.insecure_channel(client.info.control_address) as channel:
            stub: Any = channel.stream_stream(f"/{CONTROL.name}/{CONTROL.method}")
            call = stub()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(bad)
            assert await call.code() in REFUSED
        assert "bad" not in worker._table
        await check_idle(worker)
        assert len(await outputs(sent(client.run, request_for("good")))) == 4


async def test_a_worker_reports_to_its_own_gateway_only(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of another service, or a stranger, that has taken the registry's port learns nothing of it."""
    often = {"heartbeat_s": 0.05, "heartbeat_timeout_s": 600.0}
    async with running(model, Role.PREFILL, prefill_worker.push.HANDLERS, router=often) as (prefill, _):
        address = prefill.spec.registry_addresses[0]
        async with registry_at(address, OTHER) as rogue:
            async with asyncio.timeout(SOON_S):
                while "does not know the service's secret" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            assert rogue.beats.empty()
        assert caplog.text.count(f"prefill-0: the gateway at {address} does not answer: ") == 1
        async with registry_at(address) as registry:
            beat = await registry.next()
            assert isinstance(beat.info, WorkerInfo)
            await registry.next()
    assert SECRET.hex() not in caplog.text
