"""What every transport promises, checked for each of them by the same tests."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kv_transfer import factory
from kv_transfer.base import MAX_PAYLOAD_BYTES, KVLink, KVTransport, Message
from kv_transfer.factory import choose, offered_transports
from kv_transfer.fetch import Payload
from kv_transfer.memory import HostMemory
from pdserve.core.errors import ConfigError, PeerLost, TransferTimeout
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import Region
from tests.host_pool import inline
from tests.kv_transfer.conftest import answering, with_nixl
from tests.loopback import create_transport

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
)
NETWORK = ["tcp", "grpc_stream", "torch_dist", NIXL]
SHAPED = ["shaped tcp", "shaped torch_dist"]
ENCRYPTED = ["tls tcp", "tls grpc_stream"]
Pair = tuple[KVLink, KVLink]


HALF = 16 * 2**20  # of each end's memory: one to send from, one to receive into
_used = [0, 0]  # of the two halves: messages that may still be on their way keep their regions


def room(link: KVLink, size: int, half: int) -> list[Region]:
    """Memory of the link that no message before used."""
    whole = link.memory.size // 2
    if _used[half] + size > whole:
        _used[half] = 0
    start = half * whole + _used[half]
    _used[half] += size
    return [Region(start, size)] if size else []


def payload(link: KVLink, *parts: bytes | bytearray) -> Payload:
    """These bytes as regions of the link's memory."""
    memory, regions = link.memory, []
    assert isinstance(memory, HostMemory)
    for part in parts:
        for region in room(link, len(part), 0):
            memory.view(region)[:] = part
            regions.append(region)
    return Payload(memory, regions)


def at(link: KVLink, *regions: Region) -> bytes:
    """What is there in the link's memory."""
    assert isinstance(link.memory, HostMemory)
    return b"".join(link.memory.view(region) for region in regions)


async def payload_of(link: KVLink, message: Message) -> bytes:
    """Fetch a message's payload."""
    into = room(link, message.size, 1)
    fetch = link.fetch(into)
    await fetch
    assert fetch.left == 0
    return at(link, *into)


async def receive(link: KVLink) -> tuple[bytes, bytes]:
    """The next message's header and payload."""
    message = await link.recv()
    return message.header, await payload_of(link, message)


@pytest.fixture(params=["loopback", "shm", "tcp", "grpc_stream", "torch_dist", "nixl", *SHAPED, *ENCRYPTED])
async def name(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A transport's name (nixl: over a stand-in where it is not installed); afterwards none of its threads may be
    left."""
    with_nixl(request.param, request)
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
        created.extend(
            transports := [create_transport(each, HostMemory.create(2 * HALF), timeout_s=5.0) for each in names]
        )
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


@pytest.fixture
async def one_way(pair: Pair) -> AsyncIterator[Pair]:
    """A link on which the end that connected sends, and the other one receives."""
    async with answering(pair[0]):
        yield pair


async def test_messages_arrive_whole_and_in_order(one_way: Pair) -> None:
    sender, receiver = one_way

    async def send() -> None:
        for i in range(200):
            await sender.send(b"header %d" % i, payload(sender, bytes([i]) * (i * 37)))

    async def take() -> None:
        for i in range(200):
            assert await receive(receiver) == (b"header %d" % i, bytes([i]) * (i * 37))

    async with asyncio.timeout(20):
        await asyncio.gather(send(), take())


@pytest.mark.parametrize("size", [0, 1, 2 * 2**20 - 1, 2 * 2**20, 2 * 2**20 + 1, 7 * 2**20])
async def test_payloads_of_any_size(one_way: Pair, size: int) -> None:
    sender, receiver = one_way
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    _, received = await asyncio.gather(sender.send(b"h", payload(sender, content)), receive(receiver))
    assert received == (b"h", content)


@pytest.mark.parametrize("name", ["shm", "tcp", "grpc_stream", "torch_dist"])
async def test_the_largest_payload_and_no_larger(name: str) -> None:
    whole = Region(0, MAX_PAYLOAD_BYTES + 1)
    listener, client = (create_transport(name, HostMemory.create(whole.size), timeout_s=5.0) for _ in range(2))
    sender, receiver = await open_link(listener, await listener.listen("127.0.0.1"), client)
    largest = Region(1, MAX_PAYLOAD_BYTES)
    assert isinstance(sender.memory, HostMemory)
    sender.memory.view(whole)[-1] = 7

    async def fetch() -> None:
        assert (await receiver.recv()).size == MAX_PAYLOAD_BYTES
        await receiver.fetch([largest])

    async with answering(sender):
        await asyncio.gather(sender.send(b"h", await sender.payload([largest])), fetch())
    assert at(receiver, whole)[-2:] == b"\0\7"
    with pytest.raises(ValueError, match="the limit is"):
        await sender.send(b"h", await sender.payload([whole]))
    await asyncio.gather(client.aclose(), listener.aclose())


async def test_many_regions_become_one_payload_and_it_goes_to_many(one_way: Pair) -> None:
    sender, receiver = one_way
    assert isinstance(sender.memory, HostMemory)
    size = 256 * 4096 * 3
    sender.memory.view(Region(0, size))[:] = bytes(range(256)) * (4096 * 3)
    sender.memory.view(Region(size, 5))[:] = b"first"
    parts = [Region(size, 5), *(Region(start, 4096) for start in range(size - 4096, -1, -4096))]
    into = [Region(HALF, 1), Region(2 * HALF - 5000, 5000), Region(HALF + 7, size - 4996)]

    async def fetch() -> None:
        message = await receiver.recv()
        assert (message.header, message.size) == (b"", size + 5)
        await receiver.fetch(into)

    await asyncio.gather(sender.send(b"", await sender.payload(parts)), fetch())
    assert at(receiver, *into) == at(sender, *parts)


async def test_what_is_not_taken_is_thrown_away(one_way: Pair) -> None:
    sender, receiver = one_way

    async def send() -> None:
        for i in range(4):
            await sender.send(b"%d" % i, payload(sender, bytes([i]) * 3 * 2**20))

    sending = asyncio.create_task(send())
    assert (await receiver.recv()).header == b"0"
    message = await receiver.recv()
    cancelled = receiver.fetch([Region(HALF, message.size)])
    cancelled.cancel()
    await cancelled
    assert await receive(receiver) == (b"2", b"\2" * 3 * 2**20)
    assert await receive(receiver) == (b"3", b"\3" * 3 * 2**20)
    await sending


async def test_nothing_is_written_once_a_fetch_is_cancelled_and_at_rest(one_way: Pair) -> None:
    sender, receiver = one_way
    sending = asyncio.create_task(sender.send(b"h", payload(sender, b"\1" * HALF)))
    into = Region(HALF, (await receiver.recv()).size)
    fetch = receiver.fetch([into])

    async def move() -> None:
        await fetch

    moving = asyncio.create_task(move())
    await asyncio.sleep(0)
    fetch.cancel()
    await fetch.at_rest()
    there = at(receiver, into)
    await moving

    async def send_next() -> None:
        await sending
        await sender.send(b"next", inline(b"x"))

    async def receive_next() -> None:
        message = await receiver.recv()
        assert (message.header, message.size) == (b"next", 1)
        await receiver.fetch([Region(0, 1)])
        assert at(receiver, Region(0, 1)) == b"x"

    await asyncio.gather(send_next(), receive_next())
    assert at(receiver, into) == there


async def test_parts_may_change_once_drained(one_way: Pair) -> None:
    sender, receiver = one_way
    assert isinstance(sender.memory, HostMemory)
    region = Region(0, 100_000)
    view = sender.memory.view(region)
    view[:] = b"a" * region.size

    async def send() -> None:
        await sender.send(b"h", await sender.payload([region]))
        await sender.drained()
        view[:] = b"b" * region.size

    sending = asyncio.create_task(send())
    _, received = await receive(receiver)
    async with answering(receiver):  # it answers a flush
        await sending
    assert received == b"a" * region.size


async def test_both_directions_at_once(pair: Pair) -> None:
    async def send(link: KVLink, mark: bytes) -> None:
        for _ in range(20):
            await link.send(mark, payload(link, mark * 300_000))

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
        content = bytes([mark]) * 200_000
        async with answering(sender):
            for i in range(10):
                sending = sender.send(bytes([mark, i]), payload(sender, content))
                _, received = await asyncio.gather(sending, receive(receiver))
                assert received == (bytes([mark, i]), content)

    async with asyncio.timeout(20):
        await asyncio.gather(*(talk(*pair, mark) for mark, pair in enumerate(pairs)))


@pytest.mark.parametrize("closing", ["the end that connected", "the end that accepted"])
async def test_a_closed_peer_is_lost_after_its_messages(pair: Pair, closing: str) -> None:
    leaver, stayer = pair if closing == "the end that connected" else pair[::-1]
    waiting = asyncio.create_task(stayer.recv())
    await leaver.send(b"last words", payload(leaver, b"x"))
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
            await stayer.send(b"anybody?", payload(stayer, b"x"))
        with pytest.raises(PeerLost):
            await leaver.recv()
        with pytest.raises(PeerLost):
            await leaver.send(b"h")


async def test_a_peer_that_takes_nothing_holds_the_sender_back(name: str) -> None:
    listener, client = (create_transport(name, HostMemory.create(2**21), timeout_s=0.5) for _ in range(2))
    sender, _ = await open_link(listener, await listener.listen("127.0.0.1"), client)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while sent < 100:
            await sender.send(b"h", inline(bytes(2**20)))
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
    for _ in range(2):  # twice is fine
        await link.aclose()
        await listener.aclose()
    await make().aclose()
    async with asyncio.timeout(30):
        with pytest.raises(PeerLost):
            await receiving
        with pytest.raises(PeerLost):
            await accepting
        with pytest.raises(PeerLost):
            await listener.accept()


async def test_a_close_that_is_cancelled_still_ends_the_link(pair: Pair) -> None:
    leaver, stayer = pair
    closing = asyncio.create_task(leaver.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    async with asyncio.timeout(30):
        with pytest.raises(PeerLost):
            await stayer.recv()


async def test_a_cut_link_is_lost_at_both_ends(pair: Pair) -> None:
    pair[0].cut("the test cut it")
    async with asyncio.timeout(30):
        for link in pair:
            with pytest.raises(PeerLost):
                await link.recv()


async def test_connecting_to_nobody(make: Callable[[], KVTransport]) -> None:
    client = make()
    async with asyncio.timeout(8):
        with pytest.raises(PeerLost):
            await client.connect(KVEndpoint(client.name, "127.0.0.1:1"), 20.0)


@pytest.mark.parametrize("silent", NETWORK)
async def test_connecting_to_somebody_who_never_answers(silent: str) -> None:
    client = create_transport(silent, HostMemory.create(4096))
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(TransferTimeout):
            await client.connect(KVEndpoint(silent, f"127.0.0.1:{server.getsockname()[1]}"), 0.5)
        await client.aclose()


@pytest.mark.parametrize("listening", NETWORK)
async def test_an_address_of_another_host(listening: str) -> None:
    transport = create_transport(listening, HostMemory.create(4096))
    with pytest.raises(PeerLost, match="cannot listen"):
        await transport.listen("192.0.2.1")
    await transport.aclose()


CPU: dict[str, Any] = {"device": "cpu"}
GPU: dict[str, Any] = {"device": "cuda:0"}
SHARED, IN_SHAPE = {"shared_device": True}, {"shaped": True}


@pytest.mark.parametrize(
    ("name", "options", "offered"),
    [
        ("auto", CPU, ("shm", "tcp")),
        ("auto", GPU, ("cuda_ipc", "torch_dist", "tcp")),
        ("auto", GPU | SHARED, ("cuda_ipc", "tcp")),
        ("auto", CPU | IN_SHAPE, ("tcp",)),
        ("auto", GPU | IN_SHAPE, ("tcp",)),
        ("torch_dist", GPU, ("torch_dist",)),
        ("torch_dist", CPU | SHARED, ("torch_dist",)),
        ("grpc_stream", CPU | IN_SHAPE, ("grpc_stream",)),
        ("torch_dist", GPU | SHARED, r"torch_dist .* may share one GPU"),
        ("carrier_pigeon", CPU, "'carrier_pigeon' is unknown"),
        ("carrier_pigeon", CPU | IN_SHAPE, "'carrier_pigeon' is unknown"),
        ("shm", GPU, "shm reads host memory, and the pool is on a GPU"),
        ("cuda_ipc", CPU, "cuda_ipc needs a GPU"),
        *((each, CPU | IN_SHAPE, f"{each} moves payloads past the shaper") for each in ("shm", "nixl")),
        *((each, GPU | IN_SHAPE, f"{each} moves payloads past the shaper") for each in ("cuda_ipc", "torch_dist")),
    ],
)
def test_transports_that_are_offered(
    name: str, options: dict[str, Any], offered: tuple[str, ...] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best first; one that cannot work is an error of the configuration."""
    monkeypatch.setattr(factory, "_backend_problem", lambda backend: None)
    if isinstance(offered, tuple):
        assert offered_transports(name, **options) == offered
        return
    key = "shape_gbps" if "shaper" in offered else "transport"
    with pytest.raises(ConfigError, match=rf"^transfer\.{key}.*{offered}"):
        offered_transports(name, **options)


async def test_a_pair_takes_what_both_ends_share(make_all: Callable[..., list[KVTransport]]) -> None:
    here, there = make_all("shm", "tcp"), make_all("shm", "tcp")
    endpoints = [await transport.listen("127.0.0.1") for transport in there]
    assert choose(here, endpoints, "d") == (here[0], endpoints[0], "the fastest both ends have")
    elsewhere = [KVEndpoint("shm", "another-host/name"), endpoints[1]]
    why = "not shm: it is on another host, or another user's"
    assert choose(here, elsewhere, "d") == (here[1], endpoints[1], why)
    with pytest.raises(ConfigError, match=r"^transfer\.transport: no way to d, .*it is on another host"):
        choose(here[:1], elsewhere, "d")
    with pytest.raises(ConfigError, match=r"d does not listen with it"):
        choose(make_all("grpc_stream"), endpoints, "d")
    with pytest.raises(PeerLost, match="on another host"):
        await here[0].connect(elsewhere[0], 1.0)
