"""What every transport promises, checked for each of them by the same tests."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from kv_transfer import factory
from kv_transfer.base import MAX_PAYLOAD_BYTES, KVLink, KVTransport, Message
from kv_transfer.factory import choose, create_transport, offered_transports
from kv_transfer.sink import Sink
from pdserve.core.errors import ConfigError, PeerLost, TransferTimeout
from pdserve.core.handoff import KVEndpoint

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
)
NETWORK = ["tcp", "grpc_stream", "torch_dist", NIXL]
Pair = tuple[KVLink, KVLink]


async def payload_of(link: KVLink, message: Message) -> bytes:
    """Take a message's payload."""
    into = bytearray(message.size)
    sink = Sink([memoryview(into)])
    await link.take(sink)
    assert sink.left == 0
    return bytes(into)


async def receive(link: KVLink) -> tuple[bytes, bytes]:
    """The next message's header and payload."""
    message = await link.recv()
    return message.header, await payload_of(link, message)


@pytest.fixture(params=["loopback", "shm", *NETWORK])
async def name(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A transport's name; afterwards none of its threads may be left."""
    before = set(threading.enumerate())
    yield request.param
    for thread in set(threading.enumerate()) - before:
        thread.join(3)
    assert not set(threading.enumerate()) - before


@pytest.fixture
async def make_all() -> AsyncIterator[Callable[..., list[KVTransport]]]:
    """Creates transports by their names, and closes them in the end: at once, since each end waits for the other."""
    created: list[KVTransport] = []

    def create(*names: str) -> list[KVTransport]:
        created.extend(transports := [create_transport(each, timeout_s=5.0) for each in names])
        return transports

    yield create
    await asyncio.gather(*(transport.aclose() for transport in created))


@pytest.fixture
async def make(name: str, make_all: Callable[..., list[KVTransport]]) -> Callable[[], KVTransport]:
    """Creates transports."""
    return lambda: make_all(name)[0]


async def open_link(listener: KVTransport, endpoint: KVEndpoint, client: KVTransport) -> Pair:
    """Both ends of a new link: the one that connected, the one that was accepted."""
    connected, accepted = await asyncio.gather(client.connect(endpoint, 10.0), listener.accept())
    accepted.introduced()
    return connected, accepted


@pytest.fixture
async def pair(make: Callable[[], KVTransport]) -> Pair:
    """Both ends of a link between two transports."""
    listener, client = make(), make()
    return await open_link(listener, await listener.listen("127.0.0.1"), client)


async def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    sender, receiver = pair

    async def send() -> None:
        for i in range(200):
            await sender.send(b"header %d" % i, [bytes([i]) * (i * 37)])

    async def take() -> None:
        for i in range(200):
            assert await receive(receiver) == (b"header %d" % i, bytes([i]) * (i * 37))

    async with asyncio.timeout(20):
        await asyncio.gather(send(), take())


@pytest.mark.parametrize("size", [0, 1, 2 * 2**20 - 1, 2 * 2**20, 2 * 2**20 + 1, 20 * 2**20])
async def test_payloads_of_any_size(pair: Pair, size: int) -> None:
    sender, receiver = pair
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    _, received = await asyncio.gather(sender.send(b"h", [payload]), receive(receiver))
    assert received == (b"h", payload)


async def test_the_largest_payload_and_no_larger(pair: Pair) -> None:
    sender, receiver = pair
    payload = bytearray(MAX_PAYLOAD_BYTES)
    payload[-1] = 7
    _, (_, received) = await asyncio.gather(sender.send(b"h", [payload]), receive(receiver))
    assert len(received) == MAX_PAYLOAD_BYTES
    assert received[-1] == 7
    with pytest.raises(ValueError, match="at most"):
        await sender.send(b"h", [payload, b"x"])


async def test_many_parts_become_one_payload_and_it_goes_to_many(pair: Pair) -> None:
    sender, receiver = pair
    pool = bytearray(bytes(range(256)) * 4096 * 3)
    view = memoryview(pool)
    parts = [view[i : i + 4096] for i in range(0, len(pool), 4096)]
    into = [memoryview(bytearray(size)) for size in (1, 0, 5000, len(pool) - 4996, 0)]

    async def take() -> None:
        message = await receiver.recv()
        assert (message.header, message.size) == (b"", len(pool) + 5)
        await receiver.take(Sink(into))

    await asyncio.gather(sender.send(b"", [b"first", *reversed(parts), b""]), take())
    assert b"".join(into) == b"first" + b"".join(reversed(parts))


async def test_what_is_not_taken_is_thrown_away(pair: Pair) -> None:
    sender, receiver = pair

    async def send() -> None:
        for i in range(4):
            await sender.send(b"%d" % i, [bytes([i]) * 3 * 2**20])

    sending = asyncio.create_task(send())
    assert (await receiver.recv()).header == b"0"
    message = await receiver.recv()
    closed = Sink([memoryview(bytearray(message.size))])
    closed.close()
    await receiver.take(closed)
    assert await receive(receiver) == (b"2", b"\2" * 3 * 2**20)
    assert await receive(receiver) == (b"3", b"\3" * 3 * 2**20)
    await sending


async def test_nothing_is_written_once_a_sink_is_closed(pair: Pair) -> None:
    sender, receiver = pair
    sending = asyncio.create_task(sender.send(b"h", [b"\1" * 32 * 2**20]))
    into = bytearray((await receiver.recv()).size)
    sink = Sink([memoryview(into)])
    taking = asyncio.create_task(receiver.take(sink))
    await asyncio.sleep(0)
    sink.close()
    there = bytes(into)
    await taking

    async def send_next() -> None:
        await sending
        await sender.send(b"next", [b"x"])

    _, received = await asyncio.gather(send_next(), receive(receiver))
    assert received == (b"next", b"x")
    assert into == there


async def test_parts_may_change_once_drained(pair: Pair) -> None:
    sender, receiver = pair
    payload = bytearray(b"a" * 100_000)

    async def send() -> None:
        await sender.send(b"h", [payload])
        await sender.drained()
        payload[:] = b"b" * len(payload)

    _, (_, received) = await asyncio.gather(send(), receive(receiver))
    assert received == b"a" * 100_000


async def test_both_directions_at_once(pair: Pair) -> None:
    async def send(link: KVLink, mark: bytes) -> None:
        for _ in range(20):
            await link.send(mark, [mark * 300_000])

    async def take(link: KVLink, mark: bytes) -> None:
        for _ in range(20):
            assert await receive(link) == (mark, mark * 300_000)

    a, b = pair
    async with asyncio.timeout(20):
        await asyncio.gather(send(a, b"a"), send(b, b"b"), take(a, b"b"), take(b, b"a"))


async def test_concurrent_links(make: Callable[[], KVTransport]) -> None:
    listener = make()
    endpoint = await listener.listen("127.0.0.1")
    pairs = [await open_link(listener, endpoint, make()) for _ in range(3)]

    async def talk(sender: KVLink, receiver: KVLink, mark: int) -> None:
        for i in range(10):
            payload = bytes([mark]) * 200_000
            _, received = await asyncio.gather(sender.send(bytes([mark, i]), [payload]), receive(receiver))
            assert received == (bytes([mark, i]), payload)

    async with asyncio.timeout(20):
        await asyncio.gather(*(talk(*pair, mark) for mark, pair in enumerate(pairs)))


@pytest.mark.parametrize("closing", ["the end that connected", "the end that accepted"])
async def test_a_closed_peer_is_lost_after_its_messages(pair: Pair, closing: str) -> None:
    leaver, stayer = pair if closing == "the end that connected" else pair[::-1]
    waiting = asyncio.create_task(stayer.recv())
    await leaver.send(b"last words", [b"x"])
    assert (await waiting).header == b"last words"
    waiting = asyncio.create_task(stayer.recv())
    await asyncio.sleep(0)
    await leaver.aclose()
    async with asyncio.timeout(30):
        with pytest.raises(PeerLost):
            await waiting
        with pytest.raises(PeerLost):
            await stayer.recv()
        with pytest.raises(PeerLost):
            await stayer.send(b"anybody?", [b"x"])
        with pytest.raises(PeerLost):
            await leaver.recv()
        with pytest.raises(PeerLost):
            await leaver.send(b"h")


async def test_a_peer_that_takes_nothing_holds_the_sender_back(name: str) -> None:
    listener, client = create_transport(name, timeout_s=0.5), create_transport(name, timeout_s=0.5)
    sender, _ = await open_link(listener, await listener.listen("127.0.0.1"), client)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while sent < 100:
            await sender.send(b"h", [bytes(2**20)])
            sent += 1

    with pytest.raises(TransferTimeout):
        await flood()
    assert sent < 64
    await client.aclose()
    await listener.aclose()


async def test_closing_ends_a_waiting_recv_and_accept(make: Callable[[], KVTransport]) -> None:
    listener, client = make(), make()
    link, _ = await open_link(listener, await listener.listen("127.0.0.1"), client)
    receiving, accepting = asyncio.create_task(link.recv()), asyncio.create_task(listener.accept())
    await asyncio.sleep(0)
    await link.aclose()
    await listener.aclose()
    async with asyncio.timeout(30):
        with pytest.raises(PeerLost):
            await receiving
        with pytest.raises(PeerLost):
            await accepting
        with pytest.raises(PeerLost):
            await listener.accept()


async def test_closing_twice_is_fine(make: Callable[[], KVTransport]) -> None:
    listener, client = make(), make()
    link, accepted = await open_link(listener, await listener.listen("127.0.0.1"), client)
    for _ in range(2):
        await link.aclose()
        await accepted.aclose()
        await client.aclose()
        await listener.aclose()
    await make().aclose()


async def test_a_new_link_after_a_lost_one(make: Callable[[], KVTransport]) -> None:
    listener, client = make(), make()
    endpoint = await listener.listen("127.0.0.1")
    for i in range(3):
        sender, receiver = await open_link(listener, endpoint, client)
        _, received = await asyncio.gather(sender.send(bytes([i]), [b"x" * 5000]), receive(receiver))
        assert received == (bytes([i]), b"x" * 5000)
        await receiver.aclose()


async def test_connecting_to_nobody(make: Callable[[], KVTransport]) -> None:
    client = make()
    start = time.monotonic()
    with pytest.raises(PeerLost):
        await client.connect(KVEndpoint(client.name, "127.0.0.1:1"), 20.0)
    assert time.monotonic() - start < 8


@pytest.mark.parametrize("silent", NETWORK)
async def test_connecting_to_somebody_who_never_answers(silent: str) -> None:
    client = create_transport(silent)
    with socket.create_server(("127.0.0.1", 0)) as server:
        start = time.monotonic()
        with pytest.raises(TransferTimeout):
            await client.connect(KVEndpoint(silent, f"127.0.0.1:{server.getsockname()[1]}"), 0.5)
        assert time.monotonic() - start < 8
        await client.aclose()


@pytest.mark.parametrize("listening", NETWORK)
async def test_an_address_of_another_host(listening: str) -> None:
    transport = create_transport(listening)
    with pytest.raises(PeerLost, match="cannot listen"):
        await transport.listen("192.0.2.1")
    await transport.aclose()


def test_auto_offers_the_best_first() -> None:
    assert offered_transports("auto", device="cpu") == ("shm", "tcp")
    assert offered_transports("auto", device="cuda:0")[-1] == "tcp"


def test_nccl_is_not_taken_where_workers_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "_backend_problem", lambda backend: None)
    assert offered_transports("auto", device="cuda") == ("cuda_ipc", "torch_dist", "tcp")
    assert offered_transports("auto", device="cuda", shared_device=True) == ("cuda_ipc", "tcp")
    with pytest.raises(ConfigError, match=r"^transfer\.transport: torch_dist .* may share one GPU"):
        offered_transports("torch_dist", device="cuda", shared_device=True)
    assert offered_transports("torch_dist", device="cuda") == ("torch_dist",)
    monkeypatch.setenv("NCCL_HOSTID", "decode-0")
    assert offered_transports("torch_dist", device="cuda", shared_device=True) == ("torch_dist",)
    assert offered_transports("auto", device="cuda", shared_device=True) == ("cuda_ipc", "tcp")
    assert offered_transports("torch_dist", device="cpu", shared_device=True) == ("torch_dist",)


def test_a_transport_that_cannot_work_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"^transfer\.transport: "):
        offered_transports("carrier_pigeon", device="cpu")
    with pytest.raises(ConfigError, match=r"^transfer\.transport: loopback works only within a process"):
        offered_transports("loopback", device="cpu")
    for name in ("shm", "nixl"):
        with pytest.raises(ConfigError, match=r"^transfer\.transport: .* reads host memory, and the pool is on a GPU"):
            offered_transports(name, device="cuda:0")
    with pytest.raises(ConfigError, match=r"^transfer\.transport: cuda_ipc needs a GPU"):
        offered_transports("cuda_ipc", device="cpu")
    with pytest.raises(ConfigError, match=r"^transfer\.transport: "):
        create_transport("auto")


async def test_a_pair_takes_what_both_ends_share(make_all: Callable[..., list[KVTransport]]) -> None:
    here, there = make_all("shm", "tcp"), make_all("shm", "tcp")
    endpoints = [await transport.listen("127.0.0.1") for transport in there]
    choice = choose(here, endpoints, "d")
    assert (choice.transport, choice.endpoint) == (here[0], endpoints[0])
    assert choice.reason == "the fastest both ends have"
    elsewhere = [KVEndpoint("shm", "another-host/name"), endpoints[1]]
    choice = choose(here, elsewhere, "d")
    assert (choice.transport, choice.endpoint) == (here[1], endpoints[1])
    assert choice.reason == "not shm: it is on another host, or another user's"
    with pytest.raises(ConfigError, match=r"^transfer\.transport: no way to d, .*it is on another host"):
        choose(here[:1], elsewhere, "d")
    with pytest.raises(ConfigError, match=r"d does not listen with it"):
        choose(make_all("grpc_stream"), endpoints, "d")
    with pytest.raises(PeerLost, match="on another host"):
        await here[0].connect(elsewhere[0], 1.0)
