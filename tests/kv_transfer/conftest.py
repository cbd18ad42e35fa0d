"""Whole ends for the tests of this folder: a sender and a receiver over small pools, closed afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_transfer.base import KVLink, KVTransport
from kv_transfer.pool import Pool
from kv_transfer.receive_transfer import ReceivedKV, ReceiveTransfer
from kv_transfer.receiver import KVReceiver
from kv_transfer.send_transfer import SendTransfer
from kv_transfer.sender import KVSender
from kv_transfer.transports.shaped import Shape
from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.config import CodecName, TransferConfig
from pdserve.core.handoff import KVEndpoint, KVPeer
from pdserve.core.kv_layout import KVLayout
from tests.host_pool import HostPool
from tests.kv_transfer.fake_nixl import FakeNetwork
from tests.loopback import create_transport
from tests.virtual_time import LoopClock, VirtualTimeLoop, pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]

LAYOUT = KVLayout.uniform("model", "float32", block_size=4, num_layers=2, num_kv_heads=2, head_dim=8)  # blocks of 1 KiB
NUM_BLOCKS = 64


@dataclass
class Ends:
    """Both ends of hand-offs, worker "p" to worker "d", and what they are made of."""

    sender: KVSender
    receiver: KVReceiver
    source: HostPool
    target: HostPool
    endpoints: tuple[KVEndpoint, ...]
    receiving_transport: KVTransport
    clock: Clock
    sending: dict[str, SendTransfer] = field(default_factory=dict)
    """The sender's end of each hand-off."""
    receiving: dict[str, ReceiveTransfer] = field(default_factory=dict)
    """The receiver's."""

    @property
    def peer(self) -> KVPeer:
        """The receiver, as the sender is told of it."""
        return KVPeer("d", "e1", self.endpoints)

    def in_s(self, seconds: float) -> float:
        """A deadline so far away."""
        return self.clock.now() + seconds

    def start(
        self,
        name: str,
        block_ids: Sequence[int],
        num_skipped: int = 0,
        *,
        for_s: float = 10.0,
        receiver_for_s: float | None = None,
        send: Sequence[int] | None = None,
    ) -> None:
        """Begin a hand-off at both ends, into these blocks of the receiver, with a deadline in ``for_s``. With
        ``send``, queue these blocks of the sender, which are all."""
        self.push(name, len(block_ids), for_s=for_s, send=send)
        self.announce(name, block_ids, num_skipped, for_s=receiver_for_s or for_s)

    def announce(
        self,
        name: str,
        block_ids: Sequence[int],
        num_skipped: int = 0,
        *,
        for_s: float = 20.0,
        sender_id: str = "p",
        partial: bool = False,
    ) -> None:
        """Have the receiver announce a hand-off to the sender."""
        self.receiving[name] = self.receiver.announce(
            name, sender_id, block_ids, num_skipped, self.in_s(for_s), partial=partial
        )

    def push(
        self,
        name: str,
        num_blocks: int,
        *,
        for_s: float = 20.0,
        send: Sequence[int] | None = None,
        partial: bool = False,
    ) -> None:
        """Have the sender begin a hand-off."""
        transfer = self.sender.push(name, self.peer, num_blocks, self.in_s(for_s), partial=partial)
        self.sending[name] = transfer
        if send is not None:
            transfer.send_blocks(0, send, last=True)

    async def both(self, name: str) -> ReceivedKV:
        """Wait for a hand-off at both ends."""
        async with asyncio.timeout(30):
            received, _ = await asyncio.gather(self.receiving[name].wait(), self.sending[name].wait())
        return received

    async def connect(self) -> None:
        """Make the link."""
        await self.sender.connect(self.peer)

    def check_moved(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Blocks of the receiver hold what those of the sender do."""
        assert self.target.bytes_of(target_ids) == self.source.bytes_of(source_ids)

    async def check_works(self, name: str = "r") -> None:
        """A whole hand-off still passes, with the request id and blocks of before."""
        # An announcement over a link that the receiver has not noticed to be lost would fail with it.
        await until(lambda: len(self.sender.links()) == len(self.receiver._links))
        self.start(name, [1, 2], send=[30, 31])
        await self.both(name)
        self.check_moved([30, 31], [1, 2])
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        """Neither end keeps anything of a hand-off that is over."""
        attempts = [known for known in self.sender._attempts.values() if known is not None]
        left = [attempts, self.receiver._transfers, *(link._transfers for link in self.sender._links.values())]
        assert not any(left), left


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something at the other end that nothing announces."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class EndsClock(LoopClock):
    """In virtual time, a reading takes a microsecond: links are rated by the time that messages take."""

    def now(self) -> float:
        """Seconds of the loop's clock."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualTimeLoop):
            loop.compute(1e-6)
        return loop.time()


MakeEnds = Callable[..., Awaitable[Ends]]


def sender_of(pool: Pool, *transports: KVTransport, **options: Any) -> KVSender:
    """The sending end of worker "p" over this pool."""
    return KVSender(pool, transports, _config(options), **{"worker_id": "p", "clock": MonotonicClock(), **options})


def receiver_of(pool: Pool, *transports: KVTransport, **options: Any) -> KVReceiver:
    """The receiving end of worker "d" over this pool."""
    defaults = {"worker_id": "d", "epoch": "e1", "clock": MonotonicClock()}
    return KVReceiver(pool, transports, _config(options), **{**defaults, **options})


def _config(options: dict[str, Any]) -> TransferConfig:
    """Settings, some of which ``options`` has. They may be smaller than those of a service."""
    settings: dict[str, Any] = {"message_bytes": 2**20, "max_inflight_bytes": 2**24, "lease_s": 60.0}
    settings.update((name, options.pop(name)) for name in TransferConfig.model_fields if name in options)
    return TransferConfig.model_construct(**settings)


@contextlib.asynccontextmanager
async def answering(link: KVLink) -> AsyncIterator[None]:
    """A task that receives on ``link``, as each sender has one: where no hardware serves reads, the peer's process
    does, while it receives."""
    task = asyncio.create_task(link.recv())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def make_ends() -> AsyncIterator[MakeEnds]:
    """Creates `Ends`; keywords change what both ends agree on by default."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            transport: str = "loopback",
            *,
            layout: KVLayout = LAYOUT,
            sender_layout: KVLayout | None = None,
            checksum: bool = True,
            sender_checksum: bool | None = None,
            message_bytes: int = 4096,
            max_inflight_bytes: int = 2**20,
            lease_s: float = 5.0,
            num_blocks: int = NUM_BLOCKS,
            source: Any = None,
            target: Any = None,
            sending: KVTransport | None = None,
            receiving: KVTransport | None = None,
            eos_token_ids: tuple[int, ...] = (),
            sender_eos_token_ids: tuple[int, ...] | None = None,
            shape: Shape | None = None,
            codec: CodecName = "none",
            sender_codec: CodecName | None = None,
        ) -> Ends:
            clock = EndsClock()
            source = source or HostPool(sender_layout or layout, num_blocks)
            source.data[:] = random.Random(1).randbytes(len(source.data))
            target = target or HostPool(layout, num_blocks)
            sending = sending or create_transport(transport, source.memory, timeout_s=5.0, shape=shape)
            receiving = receiving or create_transport(transport, target.memory, timeout_s=5.0, shape=shape)
            stack.push_async_callback(sending.aclose)
            stack.push_async_callback(receiving.aclose)
            receiver = receiver_of(
                target,
                receiving,
                checksum=checksum,
                clock=clock,
                lease_s=lease_s,
                eos_token_ids=eos_token_ids,
                codec=codec,
            )
            sender = sender_of(
                source,
                sending,
                checksum=checksum if sender_checksum is None else sender_checksum,
                message_bytes=message_bytes,
                max_inflight_bytes=max_inflight_bytes,
                clock=clock,
                lease_s=lease_s,
                connect_timeout_s=5.0,
                codec=sender_codec or codec,
                eos_token_ids=eos_token_ids if sender_eos_token_ids is None else sender_eos_token_ids,
            )
            endpoints = await receiver.start("127.0.0.1")
            stack.push_async_callback(receiver.aclose)
            stack.push_async_callback(sender.aclose)
            return Ends(sender, receiver, source, target, endpoints, receiving, clock)

        yield make


@pytest.fixture
def fake_nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    """A stand-in for NIXL, in its place."""
    network = FakeNetwork()
    network.install(monkeypatch)
    return network


def with_nixl(transport: str, request: pytest.FixtureRequest) -> None:
    """Have a stand-in for NIXL if the transport needs it and it is not installed."""
    if transport == "nixl" and importlib.util.find_spec("nixl") is None:
        request.getfixturevalue("fake_nixl")
