"""Control and registry streams over TLS: what is on the wire, and who is refused."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import pytest

from pdserve.core.errors import PdserveError
from runtime.grpc_tls import add_port
from runtime.plane_tls import SERVER_NAME, PlaneTls
from runtime.stream_proof import StreamListener
from tests.certificates import Certificates, service_tls, tls_of
from tests.kv_transfer.relay import Relay
from tests.loopback import SECRET
from worker.authentication import CONTROL, REGISTRY, Context, StreamService, open_stream, proven_server, stream_channel

PROMPT = b"the prompt of a request, which others must not read" * 10
BOTH = pytest.mark.parametrize("service", [CONTROL, REGISTRY], ids=lambda service: service.purpose)


@contextlib.asynccontextmanager
async def echo(service: StreamService, tls: PlaneTls | None) -> AsyncIterator[Relay]:
    """A server that answers each message of a proven peer with itself, behind a relay that records."""

    async def serve(requests: AsyncIterator[bytes], _: Context) -> AsyncGenerator[bytes, None]:
        async for data in requests:
            yield data

    proofs = StreamListener(SECRET, service.purpose, "")
    server = proven_server(service, proofs, serve, 2**20)
    relay = Relay(f"127.0.0.1:{add_port(server, '127.0.0.1:0', tls)}", record=True)
    proofs.address = relay.address
    await server.start()
    try:
        yield relay
    finally:
        relay.close()
        await server.stop(None)


async def talk(service: StreamService, address: str, tls: PlaneTls | None) -> None:
    """Send a message, and get it back."""
    async with stream_channel(address, 2**20, tls) as channel:
        stream = await open_stream(channel, service, SECRET, address)
        await stream.write(PROMPT)
        assert await stream.read() == PROMPT
        stream.cancel()


@BOTH
@pytest.mark.parametrize("encrypted", [True, False])
async def test_prompts_cannot_be_read_on_the_wire(service: StreamService, encrypted: bool) -> None:
    tls = service_tls() if encrypted else None
    async with echo(service, tls) as relay:
        await talk(service, relay.address, tls)
        assert (PROMPT in relay.seen) is not encrypted
        assert relay.seen.startswith(b"\x16\x03" if encrypted else b"PRI * HTTP/2.0")


@BOTH
async def test_peers_without_a_certificate_of_the_service_are_refused(
    service: StreamService, certificates: Certificates
) -> None:
    """Although they know the secret. Nothing but TLS is spoken with them, and streams of the service go on."""
    tls = tls_of(**certificates.of_plane())
    strange = tls_of(**certificates.of_plane(certificates.strange_worker, certificates.stranger.cert))
    ca = certificates.ca.read_bytes()
    credentials = {
        "no certificate": grpc.ssl_channel_credentials(ca),
        "another CA": grpc.ssl_channel_credentials(ca, strange.key, strange.cert),
        "of the service": grpc.ssl_channel_credentials(ca, tls.key, tls.cert),
    }
    async with echo(service, tls) as relay:
        await talk(service, relay.address, tls)
        with pytest.raises(PdserveError):
            await talk(service, relay.address, None)
        for name, each in credentials.items():
            options = (("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1))
            async with grpc.aio.secure_channel(relay.address, each, options=options) as channel:
                opening = open_stream(channel, service, SECRET, relay.address)
                if name == "of the service":
                    (await opening).cancel()
                    continue
                with pytest.raises(PdserveError):
                    await opening
        host, _, port = relay.address.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while more := plain.recv(4096):
                    answer += more
            assert not answer or answer[0] == 21, "a TLS alert, no frame of HTTP/2"
        await talk(service, relay.address, tls)


@BOTH
async def test_nothing_is_said_to_a_server_that_is_not_of_the_service(
    service: StreamService, certificates: Certificates
) -> None:
    """It has no TLS, or a certificate of another CA, or one of the CA for another name."""
    tls = tls_of(**certificates.of_plane())
    strange = tls_of(**certificates.of_plane(certificates.strange_worker, certificates.stranger.cert))
    for impostor in (None, strange):
        async with echo(service, impostor) as relay:
            with pytest.raises(PdserveError):
                await talk(service, relay.address, tls)
            assert b"pdserve-greeting" not in relay.seen
    cert, key = certificates.server.cert.read_bytes(), certificates.server.key.read_bytes()
    other_name = grpc.ssl_server_credentials([(key, cert)])
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", other_name)
    await server.start()
    try:
        with pytest.raises(PdserveError, match=r"(?i)peer name|hostname|verif|handshake"):
            await talk(service, f"127.0.0.1:{port}", tls)
    finally:
        await server.stop(None)
