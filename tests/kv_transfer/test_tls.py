"""KV over TLS: what is on the wire, which peers are refused, and which transports a service with TLS uses."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kv_transfer import factory
from kv_transfer.factory import choose
from kv_transfer.memory import HostMemory
from kv_transfer.sender import KVSender
from kv_transfer.transports.socket_transport import MAGIC
from pdserve.core.errors import ConfigError, TransferError, TransferRefused
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import PlaneTls
from tests.certificates import Certificates, service_tls, tls_of
from tests.host_pool import HostPool
from tests.kv_transfer.conftest import LAYOUT, Ends, MakeEnds, sender_of
from tests.kv_transfer.relay import Relay, known_as
from tests.loopback import create_transport

ENCRYPTING = ["tcp", "grpc_stream"]
HANDSHAKE = b"\x16\x03"  # the first bytes of a TLS connection
PROOFS = {"tcp": len(MAGIC) + 2 * 32, "grpc_stream": 0}
"""Bytes that the dialling end sends before TLS."""
TRAILER = b"token 1 of the prompt"


@contextlib.asynccontextmanager
async def sender(name: str, tls: PlaneTls | None) -> AsyncIterator[KVSender]:
    """A prefill worker's KV end of the service, with TLS of its own."""
    pool = HostPool(LAYOUT, 4)
    transport = create_transport(name, pool.memory, tls=tls, timeout_s=2.0)
    one = sender_of(pool, transport, message_bytes=4096, lease_s=5.0, connect_timeout_s=1.0)
    try:
        yield one
    finally:
        await one.aclose()
        await transport.aclose()


async def service(make_ends: MakeEnds, name: str, tls: PlaneTls | None) -> Ends:
    """A decode worker's KV end with ``tls``, and a prefill worker's with the same."""
    pools = HostPool(LAYOUT, 64), HostPool(LAYOUT, 64)
    return await make_ends(
        name,
        source=pools[0],
        target=pools[1],
        sending=create_transport(name, pools[0].memory, tls=tls, timeout_s=5.0),
        receiving=create_transport(name, pools[1].memory, tls=tls, timeout_s=5.0),
    )


async def hand_off(ends: Ends, name: str = "r") -> None:
    """A hand-off of four blocks, whose bytes arrive."""
    blocks = [1, 2, 3, 4]
    ends.start(name, blocks)
    ends.sending[name].send_blocks(0, blocks, last=True, trailer=TRAILER)
    received = await ends.both(name)
    assert received.proof.kv_bytes == 4 * LAYOUT.block_bytes
    assert received.trailer == TRAILER
    ends.check_moved(blocks, blocks)


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("name", ENCRYPTING)
async def test_kv_cannot_be_read_on_the_wire(make_ends: MakeEnds, name: str, encrypted: bool) -> None:
    ends = await service(make_ends, name, service_tls() if encrypted else None)
    (endpoint,) = ends.endpoints
    relay = Relay(endpoint.address, record=True)
    try:
        known_as(ends.receiving_transport, relay.address)
        ends.endpoints = (KVEndpoint(name, relay.address),)
        await hand_off(ends)
        (link,) = ends.sender.links()
        seen = bytes(relay.seen)
    finally:
        relay.close()
    assert len(seen) > 4 * LAYOUT.block_bytes
    kv = ends.source.bytes_of([2])
    needles = [TRAILER, *(kv[start : start + 64] for start in range(0, len(kv), 64))]
    found = [needle for needle in needles if needle in seen]
    assert found == ([] if encrypted else needles)
    assert seen[PROOFS[name] :].startswith(HANDSHAKE) is encrypted
    assert ("encrypted (TLS)" in link.reason) is encrypted


def without_certificate(tls: PlaneTls) -> PlaneTls:
    """An end that verifies the other one and has nothing to show."""
    dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dialling.load_verify_locations(cadata=tls.ca.decode())
    return replace(tls, cert=None, key=None, dialling=dialling)  # type: ignore[arg-type]


def of_another_ca(certificates: Certificates, *, trusting: PlaneTls) -> PlaneTls:
    """An end with a certificate of another CA, which trusts the service's."""
    strange = tls_of(**certificates.of_plane(certificates.strange_worker, certificates.stranger.cert))
    strange.dialling.load_verify_locations(cadata=trusting.ca.decode())
    return replace(strange, ca=trusting.ca)


@pytest.mark.parametrize("name", ENCRYPTING)
async def test_peers_without_a_certificate_of_the_service_are_refused(
    make_ends: MakeEnds, name: str, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    """Although they know the secret. A hand-off in between and afterwards goes on."""
    tls = tls_of(**certificates.of_plane())
    strangers: list[PlaneTls | None] = [None, without_certificate(tls), of_another_ca(certificates, trusting=tls)]
    ends = await service(make_ends, name, tls)
    await hand_off(ends, "before")
    for number, stranger in enumerate(strangers, 1):
        async with sender(name, stranger) as strange:
            with pytest.raises(TransferError):
                await strange.connect(ends.peer)
            assert not strange.links()
        if name == "tcp":
            assert ends.receiver.refused == {"unproven": number}
        await hand_off(ends, f"after {number}")
    if name == "tcp":
        assert "TLS failed" in caplog.text
    async with sender(name, tls) as friend:
        await friend.connect(ends.peer)


@pytest.mark.parametrize("name", ENCRYPTING)
async def test_a_sender_gives_nothing_to_a_receiver_that_is_not_of_the_service(
    make_ends: MakeEnds, name: str, certificates: Certificates
) -> None:
    """It has no TLS, or a certificate of another CA, or one of the CA for another name."""
    tls = tls_of(**certificates.of_plane())
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server = certificates.server
    listening.load_cert_chain(server.cert, server.key)
    other_name = replace(tls, cert=server.cert.read_bytes(), key=server.key.read_bytes(), listening=listening)
    for impostor in (None, of_another_ca(certificates, trusting=tls), other_name):
        ends = await service(make_ends, name, impostor)
        async with sender(name, tls) as honest:
            ends.announce("r", [1], for_s=5.0)
            with pytest.raises(TransferError) as refused:
                await honest.connect(ends.peer)
            if name == "tcp" and impostor is not None:
                assert "TLS failed: " in str(refused.value)
            assert not honest.links()


def test_auto_takes_what_encrypts_or_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "_backend_problem", lambda backend: None)
    names = [name for name in factory.offered_transports("auto", device="cuda") if name != "cuda_ipc"]
    assert names == ["torch_dist", "tcp"]
    transports = [create_transport(name, HostMemory.create(4096), tls=service_tls()) for name in names]
    for transport in transports:
        transport.address = "10.0.0.1:20002"  # type: ignore[attr-defined]
    near = [KVEndpoint("torch_dist", "10.0.0.1:20006"), KVEndpoint("tcp", "10.0.0.1:20007")]
    far = [KVEndpoint("torch_dist", "10.0.0.2:20006"), KVEndpoint("tcp", "10.0.0.2:20007")]
    assert choose(transports, near, "d")[0].name == "torch_dist"
    transport, _, reason = choose(transports, far, "d")
    assert transport.name == "tcp"
    assert reason == (
        "not torch_dist: it is on another host, and this transport cannot encrypt (cluster.tls_cert), encrypted (TLS)"
    )
    without_tls = create_transport("torch_dist", HostMemory.create(4096))
    assert choose([without_tls], far, "d")[0] is without_tls


@pytest.mark.parametrize("name", ["torch_dist", "nixl"])
async def test_a_transport_that_cannot_encrypt_is_refused_between_hosts(name: str) -> None:
    transport = create_transport(name, HostMemory.create(4096), tls=service_tls())
    transport.address = "127.0.0.1:1"  # type: ignore[attr-defined]
    far = KVEndpoint(name, "127.0.0.2:1")
    with pytest.raises(ConfigError, match=rf"^transfer\.transport: no way to d, .*{name}: .* cannot encrypt"):
        choose([transport], [far], "d")
    with pytest.raises(TransferRefused, match="cannot encrypt"):
        await transport.connect(far, 1.0)
    await transport.aclose()
