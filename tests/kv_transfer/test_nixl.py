"""Payloads read out of the sender's pool: with NIXL itself where it is installed, and with a stand-in for it, which can
be slow, stuck or broken on demand."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from kv_transfer.base import KVLink
from kv_transfer.factory import offered_transports
from kv_transfer.receiver import KVReceiver
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.socket_link import SocketLink
from pdserve.core.errors import ConfigError, PeerLost, TransferError
from pdserve.core.handoff import KVEndpoint, KVPeer
from pdserve.core.kv_layout import KVLayout, Region
from tests.host_pool import HostPool
from tests.kv_transfer.conftest import MakeEnds, answering
from tests.kv_transfer.fake_nixl import FakeNetwork
from tests.kv_transfer.relay import Relay, known_as
from tests.kv_transfer.status import Status, status_of
from tests.loopback import SECRET

LAYOUT = KVLayout.uniform(
    "model", "float32", block_size=16, num_layers=2, num_kv_heads=2, head_dim=64
)  # blocks of 32 KiB
NUM_BLOCKS = 400
INSTALLED = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")


class Ends(NamedTuple):
    """Two transports over pools of their own, and both ends of a link between them."""

    source: HostPool
    target: HostPool
    sending: NixlTransport
    receiving: NixlTransport
    endpoint: KVEndpoint
    sender: KVLink
    receiver: KVLink


@contextlib.asynccontextmanager
async def linked(timeout_s: float = 5.0) -> AsyncIterator[Ends]:
    """Ends over random content."""
    source, target = HostPool(LAYOUT, NUM_BLOCKS), HostPool(LAYOUT, NUM_BLOCKS)
    source.data[:] = random.Random(4).randbytes(len(source.data))
    sending = NixlTransport(source.memory, SECRET, timeout_s=timeout_s)
    receiving = NixlTransport(target.memory, SECRET, timeout_s=timeout_s)
    try:
        endpoint = await receiving.listen("127.0.0.1")
        sender, receiver = await asyncio.gather(sending.connect(endpoint, 10.0), receiving.accept())
        receiver.introduced()
        yield Ends(source, target, sending, receiving, endpoint, sender, receiver)
    finally:
        await sending.aclose()
        await receiving.aclose()


@pytest.fixture
def network(fake_nixl: FakeNetwork) -> FakeNetwork:
    """The stand-in."""
    return fake_nixl


@pytest.fixture(params=["stand-in", pytest.param("nixl", marks=INSTALLED)])
def any_nixl(request: pytest.FixtureRequest) -> None:
    """Either of them."""
    if request.param == "stand-in":
        request.getfixturevalue("network")


def whole(pool: HostPool, size: int | None = None) -> list[Region]:
    """The beginning of a pool, or all of its blocks."""
    return [Region(0, len(pool.data) if size is None else size)]


async def fetch(ends: Ends, regions: list[Region]) -> None:
    """Receive a message, and fetch its payload there."""
    message = await ends.receiver.recv()
    assert message.size == sum(region.size for region in regions)
    await ends.receiver.fetch(regions)


@pytest.mark.usefixtures("any_nixl")
async def test_what_a_peer_that_left_has_sent_counts_for_nothing() -> None:
    async with linked() as ends:
        await ends.sender.send(b"h", ends.source.payload(whole(ends.source, 5000)))
        await ends.receiver.recv()
        closing = asyncio.create_task(ends.sender.aclose())
        for _ in range(100):  # turns of the event loop count, however long they take
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        with pytest.raises(PeerLost, match="closed the link"):
            await ends.receiver.fetch(whole(ends.target, 5000))
        await ends.receiver.aclose()
        await closing


@pytest.mark.usefixtures("any_nixl")
async def test_a_closed_link_leaves_the_others_of_its_peer_alone() -> None:
    async with linked() as ends:
        sender, receiver = await asyncio.gather(ends.sending.connect(ends.endpoint, 10.0), ends.receiving.accept())
        receiver.introduced()
        await asyncio.gather(ends.sender.aclose(), ends.receiver.aclose())
        async with answering(sender):
            await sender.send(b"h", ends.source.payload(whole(ends.source, 5000)))
            await receiver.recv()
            await receiver.fetch(whole(ends.target, 5000))
        assert ends.target.data[:5000] == ends.source.data[:5000]


@pytest.mark.usefixtures("network")
async def test_a_reference_beyond_the_peers_memory_loses_the_link() -> None:
    async with linked() as ends:
        assert isinstance(ends.receiver, SocketLink)
        ends.receiver._peer_size = 4999
        await ends.sender.send(b"h", ends.source.payload(whole(ends.source, 5000)))
        with pytest.raises(PeerLost, match="refers to bytes 0 to 5000 of its 4999"):
            await ends.receiver.recv()


async def test_a_peer_helps_where_nothing_else_serves_reads(network: FakeNetwork) -> None:
    network.needs_progress = True
    async with linked() as ends, answering(ends.sender):
        for _ in range(3):
            await ends.sender.send(b"h", ends.source.payload(whole(ends.source)))
            await fetch(ends, whole(ends.target))
        assert ends.target.data == ends.source.data
        await ends.receiver.send(b"so that it has heard of the end")
        for _ in range(100):  # turns of the event loop count, however long they take
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        made = sum(agent.progress for agent in network.agents.values())
        await asyncio.sleep(0.05)
        assert made == sum(agent.progress for agent in network.agents.values())


@pytest.mark.parametrize("trouble", ["stuck", "broken"])
async def test_a_read_that_does_not_end_or_fails_loses_the_link(network: FakeNetwork, trouble: str) -> None:
    network.fails, network.polls = trouble == "broken", 2**62
    async with linked(timeout_s=0.3) as ends, answering(ends.sender):
        await ends.sender.send(b"h", ends.source.payload(whole(ends.source)))
        await ends.receiver.recv()
        async with asyncio.timeout(8):
            with pytest.raises(PeerLost, match=r"longer than 0\.3 s" if trouble == "stuck" else "failed"):
                await ends.receiver.fetch(whole(ends.target))
        with pytest.raises(PeerLost):
            await ends.receiver.recv()
    assert ends.target.data == bytes(len(ends.target.data))


async def test_blocks_of_a_read_that_outlives_its_link_are_at_rest_once_it_has_ended(network: FakeNetwork) -> None:
    network.polls = 2**62
    async with linked(timeout_s=0.2) as ends, answering(ends.sender):
        await ends.sender.send(b"h", ends.source.payload(whole(ends.source)))
        await ends.receiver.recv()
        handle = ends.receiver.fetch(whole(ends.target))
        with pytest.raises(PeerLost, match="longer than"):
            await handle
        handle.cancel()
        await ends.receiver.aclose()
        resting = asyncio.create_task(handle.at_rest())
        await asyncio.sleep(0.05)
        assert not resting.done()
        network.polls = 0
        async with asyncio.timeout(5):
            await resting
        there = bytes(ends.target.data)
        await asyncio.sleep(0.05)
        assert ends.target.data == there
    assert all(read.released for agent in network.agents.values() for read in agent.reads)


async def test_closing_the_transport_ends_reads_and_lets_go_of_pool_and_peer(network: FakeNetwork) -> None:
    network.polls = 2**62
    async with linked() as ends, answering(ends.sender):
        await ends.sender.send(b"h", ends.source.payload(whole(ends.source)))
        await ends.receiver.recv()
        handle = ends.receiver.fetch(whole(ends.target))

        async def move() -> None:
            await handle

        moving = asyncio.create_task(move())
        await asyncio.sleep(0.02)
        assert not moving.done()
        closing = asyncio.create_task(ends.receiver.aclose())
        with pytest.raises(PeerLost, match="closed here"):
            await moving
        await ends.sender.aclose()
        await closing
    async with asyncio.timeout(5):
        await handle.at_rest()
    assert ends.target.data == bytes(len(ends.target.data))
    for agent in network.agents.values():
        assert not agent.peers
        assert not agent.registered


@contextlib.asynccontextmanager
async def reading(make_ends: MakeEnds, network: FakeNetwork, **options: Any) -> AsyncIterator[tuple[Any, Relay]]:
    """Ends whose hand-off is being read, and what is between them. The read ends when the network's ``polls`` are 0."""
    ends = await make_ends("nixl", layout=LAYOUT, **options)
    (endpoint,) = ends.endpoints
    relay = Relay(endpoint.address)
    known_as(ends.receiving_transport, relay.address)
    try:
        await ends.sender.connect(KVPeer("d", "e1", (KVEndpoint("nixl", relay.address),)))
        network.polls = 2**62
        ends.start("r", [1, 2, 3], for_s=20, send=[7, 8, 9])
        async with asyncio.timeout(5):
            while all(read.released for agent in network.agents.values() for read in agent.reads):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield ends, relay
    finally:
        relay.close()


async def test_a_read_that_ends_after_the_sender_gave_its_blocks_away_counts_for_nothing(
    make_ends: MakeEnds, network: FakeNetwork
) -> None:
    """The cut is held up on its way, as it may be between hosts, and the read is not. With checksums off, nothing but
    the content could tell that the blocks have another owner by now."""
    async with reading(make_ends, network, checksum=False) as (ends, relay):
        relay.stall(0)
        await ends.sending["r"].abort()
        assert status_of(ends.receiving["r"]) is Status.TRANSFERRING
        ends.source.data[:] = bytes(len(ends.source.data))  # the next owner's
        network.polls = 0
        async with asyncio.timeout(5):
            with pytest.raises(TransferError):
                await asyncio.gather(ends.receiving["r"].wait(), asyncio.to_thread(until_refused, ends.receiver, relay))
        assert set(ends.receiver.refused) == {"checksum"}


def until_refused(receiver: KVReceiver, relay: Relay) -> None:
    """Let the cut arrive once the message was judged (or 2 s have passed)."""
    deadline_s = time.monotonic() + 2
    while not receiver.refused and time.monotonic() < deadline_s:
        time.sleep(0.01)
    relay.flow()


@pytest.mark.usefixtures("network")
async def test_what_is_read_is_hashed_whatever_the_configuration_says(make_ends: MakeEnds) -> None:
    ends = await make_ends("nixl", layout=LAYOUT, checksum=False)
    ends.start("r", [1, 2, 3], send=[7, 8, 9])
    received = await ends.both("r")
    assert received.proof.checksum == "xxh3-64 verified"
    ends.check_moved([7, 8, 9], [1, 2, 3])


def test_without_nixl_it_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    expected = r"^transfer\.transport: nixl cannot be used: NIXL cannot be imported .*; pip install nixl\b"
    with pytest.raises(ConfigError, match=expected):
        offered_transports("nixl", device="cpu")


def test_without_its_backend_it_is_a_configuration_error(network: FakeNetwork) -> None:
    network.backends = []
    with pytest.raises(ConfigError, match=r"^transfer\.transport: nixl cannot be used: .* no UCX backend"):
        offered_transports("nixl", device="cpu")
    network.backends = ["UCX"]
    assert offered_transports("nixl", device="cpu") == ("nixl",)
    assert "nixl" not in offered_transports("auto", device="cpu")


@pytest.mark.parametrize("gives_up", [False, True])
async def test_without_a_checksum_a_transfer_counts_once_its_sender_confirms_it(
    make_ends: MakeEnds, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch, *, gives_up: bool
) -> None:
    """As between GPUs, where nothing is hashed. A sender that gave its blocks away before it heard that they were read
    does not confirm."""
    monkeypatch.setattr("kv_transfer.transports.nixl.NixlLink.hashes", lambda *_: False)
    async with reading(make_ends, network) as (ends, relay):
        if gives_up:
            relay.stall(0)
            await ends.sending["r"].abort()
            ends.source.data[:] = bytes(len(ends.source.data))  # the next owner's
        network.polls = 0
        receiving = asyncio.create_task(ends.receiving["r"].wait())
        if gives_up:
            await asyncio.sleep(0.1)
            assert not receiving.done()
        relay.flow()
        async with asyncio.timeout(5):
            if gives_up:
                with pytest.raises(TransferError):
                    await receiving
            else:
                assert (await receiving).proof.checksum == "off"
                await ends.sending["r"].wait()
                ends.check_moved([7, 8, 9], [1, 2, 3])
