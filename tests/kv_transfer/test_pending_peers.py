"""Connections whose peer never says who it is, says something else, or does not know the service's secret.

They are few, brief and small, get nothing, and leave nothing behind. Every transport that accepts connections, over
real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from contract.kv import Hello, Open
from contract.message import encode
from kv_transfer.base import KVLink, KVTransport
from kv_transfer.pending_peers import INTRODUCTION_S, MAX_PENDING_PEERS, MIN_PENDING_S, HandshakeLimit, PendingPeer
from kv_transfer.receive_transfer import ReceiveLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.socket_transport import MAGIC, read_exactly
from pdserve.core.errors import PeerLost, TransferError, TransferRefused
from pdserve.core.handoff import KVEndpoint, KVPeer
from pdserve.core.kv_layout import KVLayout
from runtime.secret import ServiceSecret, Side, new_nonce
from runtime.stream_proof import MEET
from tests.host_pool import HostPool, inline
from tests.http2_flood import PeakMemory, flood
from tests.kv_transfer.conftest import receiver_of, sender_of
from tests.kv_transfer.relay import Relay
from tests.loopback import SECRET, create_transport
from tests.virtual_time import IN_VIRTUAL_TIME

importlib.import_module("kv_transfer.transports.torch_groups")  # here, where no timeout runs: it takes seconds

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = KVLayout.uniform(
    "model", "float32", block_size=16, num_layers=2, num_kv_heads=2, head_dim=64
)  # blocks of 32 KiB
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
)
SOCKETS = ["shm", "tcp"]  # the others accept and prove as tcp does
EVERY = ["shm", "tcp", "torch_dist", NIXL, "grpc_stream"]
OTHER = ServiceSecret.new()
EXCHANGE = "/pdserve.internal.v1.KVTransfer/Exchange"
AT_ONCE_S = 4.0  # less than a silent peer has
IN_TIME_S = 15.0
FRAME = struct.Struct("<BIQI")  # kind, bytes of the header, of the payload, references


class Ends:
    """A receiver "d" that listens, and a sender's transport that dials it with a secret of its own."""

    def __init__(self, name: str, secret: ServiceSecret) -> None:
        self.source, self.target = HostPool(LAYOUT, 4), HostPool(LAYOUT, 4)
        self.listening: KVTransport = create_transport(name, self.target.memory, timeout_s=5.0)
        self.calling: KVTransport = create_transport(name, self.source.memory, secret, timeout_s=5.0)
        self.receiver = receiver_of(self.target, self.listening, epoch="e")
        self.endpoint = KVEndpoint(name, "")

    @property
    def limit(self) -> HandshakeLimit:
        """That of the receiver's transport."""
        inside: Any = self.listening
        limit: HandshakeLimit = inside._handshake_limit
        return limit

    async def call(self) -> KVLink:
        """A link, over which nothing has been said yet."""
        return await self.calling.connect(self.endpoint, 10.0)

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
        """Wait until the receiver has refused so many peers without the secret, and nothing else."""
        async with asyncio.timeout(AT_ONCE_S):
            while self.receiver.refused != {"unproven": expected}:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)

    async def check_works(self) -> None:
        """A worker that introduces itself is let in."""
        sender = sender_of(self.source, self.calling, connect_timeout_s=20.0)
        try:
            await sender.connect(KVPeer("d", "e", (self.endpoint,)))
            assert [link.worker_id for link in sender.links()] == ["d"]
        finally:
            await sender.aclose()


@contextlib.asynccontextmanager
async def listening(name: str, secret: ServiceSecret = SECRET) -> AsyncIterator[Ends]:
    """`Ends`, closed afterwards."""
    ends = Ends(name, secret)
    try:
        (ends.endpoint,) = await ends.receiver.start("127.0.0.1")
        yield ends
    finally:
        await asyncio.gather(ends.calling.aclose(), ends.receiver.aclose())
        await ends.listening.aclose()


async def rest(connection: socket.socket) -> bytes:
    """What the peer still sends until it closes the connection, which it does in time."""
    data = b""
    async with asyncio.timeout(IN_TIME_S):
        with contextlib.suppress(OSError):  # closed already, perhaps with data unread
            while more := await asyncio.get_running_loop().sock_recv(connection, 2**16):
                data += more
    return data


async def hung_up(link: KVLink) -> None:
    """Wait until the peer ends the link, in time."""
    async with asyncio.timeout(IN_TIME_S):
        with pytest.raises(PeerLost):
            await link.recv()


async def empty(limit: HandshakeLimit) -> None:
    """Wait until there are none."""
    async with asyncio.timeout(IN_TIME_S):
        while len(limit):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


async def silent(name: str) -> None:
    """One that connects as a worker does, and one that only connects: both are hung up on in time."""
    async with listening(name) as ends:
        link = await ends.call()
        with ends.socket() as raw:
            await hung_up(link)
            await rest(raw)
        await link.aclose()
        await empty(ends.limit)
        await ends.check_works()


async def test_silent_peers_are_hung_up_on_within_seconds() -> None:
    names = ["shm", "tcp", "grpc_stream", "torch_dist"]
    await asyncio.gather(*(silent(name) for name in names))


HELLO = encode(Hello("p", "e", LAYOUT, True, []))


ELSE = {
    "a payload": (HELLO, 2**20),
    "a large header": (b"\0" * (16 * 2**10 + 1), 0),
    "no message": (b"junk", 0),
    "another message": (encode(Open("n", "e", "r", 0)), 0),
}


@pytest.mark.parametrize(
    ("name", "what"),
    [*(("tcp", each) for each in ELSE), *((each, "a payload") for each in ("shm", "torch_dist", "grpc_stream"))],
)
async def test_whoever_says_something_else_first_is_hung_up_on_at_once(name: str, what: str) -> None:
    header, size = ELSE[what]
    async with listening(name) as ends:
        link = await ends.call()
        async with asyncio.timeout(AT_ONCE_S):
            with contextlib.suppress(TransferError):
                await link.send(header, inline(bytes(size)))
                await link.recv()  # the reason, or the end
        await link.aclose()
        await empty(ends.limit)
        await ends.check_works()


@pytest.mark.parametrize("name", ["shm", NIXL])
async def test_references_before_a_hello_are_not_read(name: str) -> None:
    """They would be a mebibyte for a header that announces no more than that."""
    async with listening(name) as ends:
        link: Any = await ends.call()
        await link._stream.write([FRAME.pack(0, len(HELLO), 2**26, 2**16) + HELLO])
        async with asyncio.timeout(AT_ONCE_S):
            await hung_up(link)
        await link.aclose()
        await empty(ends.limit)


@pytest.mark.parametrize(("name", "limit"), [("tcp", MAX_PENDING_PEERS), ("grpc_stream", 16)])
async def test_many_silent_peers_keep_no_worker_out(name: str, limit: int) -> None:
    async with listening(name) as ends:
        callers = [asyncio.create_task(ends.call()) for _ in range(limit + 20)]
        seen = 0

        async def watch() -> None:
            nonlocal seen
            while True:
                seen = max(seen, len(ends.limit))
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        while len(ends.limit) < limit:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
        async with asyncio.timeout(15):
            await ends.check_works()
        watching.cancel()
        assert seen == limit
        links = await asyncio.gather(*callers, return_exceptions=True)
        await asyncio.gather(*(link.aclose() for link in links if isinstance(link, KVLink)))


@IN_VIRTUAL_TIME
async def test_a_silent_peer_has_its_time_and_less_of_it_if_others_wait() -> None:
    limit, loop, gone = HandshakeLimit("test", limit=2), asyncio.get_running_loop(), list[tuple[float, str]]()
    started_s = loop.time()

    def add() -> PendingPeer:
        peer = limit.add()

        def cut(why: str) -> None:
            gone.append((loop.time() - started_s, why))
            loop.call_soon(peer.leave)

        peer.cut = cut
        return peer

    why = "the peer did not introduce itself within"
    first, second = add(), add()
    await limit.room()
    assert gone == [(MIN_PENDING_S, f"{why} 1 s, and others wait")]
    assert len(limit) == 1
    second.leave()
    first.leave()  # it has left
    peers = add(), add()
    waiting = asyncio.create_task(limit.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    peers[0].leave()
    await waiting
    assert loop.time() == started_s + MIN_PENDING_S
    await asyncio.sleep(60)
    assert gone[1:] == [(MIN_PENDING_S + INTRODUCTION_S, f"{why} 5 s")]
    assert not len(limit)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Without the garbage collector, cycles stay. Nothing is logged: pytest keeps the errors that are."""
    gc.collect()
    gc.disable()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


KEPT = (KVLink, SocketStream, ReceiveLink, PendingPeer)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("name", ["shm", "tcp", "torch_dist", "grpc_stream"])
async def test_a_connection_that_fails_leaves_no_object_socket_or_task(name: str) -> None:
    async with listening(name) as ends:

        def left() -> int:
            return sum(issubclass(type(each), KEPT) for each in gc.get_objects())

        async def settled() -> None:
            await empty(ends.limit)
            async with asyncio.timeout(IN_TIME_S):
                while left():  # noqa: ASYNC110 - threads end on their own
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)  # and close their descriptors

        async def fail(header: bytes, size: int) -> None:
            link = await ends.call()
            with contextlib.suppress(TransferError):
                await link.send(header, inline(bytes(size)))
                await link.recv()
            await link.aclose()

        await fail(b"junk", 0)
        await settled()
        before = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            await fail(b"junk", 0)
            await fail(HELLO, 2**16)
        await settled()
        assert len(asyncio.all_tasks()) <= before[0]
        assert len(os.listdir("/proc/self/fd")) <= before[1]


def prove(connection: socket.socket, address: str) -> None:
    """Prove this end of a connection to the transport tcp, and read the other end's proof."""
    greeting = new_nonce()
    connection.sendall(MAGIC + greeting)
    challenge = connection.recv(64, socket.MSG_WAITALL)
    connection.sendall(SECRET.proof("kv tcp", Side.DIALLING, (greeting, challenge[:32]), address))


@contextlib.contextmanager
def receiver_process(name: str) -> Iterator[tuple[int, str]]:
    """A receiver in a process of its own: the process id, and its address."""
    command = [sys.executable, str(Path(__file__).with_name("peer_process.py")), name, "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        try:
            yield receiver.pid, json.loads(receiver.stdout.readline())["endpoints"][0]["address"]
        finally:
            receiver.kill()


# --- peers without the service's secret ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
async def test_a_sender_gives_nothing_to_a_receiver_without_the_secret(name: str) -> None:
    async with listening(name, OTHER) as ends:
        with pytest.raises(TransferRefused, match="the peer does not know the service's secret"):
            await ends.calling.connect(ends.endpoint, 5.0)
        assert OTHER.hex() not in repr(vars(ends.calling))


@pytest.mark.parametrize("name", SOCKETS)
async def test_a_peer_without_the_secret_gets_a_challenge_and_nothing_else(name: str) -> None:
    """Without a layout, a worker's id, a descriptor of the pool or an agent's name among it."""
    loop = asyncio.get_running_loop()
    async with listening(name, OTHER) as ends:
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


@pytest.mark.parametrize("name", ["tcp", "grpc_stream"])
async def test_a_proof_is_worth_nothing_at_another_address(name: str) -> None:
    """A relay that somebody has the sender dial in the receiver's place gets no link out of either."""
    async with listening(name) as ends:
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
    async with listening(name, OTHER) as ends:
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


async def test_a_peer_gets_nothing_from_a_grpc_stream() -> None:
    """`test_authentication` shows what else it may try."""
    async with listening("grpc_stream", OTHER) as ends, grpc.aio.insecure_channel(ends.endpoint.address) as channel:
        stub: Any = channel.stream_stream(EXCHANGE)
        call = stub(iter((b"junk",)), timeout=AT_ONCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        # INTERNAL: the refusal came while gRPC's client wrote.
        assert refused.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)
        await ends.count(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ends.listening.accept()


def test_messages_of_peers_are_not_read_by_grpc() -> None:
    """gRPC itself would hold all of a message, up to 4 GiB, however small its limit. What is in the socket's buffer it
    reads at once, before it sees that the sender ignores flow control: mostly 1 MiB, under load more."""
    with receiver_process("grpc_stream") as (pid, address):
        flood(address, EXCHANGE, 2**16)
        peak = PeakMemory(pid)
        for method in (EXCHANGE, EXCHANGE.replace("Exchange", MEET)) * 3:
            flood(address, method, 64 * 2**20)
        assert peak.growth_bytes() < 40 * 2**20
