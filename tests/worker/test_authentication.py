"""Control and registry streams: which peers are refused, and what is on the wire. A real worker, and real streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import prefill_worker.push
from contract.control import Ping
from contract.message import encode
from pdserve.core.errors import PdserveError, WorkerLost
from pdserve.core.worker import Role, WorkerInfo
from runtime.grpc_tls import add_port
from runtime.plane_tls import SERVER_NAME, PlaneTls
from runtime.secret import ServiceSecret
from runtime.stream_proof import MEET, StreamDialler, StreamListener
from tests.certificates import Certificates, service_tls, tls_of
from tests.kv_transfer.relay import Relay
from tests.loopback import SECRET
from tests.worker.test_heartbeat import registry_at
from tests.worker.test_requests import running
from worker.authentication import CONTROL, REGISTRY, StreamService, open_stream, proven_server, stream_channel
from worker.client import WorkerClient

PROMPT = b"the prompt of a request, which others must not read" * 10
OTHER = ServiceSecret.new()
SOON_S = 15.0
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)
"""What gRPC tells the client of a call that is refused. INTERNAL: the refusal came while the client wrote."""


@contextlib.asynccontextmanager
async def echo(
    service: StreamService = CONTROL,
    secret: ServiceSecret = SECRET,
    *,
    tls: PlaneTls | None = None,
    through: Callable[[str], str] = lambda address: address,
) -> AsyncIterator[StreamListener]:
    """A server that answers each message of a proven peer with itself. ``through`` puts a relay before it."""

    async def serve(requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for data in requests:
            yield data

    proofs = StreamListener(secret, service.purpose, "")
    server = proven_server(service, proofs, serve, 2**20)
    proofs.address = through(f"127.0.0.1:{add_port(server, '127.0.0.1:0', tls)}")
    await server.start()
    try:
        yield proofs
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def recorded(tls: PlaneTls | None) -> AsyncIterator[Relay]:
    """`echo` behind a relay that records."""
    relays: list[Relay] = []

    def through(address: str) -> str:
        relays.append(Relay(address, record=True))
        return relays[0].address

    async with echo(tls=tls, through=through):
        try:
            yield relays[0]
        finally:
            relays[0].close()


async def is_refused(channel: grpc.aio.Channel, method: str, metadata: Any = ()) -> bool:
    """Whether a call with one message is refused, and gets no answer before."""
    stub: Any = channel.stream_stream(method)
    call = stub(metadata=metadata, timeout=SOON_S)
    answers: list[bytes] = []
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(encode(Ping(1)))
        answers.extend([answer async for answer in call])
    return await call.code() in REFUSED and not answers


async def test_streams_carry_messages_of_any_size_between_proven_ends() -> None:
    async with echo() as proofs, stream_channel(proofs.address, 2**20) as channel:
        for _ in range(5):
            stream = await open_stream(channel, CONTROL, SECRET, proofs.address)
            for size in (0, 1, 2**16, 2**20 - 100):
                await stream.write(bytes(size))
                assert await stream.read() == bytes(size)
            stream.cancel()
        assert proofs.refused == 0


async def test_a_peer_without_the_secret_is_refused_before_its_message_is_read() -> None:
    method = f"/{CONTROL.name}/{CONTROL.method}"
    async with echo() as proofs, grpc.aio.insecure_channel(proofs.address) as channel:
        dialler = StreamDialler(SECRET, CONTROL.purpose, proofs.address)
        meet: Any = channel.stream_stream(f"/{CONTROL.name}/{MEET}")
        challenge = await meet(metadata=dialler.greeting).trailing_metadata()
        proof = dialler.answer(challenge)
        wrong = (*proof[:2], (proof[2][0], bytes(32)))
        reflected = (*proof[:2], (proof[2][0], dict(challenge)[proof[2][0]]))
        for number, metadata in enumerate(((), dialler.greeting, wrong, reflected), 1):
            assert await is_refused(channel, method, metadata)
            assert proofs.refused == number
        async with grpc.aio.insecure_channel(proofs.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            assert await is_refused(other, method, proof)  # from another connection
        assert await is_refused(channel, f"/{CONTROL.name}/{MEET}")
        stub: Any = channel.stream_stream(method)
        stream = stub(metadata=proof)
        await stream.write(b"proven")
        assert await stream.read() == b"proven"
        assert await is_refused(channel, method, proof)  # the second time


async def test_a_server_that_is_not_the_dialled_one_of_the_service_gets_nothing() -> None:
    for rogue in (echo(secret=OTHER), echo(StreamService(CONTROL.name, CONTROL.method, REGISTRY.purpose))):
        async with rogue as proofs, stream_channel(proofs.address, 2**20) as channel:
            with pytest.raises(PdserveError, match="the peer does not know the service's secret"):
                await open_stream(channel, CONTROL, SECRET, proofs.address)
    async with echo() as proofs, stream_channel(proofs.address, 2**20) as channel:
        with pytest.raises(PdserveError, match="the peer does not know the service's secret"):
            await open_stream(channel, CONTROL, SECRET, "10.0.0.1:20001")  # which a relay would pass on


async def test_a_worker_reports_to_its_own_gateway_only(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A gateway of another service gets no link, and learns nothing of it if it has taken the registry's port."""
    often = {"heartbeat_s": 0.05, "heartbeat_timeout_s": 600.0}
    async with running(model, Role.PREFILL, prefill_worker.push.HANDLERS, router=often) as (worker, client):
        with pytest.raises(WorkerLost, match="the peer does not know the service's secret"):
            await WorkerClient.connect(client.info, "g", OTHER)
        address = worker.spec.registry_addresses[0]
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


# --- TLS -------------------------------------------------------------------------------------------------------------


async def talk(address: str, tls: PlaneTls | None) -> None:
    """Send a message, and get it back."""
    async with stream_channel(address, 2**20, tls) as channel:
        stream = await open_stream(channel, CONTROL, SECRET, address)
        await stream.write(PROMPT)
        assert await stream.read() == PROMPT
        stream.cancel()


@pytest.mark.parametrize("encrypted", [True, False])
async def test_prompts_cannot_be_read_on_the_wire(encrypted: bool) -> None:
    tls = service_tls() if encrypted else None
    async with recorded(tls) as relay:
        await talk(relay.address, tls)
        assert (PROMPT in relay.seen) is not encrypted
        assert relay.seen.startswith(b"\x16\x03" if encrypted else b"PRI * HTTP/2.0")


async def test_a_peer_without_a_certificate_is_refused(certificates: Certificates) -> None:
    """Nothing but TLS is spoken with it, and streams of the service go on. `test_worker_tls` has other certificates."""
    tls = tls_of(**certificates.of_plane())
    credentials = grpc.ssl_channel_credentials(certificates.ca.read_bytes())
    options = (("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1))
    async with recorded(tls) as relay:
        await talk(relay.address, tls)
        async with grpc.aio.secure_channel(relay.address, credentials, options=options) as channel:
            with pytest.raises(PdserveError):
                await open_stream(channel, CONTROL, SECRET, relay.address)
        host, _, port = relay.address.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while more := plain.recv(4096):
                    answer += more
            assert not answer or answer[0] == 21, "a TLS alert, no frame of HTTP/2"
        await talk(relay.address, tls)


async def test_nothing_is_said_to_a_server_that_is_not_of_the_service(certificates: Certificates) -> None:
    """It has no TLS, or a certificate of another CA, or one of the CA for another name."""
    tls = tls_of(**certificates.of_plane())
    strange = tls_of(**certificates.of_plane(certificates.strange_worker, certificates.stranger.cert))
    for impostor in (None, strange):
        async with recorded(impostor) as relay:
            with pytest.raises(PdserveError):
                await talk(relay.address, tls)
            assert b"pdserve-greeting" not in relay.seen
    cert, key = certificates.server.cert.read_bytes(), certificates.server.key.read_bytes()
    other_name = grpc.ssl_server_credentials([(key, cert)])
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", other_name)
    await server.start()
    try:
        with pytest.raises(PdserveError, match=r"(?i)peer name|hostname|verif|handshake"):
            await talk(f"127.0.0.1:{port}", tls)
    finally:
        await server.stop(None)
