"""Links that are shaped in user space: rate, round trip, what a cut or cancelled message leaves, and the configuration.
In virtual time, over links in this process; `test_transport_contract` has shaped links over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kv_transfer.base import KVLink
from kv_transfer.memory import HostMemory
from kv_transfer.transports.shaped import Shape, ShapedLink
from pdserve.core.config import PdserveConfig, TransferConfig
from pdserve.core.errors import ConfigError, PeerLost
from pdserve.core.kv_layout import Region
from tests.host_pool import inline
from tests.kv_transfer.conftest import MakeEnds
from tests.loopback import LoopbackTransport
from tests.virtual_time import IN_VIRTUAL_TIME

MEMORY_BYTES = 16 * 2**20


@asynccontextmanager
async def linked(shape: Shape | None, other: Shape | None) -> AsyncIterator[tuple[KVLink, KVLink]]:
    """Both ends of a link; ``shape`` is that of the end that connected."""
    client, listener = (LoopbackTransport(HostMemory.create(MEMORY_BYTES)) for _ in range(2))
    connected = await client.connect(await listener.listen("127.0.0.1"), 10.0)
    ends = zip((connected, await listener.accept()), (shape, other), strict=True)
    here, there = (link if each is None else ShapedLink(link, each) for link, each in ends)
    try:
        yield here, there
    finally:
        await asyncio.gather(here.aclose(), there.aclose())
        await asyncio.gather(client.aclose(), listener.aclose())


@IN_VIRTUAL_TIME
@pytest.mark.parametrize(
    ("gbps", "round_trip_ms", "size", "count"),
    [(0.2, 0.0, 2**20, 1), (0.8, 0.0, 2**18, 8), (None, 20.0, 0, 1), (1.0, 50.0, 2**20, 1)],
)
async def test_messages_take_their_size_over_the_rate_and_the_delay(
    gbps: float | None, round_trip_ms: float, size: int, count: int
) -> None:
    shape = Shape(gbps, round_trip_ms)
    async with linked(shape, shape) as (sender, receiver):
        regions = [Region(0, size)] if size else []

        async def take() -> None:
            for _ in range(count):
                await receiver.recv()
                await receiver.fetch(regions)

        loop = asyncio.get_running_loop()
        taking, started_s = asyncio.create_task(take()), loop.time()
        for _ in range(count):
            await sender.send(b"h", await sender.payload(regions))
        await taking
        took_s = loop.time() - started_s
    # Headers take time as well, and timers may wake half a millisecond early.
    assert took_s == pytest.approx(count * size / shape.bytes_per_s + round_trip_ms / 2e3, abs=1e-3)


async def test_links_tell_that_they_are_shaped(make_ends: MakeEnds) -> None:
    ends = await make_ends("tcp", shape=Shape(0.4, round_trip_ms=10.0))
    await ends.connect()
    (link,) = ends.sender.links()
    assert link.reason.endswith(", shaped in user space: 0.4 Gbit/s, round trip 10 ms")
    assert link.ceiling_gbs > 0


@IN_VIRTUAL_TIME
async def test_a_cancelled_send_leaves_no_message_that_is_incomplete() -> None:
    shape = Shape(0.1, round_trip_ms=10.0)
    async with linked(shape, shape) as (sender, receiver):
        assert isinstance(sender.memory, HostMemory)
        sender.memory.view(Region(0, 2**20))[:] = b"x" * 2**20
        sending = asyncio.create_task(sender.send(b"first", await sender.payload([Region(0, 2**20)])))
        assert (await receiver.recv()).header == b"first"
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        sending = asyncio.create_task(sender.send(b"second", inline(b"y")))
        await receiver.fetch([Region(0, 2**20)])
        assert isinstance(receiver.memory, HostMemory)
        assert bytes(receiver.memory.view(Region(0, 2**20))) == b"x" * 2**20
        assert (await receiver.recv()).header == b"second"
        await sending


@IN_VIRTUAL_TIME
async def test_what_is_held_back_is_read_until_drained_and_never_after_a_cut() -> None:
    shape = Shape(None, round_trip_ms=400.0)
    async with linked(shape, shape) as (sender, receiver):
        assert isinstance(sender.memory, HostMemory)
        view = sender.memory.view(Region(0, 1000))
        view[:] = b"a" * 1000
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await sender.send(b"h", await sender.payload([Region(0, 1000)]))
        await sender.drained()
        assert loop.time() - started_s == pytest.approx(0.2, abs=1e-3)
        view[:] = b"b" * 1000
        await receiver.recv()
        await receiver.fetch([Region(0, 1000)])
        assert isinstance(receiver.memory, HostMemory)
        assert bytes(receiver.memory.view(Region(0, 1000))) == b"a" * 1000

        await sender.send(b"h", await sender.payload([Region(0, 1000)]))
        sender.cut("a test wants it")
        async with asyncio.timeout(10):
            await sender.drained()
        with pytest.raises(PeerLost):
            await receiver.recv()
        with pytest.raises(PeerLost, match="a test wants it"):
            await sender.send(b"h")


@IN_VIRTUAL_TIME
async def test_a_peer_without_a_shape_is_refused() -> None:
    async with linked(None, Shape(1.0)) as (plain, shaped):
        await plain.send(b"h", inline(b"payload"))
        with pytest.raises(PeerLost, match="is its end of the link shaped as well"):
            await shaped.recv()


@IN_VIRTUAL_TIME
@pytest.mark.parametrize("announced", [b"", b"short", (2**40).to_bytes(8, "little")])
async def test_a_malformed_size_ends_the_link(announced: bytes) -> None:
    async with linked(None, Shape(1.0)) as (plain, shaped):
        await plain.send(announced)
        with pytest.raises(PeerLost, match="the peer sent a"):
            await shaped.recv()


@IN_VIRTUAL_TIME
async def test_a_piece_that_does_not_fit_ends_the_link() -> None:
    async with linked(None, Shape(1.0)) as (plain, shaped):
        await plain.send((3).to_bytes(8, "little") + b"h")
        await plain.send(b"", inline(b"four"))
        assert (await shaped.recv()).size == 3
        with pytest.raises(PeerLost, match=r"a piece of 0 \+ 4 bytes, with 3 left"):
            await shaped.fetch([Region(0, 3)])


def test_the_configured_shape() -> None:
    assert Shape.of(TransferConfig()) is None
    config = PdserveConfig.load(None, {"transfer.shape_gbps": 10, "transfer.shape_round_trip_ms": 1.5})
    shape = Shape.of(config.transfer)
    assert shape == Shape(10.0, 1.5)
    assert shape.bytes_per_s == 1.25e9
    assert shape.delay_s == 0.75e-3
    assert Shape.of(TransferConfig(shape_round_trip_ms=3)) == Shape(None, 3.0)
    with pytest.raises(ConfigError, match=r"transfer\.shape_gbps"):
        PdserveConfig.load(None, {"transfer.shape_gbps": 0})
