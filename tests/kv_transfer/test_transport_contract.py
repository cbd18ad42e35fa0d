"""What every transport promises, checked for each of them by the same tests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from core.errors import ConfigError, PeerLost, TransferTimeout
from core.handoff import KVEndpoint
from kv_transfer import factory
from kv_transfer.base import MAX_PAYLOAD_BYTES, KVLink, KVTransport
from kv_transfer.factory import choose_transport, create_transport

NETWORK = ["grpc_stream", "torch_dist"]
Pair = tuple[KVLink, KVLink]


@pytest.fixture(params=["loopback", *NETWORK])
async def name(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A transport's name; afterwards none of its threads may be left."""
    before = set(threading.enumerate())
    yield request.param
    for thread in set(threading.enumerate()) - before:
        thread.join(3)
    assert not set(threading.enumerate()) - before


@pytest.fixture
async def make(name: str) -> AsyncIterator[Callable[[], KVTransport]]:
    """Creates transports, and closes them in the end."""
    async with contextlib.AsyncExitStack() as stack:

        def create() -> KVTransport:
            transport = create_transport(name, timeout_s=5.0)
            stack.push_async_callback(transport.aclose)
            return transport

        yield create


async def open_link(listener: KVTransport, endpoint: KVEndpoint, client: KVTransport) -> Pair:
    """Both ends of a new link: the one that connected, the one that was accepted."""
    connected, accepted = await asyncio.gather(client.connect(endpoint, 10.0), listener.accept())
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

    async def receive() -> None:
        for i in range(200):
            message = await receiver.recv()
            assert message.header == b"header %d" % i
            assert bytes(message.payload) == bytes([i]) * (i * 37)

    async with asyncio.timeout(20):
        await asyncio.gather(send(), receive())


@pytest.mark.parametrize("size", [0, 1, 2 * 2**20 - 1, 2 * 2**20, 2 * 2**20 + 1, 20 * 2**20])
async def test_payloads_of_any_size(pair: Pair, size: int) -> None:
    sender, receiver = pair
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    _, message = await asyncio.gather(sender.send(b"h", [payload]), receiver.recv())
    assert message.header == b"h"
    assert bytes(message.payload) == payload


async def test_the_largest_payload_and_no_larger(pair: Pair) -> None:
    sender, receiver = pair
    payload = bytearray(MAX_PAYLOAD_BYTES)
    payload[-1] = 7
    _, message = await asyncio.gather(sender.send(b"h", [payload]), receiver.recv())
    assert len(message.payload) == MAX_PAYLOAD_BYTES
    assert message.payload[-1] == 7
    with pytest.raises(ValueError, match="at most"):
        await sender.send(b"h", [payload, b"x"])


async def test_many_parts_become_one_payload(pair: Pair) -> None:
    sender, receiver = pair
    pool = bytearray(bytes(range(256)) * 4096 * 3)
    view = memoryview(pool)
    parts = [view[i : i + 4096] for i in range(0, len(pool), 4096)]
    _, message = await asyncio.gather(sender.send(b"", [b"first", *reversed(parts), b""]), receiver.recv())
    assert message.header == b""
    assert bytes(message.payload) == b"first" + b"".join(reversed(parts))


async def test_parts_may_change_once_sent(pair: Pair) -> None:
    sender, receiver = pair
    payload = bytearray(b"a" * 100_000)

    async def send() -> None:
        await sender.send(b"h", [payload])
        payload[:] = b"b" * len(payload)

    _, message = await asyncio.gather(send(), receiver.recv())
    assert bytes(message.payload) == b"a" * 100_000


async def test_both_directions_at_once(pair: Pair) -> None:
    async def send(link: KVLink, mark: bytes) -> None:
        for _ in range(20):
            await link.send(mark, [mark * 300_000])

    async def receive(link: KVLink, mark: bytes) -> None:
        for _ in range(20):
            message = await link.recv()
            assert message.header == mark
            assert bytes(message.payload) == mark * 300_000

    a, b = pair
    async with asyncio.timeout(20):
        await asyncio.gather(send(a, b"a"), send(b, b"b"), receive(a, b"b"), receive(b, b"a"))


async def test_concurrent_links(make: Callable[[], KVTransport]) -> None:
    listener = make()
    endpoint = await listener.listen("127.0.0.1")
    pairs = [await open_link(listener, endpoint, make()) for _ in range(3)]

    async def talk(sender: KVLink, receiver: KVLink, mark: int) -> None:
        for i in range(10):
            _, message = await asyncio.gather(sender.send(bytes([mark, i]), [bytes([mark]) * 200_000]), receiver.recv())
            assert message.header == bytes([mark, i])
            assert bytes(message.payload) == bytes([mark]) * 200_000

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
    async with asyncio.timeout(2):
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
    async with asyncio.timeout(2):
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
        _, message = await asyncio.gather(sender.send(bytes([i]), [b"x" * 5000]), receiver.recv())
        assert message.header == bytes([i])
        await receiver.aclose()


async def test_connecting_to_nobody(make: Callable[[], KVTransport]) -> None:
    client = make()
    start = time.monotonic()
    with pytest.raises(PeerLost):
        await client.connect(KVEndpoint(client.name, "127.0.0.1:1"), 2.0)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("silent", NETWORK)
async def test_connecting_to_somebody_who_never_answers(silent: str) -> None:
    client = create_transport(silent)
    with socket.create_server(("127.0.0.1", 0)) as server:
        start = time.monotonic()
        with pytest.raises(TransferTimeout):
            await client.connect(KVEndpoint(silent, f"127.0.0.1:{server.getsockname()[1]}"), 0.5)
        assert time.monotonic() - start < 2
        await client.aclose()


@pytest.mark.parametrize("listening", NETWORK)
async def test_an_address_of_another_host(listening: str) -> None:
    transport = create_transport(listening)
    with pytest.raises(PeerLost, match="cannot listen"):
        await transport.listen("192.0.2.1")
    await transport.aclose()


def test_auto_takes_nccl_between_gpus_only() -> None:
    assert choose_transport("auto", device="cpu", peer_device="cpu")[0] == "grpc_stream"
    assert choose_transport("auto", device="cuda:0", peer_device="cpu")[0] == "grpc_stream"
    name, reason = choose_transport("auto", device="cuda:0", peer_device="cuda:1")
    assert (name == "torch_dist") == ("has no nccl" not in reason)


def test_nccl_is_not_taken_where_workers_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "_backend_problem", lambda backend: None)
    choose = functools.partial(choose_transport, device="cuda", peer_device="cuda")
    assert choose("auto")[0] == "torch_dist"
    name, reason = choose("auto", shared_device=True)
    assert name == "grpc_stream"
    assert "may share one GPU, which NCCL refuses" in reason
    with pytest.raises(ConfigError, match=r"^transfer\.transport: torch_dist .* may share one GPU"):
        choose("torch_dist", shared_device=True)
    assert choose("torch_dist")[0] == "torch_dist"
    assert choose("grpc_stream", shared_device=True)[0] == "grpc_stream"
    assert choose_transport("torch_dist", device="cpu", peer_device="cpu", shared_device=True)[0] == "torch_dist"


def test_a_transport_that_cannot_work_is_a_configuration_error() -> None:
    assert choose_transport("loopback", device="cpu", peer_device="cpu", same_process=True)[0] == "loopback"
    for configured, peer in [("loopback", "cpu"), ("carrier_pigeon", "cpu"), ("torch_dist", "cuda:0")]:
        with pytest.raises(ConfigError, match=r"^transfer\.transport: "):
            choose_transport(configured, device="cpu", peer_device=peer)
    with pytest.raises(ConfigError, match=r"^transfer\.transport: "):
        create_transport("auto")
