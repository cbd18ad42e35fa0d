"""Peers without the service's secret on the KV port of every transport: they get nothing and cost nothing, and a sender
gives nothing to a receiver without it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kv_transfer.base import KVTransport
from kv_transfer.receiver import KVReceiver
from kv_transfer.transports.socket_transport import MAGIC, read_exactly
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import TransferError, TransferRefused
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import KVLayout
from runtime.secret import ServiceSecret, Side, new_nonce
from runtime.stream_proof import MEET, StreamDialler
from tests.host_pool import HostPool
from tests.http2_flood import PeakMemory, flood
from tests.kv_transfer.end import End, until
from tests.kv_transfer.relay import Relay
from tests.loopback import SECRET, create_transport

importlib.import_module("kv_transfer.transports.torch_groups")  # here, where no timeout runs: it takes seconds

LAYOUT = KVLayout.uniform("model", "float32", block_size=16, num_layers=2, num_kv_heads=2, head_dim=64)
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
)
SOCKETS = ["shm", "tcp", "torch_dist", NIXL]
ALL = [*SOCKETS, "grpc_stream"]
AT_ONCE_S = 4.0  # less than a silent peer has
OTHER = ServiceSecret.new()
EXCHANGE = "/pdserve.internal.v1.KVTransfer/Exchange"


class Ends:
    """A receiver that listens, and a transport that dials it with a secret of its own."""

    def __init__(self, name: str, secret: ServiceSecret) -> None:
        self.source, self.target = HostPool(LAYOUT, 4), HostPool(LAYOUT, 4)
        self.listening: KVTransport = create_transport(name, self.target.memory, timeout_s=5.0)
        self.calling: KVTransport = create_transport(name, self.source.memory, secret, timeout_s=5.0)
        self.receiver = KVReceiver(
            self.target, [self.listening], worker_id="d", epoch="e", checksum=True, clock=MonotonicClock(), lease_s=60.0
        )
        self.endpoint = KVEndpoint(name, "")

    def socket(self) -> socket.socket:
        """A connection to the receiver, over which nothing has been said."""
        if self.endpoint.transport == "shm":
            connection = socket.socket(socket.AF_UNIX)
            connection.connect("\0" + self.endpoint.address.rpartition("/")[2])
        else:
            host, _, port = self.endpoint.address.rpartition(":")
            connection = socket.create_connection((host, int(port)))
        connection.setblocking(False)
        return connection

    async def count(self, expected: int) -> None:
        """Wait until the receiver has refused so many peers as unproven, and nothing else."""
        async with asyncio.timeout(AT_ONCE_S):
            while self.receiver.refused != {"unproven": expected}:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(name: str, secret: ServiceSecret = OTHER) -> AsyncIterator[Ends]:
    """`Ends`, closed afterwards."""
    ends = Ends(name, secret)
    try:
        (ends.endpoint,) = await ends.receiver.start("127.0.0.1")
        yield ends
    finally:
        await asyncio.gather(ends.calling.aclose(), ends.receiver.aclose())
        await ends.listening.aclose()


async def rest(connection: socket.socket) -> bytes:
    """What the peer still sends until it closes the connection, which it does at once."""
    data = b""
    async with asyncio.timeout(AT_ONCE_S):
        with contextlib.suppress(ConnectionResetError):
            while more := await asyncio.get_running_loop().sock_recv(connection, 2**16):
                data += more
    return data


@pytest.mark.parametrize("name", ALL)
async def test_a_sender_gives_nothing_to_a_receiver_without_the_secret(name: str) -> None:
    async with listening(name) as ends:
        with pytest.raises(TransferRefused, match="the peer does not know the service's secret"):
            await ends.calling.connect(ends.endpoint, 5.0)
        assert OTHER.hex() not in repr(vars(ends.calling))


@pytest.mark.parametrize("name", SOCKETS)
async def test_a_stranger_gets_a_challenge_and_nothing_else(name: str) -> None:
    """Without a layout, a worker's id, a descriptor of the pool or an agent's name among it."""
    loop = asyncio.get_running_loop()
    async with listening(name) as ends:
        for number, attempt in enumerate(("wrong", "other secret", "reflected", "replayed", "nothing more"), 1):
            with ends.socket() as connection:
                greeting = new_nonce()
                await loop.sock_sendall(connection, MAGIC + greeting)
                challenge = await read_exactly(connection, 64)
                right: tuple[Any, ...] = (
                    f"kv {name}",
                    Side.DIALLING,
                    (greeting, challenge[:32]),
                    ends.endpoint.address,
                )
                if attempt == "replayed":  # from this connection on another one
                    with ends.socket() as other:
                        await loop.sock_sendall(other, MAGIC + greeting)
                        assert (await read_exactly(other, 64))[:32] != challenge[:32]
                        await loop.sock_sendall(other, SECRET.proof(*right))
                        assert await rest(other) == b""
                elif attempt == "nothing more":
                    connection.shutdown(socket.SHUT_WR)
                    assert await rest(connection) == b""
                    continue
                else:
                    proofs = {"wrong": bytes(32), "other secret": OTHER.proof(*right), "reflected": challenge[32:]}
                    await loop.sock_sendall(connection, proofs[attempt])
                    assert await rest(connection) == b""
            await ends.count(number)
        assert not len(ends.listening._handshake_limit)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SOCKETS)
async def test_other_protocols_and_floods_end_before_they_are_parsed(name: str) -> None:
    loop = asyncio.get_running_loop()
    async with listening(name) as ends:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), os.urandom(2**20)):
            with ends.socket() as connection:
                with contextlib.suppress(OSError):  # it is closed while this end still sends
                    await loop.sock_sendall(connection, data)
                assert await rest(connection) == b""


@pytest.mark.parametrize("name", ["tcp", "grpc_stream"])
async def test_a_proof_is_worth_nothing_at_another_address(name: str) -> None:
    """A relay that somebody has the sender dial in the receiver's place gets no link out of either."""
    async with listening(name, SECRET) as ends:
        relay = Relay(ends.endpoint.address)
        try:
            with pytest.raises(TransferRefused, match="does not know the service's secret"):
                await ends.calling.connect(KVEndpoint(name, relay.address), 5.0)
        finally:
            relay.close()
        link = await ends.calling.connect(ends.endpoint, 5.0)
        await link.aclose()


@pytest.mark.parametrize("name", SOCKETS)
async def test_an_unproven_connection_allocates_little(name: str) -> None:
    """Each sends as much as it can, and stays: less than 64 KiB are held for it."""
    loop = asyncio.get_running_loop()
    count = 50
    async with listening(name) as ends:
        with contextlib.ExitStack() as stack:
            tracemalloc.start()
            try:
                with ends.socket() as first:  # what is made once
                    await loop.sock_sendall(first, MAGIC + new_nonce())
                    await read_exactly(first, 64)
                    before = tracemalloc.get_traced_memory()[0]
                    tracemalloc.reset_peak()
                    for _ in range(count):
                        connection = stack.enter_context(ends.socket())
                        await loop.sock_sendall(connection, MAGIC + new_nonce())
                        await read_exactly(connection, 64)
                        with contextlib.suppress(BlockingIOError, OSError):
                            while True:
                                connection.send(bytes(31))  # never a whole proof, then far too much
                                connection.send(bytes(2**14))
                    await asyncio.sleep(0.1)
                    held = tracemalloc.get_traced_memory()[1] - before
            finally:
                tracemalloc.stop()
        assert held / count < 64 * 2**10


class GrpcStranger:
    """A gRPC client without the secret."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])

    def status(self, method: str, message: bytes = b"", metadata: Any = ()) -> tuple[grpc.StatusCode, list[bytes]]:
        """How a call ends, and what came back."""
        stub: Any = self.channel.stream_stream(method)
        call = stub(iter((message,)), metadata=metadata, timeout=AT_ONCE_S)
        answers = []
        with contextlib.suppress(grpc.RpcError):
            answers = list(call)
        return call.code(), answers


async def test_a_stranger_gets_nothing_from_a_grpc_stream() -> None:
    async with listening("grpc_stream") as ends:
        stranger = GrpcStranger(ends.endpoint.address)
        dialler = StreamDialler(SECRET, "kv grpc_stream", ends.endpoint.address)
        forged = (
            ("pdserve-greeting-bin", bytes(32)),
            ("pdserve-nonce-bin", bytes(32)),
            ("pdserve-proof-bin", bytes(32)),
        )
        refused: tuple[grpc.StatusCode, list[bytes]] = (grpc.StatusCode.UNAUTHENTICATED, [])
        for metadata in ((), dialler.greeting, forged):
            assert await asyncio.to_thread(stranger.status, EXCHANGE, b"junk", metadata) == refused
        await ends.count(3)
        await asyncio.to_thread(stranger.channel.close)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ends.listening.accept()


def test_messages_of_strangers_are_not_read_by_grpc() -> None:
    """gRPC itself would hold all of a message, up to 4 GiB, however small its limit. What is in the socket's buffer it
    reads at once, before it sees that the sender ignores flow control: mostly 1 MiB, under load more."""
    end = End("receiver", ["grpc_stream"])
    try:
        ((_, address),) = end.about["endpoints"]
        meet = EXCHANGE.replace("Exchange", MEET)
        flood(address, EXCHANGE, 2**16)
        peak = PeakMemory(end._process.pid)
        for method in (EXCHANGE, meet) * 3:
            flood(address, method, 64 * 2**20)
        assert peak.growth_bytes() < 40 * 2**20
        assert until(lambda: end.call("refused")["refused"] == {"unproven": 7})
    finally:
        end.close()


@pytest.mark.parametrize("name", ALL)
async def test_a_link_is_opened_among_strangers_that_stay(name: str) -> None:
    async with listening(name, SECRET) as ends:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(ends.socket())
            try:
                link = await ends.calling.connect(ends.endpoint, 10.0)
            except TransferError as error:
                pytest.fail(str(error))
            await link.aclose()
