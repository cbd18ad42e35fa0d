"""NCCL's communicators and their streams, with strict stand-ins for NCCL and CUDA: this machine has no GPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kv_transfer import base
from kv_transfer.memory import DeviceMemory
from kv_transfer.pool import Pool
from kv_transfer.transports import torch_dist, torch_groups
from kv_transfer.transports.torch_dist import TorchDistTransport
from kv_transfer.transports.torch_groups import Communicators
from pdserve.core.errors import PeerLost, TransferTimeout
from pdserve.core.kv_layout import Region, probe_area
from tests.kv_transfer.conftest import LAYOUT
from tests.kv_transfer.strict_nccl import StrictNccl, communicators
from tests.loopback import SECRET
from tests.strict_cuda import StrictCuda, StrictGpus


@pytest.fixture
def strict_nccl(monkeypatch: pytest.MonkeyPatch) -> StrictNccl:
    """NCCL without GPUs."""
    installed = StrictNccl()
    installed.install(monkeypatch)
    return installed


@pytest.mark.parametrize("rank", [0, 1])
def test_communicators_are_connected_before_any_payload_on_the_pools_gpu(strict_nccl: StrictNccl, rank: int) -> None:
    """Otherwise the first probe pays for the connection, and the link is rated by it for good."""
    gpus = StrictGpus(num_gpus=4)
    here, there = (communicators(each, 3, gpus.process()) for each in (rank, 1 - rank))
    groups = strict_nccl.made[:2]
    assert [group.calls for group in groups] == [[], []]
    joining = threading.Thread(target=there.connect)
    joining.start()
    here.connect()
    joining.join(10)
    ours, theirs = groups[rank], groups[1 - rank]
    assert ours.calls == [("connect", 3), ("send", 1, 1 - rank, 3)]
    assert theirs.calls == [("connect", 3), ("recv", 1, 1 - rank, 3)]
    for group in groups:
        assert group.options.config.blocking == 0, "a blocking connection cannot be aborted"
        assert group.options.config.max_ctas == 8
        assert group.options._timeout.total_seconds() == 3600.0, "the link is first to give up"


class GpuPool(Pool):
    """A pool of one process on a GPU that is none."""

    def __init__(self, cuda: StrictCuda, num_blocks: int) -> None:
        self.gpu = DeviceMemory.create(sum(probe_area(LAYOUT.block_bytes * num_blocks)), "cuda:0", cuda)
        super().__init__(LAYOUT, num_blocks, self.gpu)
        self.data: memoryview = self.gpu.view(Region(0, LAYOUT.block_bytes * num_blocks)).numpy().data

    def bytes_of(self, block_ids: Sequence[int]) -> bytes:
        """What blocks hold."""
        return b"".join(bytes(self.data[start : start + size]) for start, size in self.regions(block_ids))


async def test_hand_offs_over_nccl_wait_for_their_streams_and_for_nothing_else(
    make_ends: Callable[..., Awaitable[Any]], strict_nccl: StrictNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathers, sends and receives run on streams whose work is done as late as possible: what is used too early is
    poison. While one payload is sent, the next one is enqueued behind it."""
    gpus = StrictGpus()
    source, target = GpuPool(gpus.process(), 256), GpuPool(gpus.process(), 256)

    def create(backend: str, store: Any, rank: int, *_: object, on_device: bool, memory: DeviceMemory) -> Communicators:
        return communicators(rank, memory.index, memory.cuda)

    monkeypatch.setattr(torch_groups, "create_groups", create)
    monkeypatch.setattr(base, "DEVICE_MESSAGE_BYTES", 8 * LAYOUT.block_bytes)
    sending, receiving = (
        TorchDistTransport(pool.gpu, SECRET, backend="nccl", timeout_s=10.0) for pool in (source, target)
    )
    ends = await make_ends(source=source, target=target, sending=sending, receiving=receiving, message_bytes=1)
    await ends.connect()  # a hand-off does not wait long for a link, which takes seconds on a busy machine
    for name, shift in (("first", 1), ("second", 57)):
        ids = [(number * 7 + shift) % 256 for number in range(200)]
        ends.start(name, ids)
        ends.sending[name].send_blocks(0, list(range(200)), last=True, trailer=b"token 1")
        received = await ends.both(name)
        assert target.bytes_of(ids) == source.bytes_of(range(200))
        assert received.proof.kv_bytes == 200 * LAYOUT.block_bytes
        assert received.proof.messages < 30, "messages have at least the size that fills the link"
    assert strict_nccl.largest == torch_dist.IN_FLIGHT
    await ends.sender.aclose()
    await ends.receiver.aclose()
    async with asyncio.timeout(10):  # both ends abort their communicators
        while not all(group.wire.aborted for group in strict_nccl.made):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Link:
    """Both ends of a connected link: ``near`` sends."""

    def __init__(self, number: int, near: StrictCuda, far: StrictCuda) -> None:
        self.near, self.far = communicators(1, 0, near, number), communicators(0, 0, far, number)
        joining = threading.Thread(target=self.far.connect)
        joining.start()
        self.near.connect()
        joining.join(10)

    def carries(self) -> bool:
        """Whether a payload arrives."""
        payload = torch.arange(64, dtype=torch.uint8)
        received: list[Any] = []
        receiving = threading.Thread(target=lambda: received.append(self.far.recv(64)()))
        receiving.start()
        self.near.send(payload)()
        receiving.join(10)
        return torch.equal(received[0], payload)

    def abort(self) -> None:
        """End both."""
        self.near.abort()
        self.far.abort()


@contextlib.contextmanager
def stopped_peer(link: Link) -> Iterator[None]:
    """A payload that nobody takes: a thread waits for its end."""

    def send() -> None:
        with pytest.raises(RuntimeError, match="aborted"):
            link.near.send(torch.zeros(8, dtype=torch.uint8))()

    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        link.abort()
        sending.join(10)


def test_a_link_whose_peer_has_stopped_holds_back_no_other_one(strict_nccl: StrictNccl) -> None:
    """Its send waits on a stream of its own. Of torch's streams, the 17th link would get those of the first."""
    gpus = StrictGpus()
    near, far = gpus.process(), gpus.process()
    links = [Link(number, near, far) for number in range(18)]
    with stopped_peer(links[0]):
        assert all(link.carries() for link in links[1:])
    for link in links[1:]:
        link.abort()


def test_links_that_wait_leave_multiprocessors_to_each_other(strict_nccl: StrictNccl) -> None:
    """Of the quarter of a GPU that MPS gives to transfers."""
    gpus = StrictGpus()
    near, far = gpus.process(multiprocessors=33), gpus.process()
    waiting, other = Link(0, near, far), Link(1, near, far)
    with stopped_peer(waiting):
        assert other.carries()
    other.abort()


def test_the_next_link_gets_the_streams_of_one_that_has_ended(strict_nccl: StrictNccl) -> None:
    gpus = StrictGpus()
    near, far = gpus.process(), gpus.process()
    for number in range(4):
        link = Link(number, near, far)
        assert link.carries()
        link.abort()
        for thread in threading.enumerate():
            if thread.name == "kv-torch-abort":
                thread.join(10)
    assert near.calls.count("a stream is created") == 12
    assert len(near._streams[0]) == 3


def test_ncclss_defaults_are_ours_unless_the_user_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in torch_groups._DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    torch_groups.set_defaults()
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"
    assert os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    torch_groups.set_defaults()
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"


def test_the_limits_of_a_join_agree() -> None:
    assert torch_groups.JOIN_S == torch_dist._NCCL_JOIN_S >= 60.0


class JoiningGroups:
    """Groups whose peer has died: `connect` ends only when they are aborted."""

    made: list[JoiningGroups]

    def __init__(self, *_: object, **named: object) -> None:
        self.memory, self.aborted, self.ended = named["memory"], threading.Event(), threading.Event()
        JoiningGroups.made.append(self)

    def connect(self) -> None:
        """Wait for the abort."""
        assert self.aborted.wait(20)
        self.ended.set()
        raise RuntimeError("the group was aborted")

    def abort(self) -> None:
        """End `connect`."""
        self.aborted.set()


async def test_a_join_whose_peer_died_ends_at_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the limit of connecting, and by an abort: else its thread stays for ever."""
    JoiningGroups.made = []
    monkeypatch.setattr(torch_groups, "create_groups", JoiningGroups)
    monkeypatch.setattr(torch_dist, "_NCCL_JOIN_S", 0.6)
    memory = DeviceMemory([], torch.zeros(64, dtype=torch.uint8), index=2)
    here, there = (TorchDistTransport(memory, SECRET, backend="nccl", timeout_s=5.0) for _ in range(2))
    endpoint = await there.listen("127.0.0.1")
    async with asyncio.timeout(5):
        with pytest.raises(TransferTimeout, match=r"did not answer within 0\.6 s"):
            await here.connect(endpoint, 0.2)
    assert JoiningGroups.made[0].memory is memory
    await here.aclose()
    await there.aclose()
    for groups in JoiningGroups.made:
        assert await asyncio.to_thread(groups.ended.wait, 5)


@pytest.mark.parametrize("how", ["closes", "resets"])
async def test_a_connection_that_its_peer_leaves_is_noticed(how: str) -> None:
    """A peer that dies with unread bytes resets the connection."""

    async def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if how == "resets":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async with await asyncio.start_server(leave, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await asyncio.wait_for(torch_dist._left(reader), 5)
        assert (reader.exception() is not None) == (how == "resets")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_peer_that_dies_during_the_join_is_noticed_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    JoiningGroups.made = []
    monkeypatch.setattr(torch_groups, "create_groups", JoiningGroups)
    memory = DeviceMemory([], torch.zeros(64, dtype=torch.uint8), index=0)
    here, there = (TorchDistTransport(memory, SECRET, backend="nccl", timeout_s=5.0) for _ in range(2))
    endpoint = await there.listen("127.0.0.1")
    connecting = asyncio.create_task(here.connect(endpoint, 0.2))
    async with asyncio.timeout(20):
        while len(JoiningGroups.made) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    async with asyncio.timeout(torch_groups.JOIN_S / 4):
        await there.aclose()
        with pytest.raises(PeerLost, match="the peer left while the two joined"):
            await connecting
    await here.aclose()
    for groups in JoiningGroups.made:
        assert await asyncio.to_thread(groups.ended.wait, 5)
