"""Transports whose payloads stay on a device, with host tensors in its place: everything but the GPU's own calls."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kv_transfer import base
from kv_transfer.base import KVTransport
from kv_transfer.memory import DeviceMemory
from kv_transfer.pool import Pool
from kv_transfer.send_transfer import SendLink, SendTransfer
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.torch_dist import TorchDistTransport
from kv_transfer.transports.torch_groups import GlooGroups
from kv_transfer.transports.unix_socket import CudaIpcTransport
from pdserve.core.errors import PeerLost, TransferError, TransferRefused
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import KVLayout, Region, probe_area
from tests.host_pool import inline
from tests.kv_transfer.conftest import MakeEnds
from tests.loopback import SECRET

LAYOUT = KVLayout.uniform("model", "float32", block_size=4, num_layers=2, num_kv_heads=2, head_dim=8)


class DevicePool(Pool):
    """A pool in a tensor of the host, which stands for a device's."""

    def __init__(self, name: str, num_blocks: int) -> None:
        size = sum(probe_area(LAYOUT.block_bytes * num_blocks))
        self.whole = torch.zeros(size, dtype=torch.uint8)
        self.device_memory = DeviceMemory([name], self.whole)
        super().__init__(LAYOUT, num_blocks, self.device_memory)

    @property
    def data(self) -> memoryview:
        """Its bytes."""
        view: memoryview = self.whole.numpy().data
        return view[: LAYOUT.block_bytes * self.num_blocks]

    def bytes_of(self, block_ids: Sequence[int]) -> bytes:
        """What blocks hold."""
        return b"".join(bytes(self.data[start : start + size]) for start, size in self.regions(block_ids))


class OneGpu:
    """What processes would share: memory by its handle."""

    def __init__(self) -> None:
        self._pools: dict[str, torch.Tensor] = {}

    def transport(self, pool: DevicePool, gpu: str = "GPU-1") -> CudaIpcTransport:
        """A worker's, whose pool is ``pool``."""
        self._pools[pool.device_memory.handle[0]] = pool.whole
        return CudaIpcTransport(pool.device_memory, SECRET, gpu, timeout_s=2.0, opened=self.open)

    def open(self, handle: Sequence[Any]) -> DeviceMemory:
        """As `DeviceMemory.open`."""
        if handle[0] not in self._pools:
            raise TransferRefused("the peer's GPU memory cannot be opened: invalid device context")
        return DeviceMemory(handle, self._pools[handle[0]])


def pair(kind: str, source: DevicePool, target: DevicePool) -> tuple[KVTransport, KVTransport]:
    """Transports for both ends."""
    memories = source.device_memory, target.device_memory
    if kind == "torch_dist":
        sending, receiving = (
            TorchDistTransport(memory, SECRET, backend="gloo", timeout_s=5.0, on_device=True) for memory in memories
        )
        return sending, receiving
    if kind == "tcp":
        return TcpTransport(memories[0], SECRET, timeout_s=5.0), TcpTransport(memories[1], SECRET, timeout_s=5.0)
    if kind == "nixl":
        return NixlTransport(memories[0], SECRET, timeout_s=5.0), NixlTransport(memories[1], SECRET, timeout_s=5.0)
    gpu = OneGpu()
    return gpu.transport(source), gpu.transport(target)


@pytest.mark.parametrize("kind", ["torch_dist", "cuda_ipc", "tcp", "nixl"])
async def test_blocks_and_layers_go_from_device_to_device(
    make_ends: MakeEnds, kind: str, request: pytest.FixtureRequest
) -> None:
    """By ``tcp`` they are staged on the host at both ends."""
    if kind == "nixl":
        request.getfixturevalue("fake_nixl")
    source, target = DevicePool("p", 64), DevicePool("d", 64)
    sending, receiving = pair(kind, source, target)
    ends = await make_ends(source=source, target=target, sending=sending, receiving=receiving)
    target_ids, source_ids = [40, 3, 17, 18, 19, 60], [5, 6, 7, 20, 9, 8]
    ends.start("r", target_ids, 1)
    ends.sending["r"].send_blocks(0, source_ids[:4], range(1))
    ends.sending["r"].send_blocks(0, source_ids[:4], range(1, 2))
    ends.sending["r"].send_blocks(4, source_ids[4:], last=True, trailer=b"token 1")
    received = await ends.both("r")
    assert target.bytes_of(target_ids[1:]) == source.bytes_of(source_ids[1:])
    assert received.proof.kv_bytes == 5 * LAYOUT.block_bytes
    assert (received.proof.transport, received.proof.checksum, received.trailer) == (
        kind,
        "xxh3-64 verified" if kind == "tcp" else "off",
        b"token 1",
    )
    assert ends.sender.links()[0].transport == kind
    assert ends.receiver.refused == {}


async def test_a_device_s_blocks_are_coded_on_the_host(make_ends: MakeEnds) -> None:
    source, target = DevicePool("p", 8), DevicePool("d", 8)
    sending, receiving = pair("tcp", source, target)
    ends = await make_ends(
        layout=LAYOUT, source=source, target=target, sending=sending, receiving=receiving, codec="int8"
    )
    numbers = torch.randn(len(source.data) // 4, generator=torch.Generator().manual_seed(1))
    source.whole[: len(source.data)] = numbers.view(torch.uint8)
    ends.start("r", [4, 3], send=[5, 6])
    proof = (await ends.both("r")).proof
    assert (proof.kv_bytes, proof.wire_bytes) == (2 * LAYOUT.block_bytes, 2 * LAYOUT.block_bytes * (8 + 2) // 32)
    found, sent = (
        torch.frombuffer(bytearray(pool.bytes_of(blocks)), dtype=torch.float32)
        for pool, blocks in ((target, [4, 3]), (source, [5, 6]))
    )
    assert 0 < (found - sent).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["torch_dist", "cuda_ipc", "nixl"])
async def test_messages_between_devices_fill_the_link(
    make_ends: MakeEnds, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small `transfer.message_bytes` is."""
    if kind == "nixl":
        request.getfixturevalue("fake_nixl")
    monkeypatch.setattr(base, "DEVICE_MESSAGE_BYTES", 16 * LAYOUT.block_bytes)
    source, target = DevicePool("p", 64), DevicePool("d", 64)
    sending, receiving = pair(kind, source, target)
    ends = await make_ends(source=source, target=target, sending=sending, receiving=receiving, message_bytes=1)
    ends.start("r", range(64), send=range(64))
    assert (await ends.both("r")).proof.messages == 4


@pytest.mark.parametrize("kind", ["torch_dist", "cuda_ipc", "nixl"])
@pytest.mark.parametrize("times", [1, 99])
async def test_a_byte_that_changes_on_its_way_between_devices_is_noticed(
    make_ends: MakeEnds, kind: str, times: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `transfer.checksum: device`. The message is sent again, and if that does not help, the hand-off fails."""
    if kind == "nixl":
        request.getfixturevalue("fake_nixl")
    source, target = DevicePool("p", 64), DevicePool("d", 64)
    sending, receiving = pair(kind, source, target)
    ends = await make_ends(source=source, target=target, sending=sending, receiving=receiving, checksum="device")
    whole, left = DeviceMemory.digest, times

    def digest(memory: DeviceMemory, regions: Sequence[Region]) -> Any:
        nonlocal left
        if memory is target.device_memory and left and regions:
            left -= 1
            memory.view(regions[-1])[-1] += 1
        return whole(memory, regions)

    monkeypatch.setattr(DeviceMemory, "digest", digest)
    ends.start("r", range(8), send=range(8, 16))
    if times == 1:
        received = await ends.both("r")
        assert target.bytes_of(range(8)) == source.bytes_of(range(8, 16))
        assert received.proof.checksum == "device-64 verified"
        assert received.proof.kv_bytes_retried > 0
        return
    with pytest.raises(TransferError):
        await ends.both("r")


def test_the_hash_of_a_device_depends_on_all_bytes_and_their_order_alone() -> None:
    size = 3 * 2**17 + 5
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    memory = DeviceMemory([], data)

    def digest(*regions: tuple[int, int]) -> bytes:
        return memory.digest([Region(*each) for each in regions])()

    before = digest((0, size))
    assert len(before) == 8
    assert digest((0, 7), (7, 2**17), (7 + 2**17, size - 7 - 2**17)) == before
    assert digest((7, 2**17), (0, 7), (7 + 2**17, size - 7 - 2**17)) != before
    for position in (0, 1, 2**15 - 1, 2**15, 2**17, size - 1):
        for change in (1, 128):
            data[position] += change
            assert digest((0, size)) != before
            data[position] -= change
    assert digest((0, size)) == before
    data[:16], data[2**15 : 2**15 + 16] = data[2**15 : 2**15 + 16].clone(), data[:16].clone()
    assert digest((0, size)) != before
    assert digest() == digest((5, 0))


@pytest.mark.parametrize("size", [64, 63])
def test_copies_within_a_device_of_any_size(size: int) -> None:
    source, target = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    memory = DeviceMemory([], target)
    starts = [(0, 128), (128, 64), (64, 0)]
    memory.gather((Region(ours, size), source[theirs : theirs + size]) for ours, theirs in starts)
    for ours, theirs in starts:
        assert torch.equal(target[ours : ours + size], source[theirs : theirs + size])
    assert target.count_nonzero() <= 3 * size


async def test_workers_on_different_gpus_do_not_meet() -> None:
    gpu = OneGpu()
    here, there = gpu.transport(DevicePool("p", 4), "GPU-1"), gpu.transport(DevicePool("d", 4), "GPU-2")
    endpoint = await there.listen("127.0.0.1")
    assert here.obstacle(endpoint) == "it uses another GPU of this host"
    assert here.obstacle(KVEndpoint("cuda_ipc", "elsewhere/GPU-1/name")) == "it is on another host, or another user's"
    with pytest.raises(PeerLost, match="another GPU"):
        await here.connect(endpoint, 1.0)
    await there.aclose()


async def test_memory_that_cannot_be_opened_loses_the_link() -> None:
    gpu, other = OneGpu(), OneGpu()
    here, there = gpu.transport(DevicePool("p", 4)), other.transport(DevicePool("d", 4))
    endpoint = await there.listen("127.0.0.1")
    with pytest.raises(TransferRefused, match="invalid device context"):
        await here.connect(endpoint, 2.0)
    await here.aclose()
    await there.aclose()


async def test_only_what_lies_in_the_pool_can_be_sent() -> None:
    gpu, source, target = OneGpu(), DevicePool("p", 4), DevicePool("d", 4)
    here, there = gpu.transport(source), gpu.transport(target)
    endpoint = await there.listen("127.0.0.1")
    link, accepted = await asyncio.gather(here.connect(endpoint, 2.0), there.accept())
    accepted.introduced()
    with pytest.raises(ValueError, match="outside the pool"):
        await link.send(b"h", inline(b"elsewhere"))
    await link.send(b"h", await link.payload(source.regions([2])))
    await accepted.recv()
    fetch = accepted.fetch(target.regions([1]))
    await fetch
    assert fetch.left == 0
    await here.aclose()
    await there.aclose()


async def test_nothing_writes_a_device_any_more_once_a_fetch_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device still copies when the fetch is cancelled."""
    source, target = DevicePool("p", 4), DevicePool("d", 4)
    gpu = OneGpu()
    here, there = gpu.transport(source), gpu.transport(target)
    link, accepted = await asyncio.gather(here.connect(await there.listen("127.0.0.1"), 2.0), there.accept())
    accepted.introduced()
    copied = False
    monkeypatch.setattr(DeviceMemory, "settled", lambda _: lambda: copied)
    await link.send(b"h", await link.payload(source.regions([2])))
    await accepted.recv()
    fetch = accepted.fetch(target.regions([1]))

    async def move() -> None:
        await fetch

    moving, resting = asyncio.create_task(move()), None
    try:
        await asyncio.sleep(0.01)
        fetch.cancel()
        resting = asyncio.create_task(fetch.at_rest())
        await asyncio.sleep(0.02)
        assert not resting.done()
        copied = True
        async with asyncio.timeout(5):
            await resting
            await moving
    finally:
        await here.aclose()
        await there.aclose()


@pytest.mark.parametrize("kind", ["tcp", "cuda_ipc"])
async def test_an_error_of_the_gpu_ends_the_process(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """To lose the link is not enough: every later call of the process would fail as well."""
    ended = asyncio.Event()
    source, target = DevicePool("p", 8), DevicePool("d", 8)
    sending, receiving = pair(kind, source, target)
    ends = await make_ends(source=source, target=target, sending=sending, receiving=receiving)
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())

    def breaking(whole: Any) -> Any:
        def copy(*arguments: object, **named: object) -> object:
            if not is_broken:
                return whole(*arguments, **named)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return copy

    is_broken = False
    monkeypatch.setattr(torch.Tensor, "copy_", breaking(torch.Tensor.copy_))
    monkeypatch.setattr(torch, "_foreach_copy_", breaking(torch._foreach_copy_))
    ends.start("r", [1], 0)
    is_broken = True
    ends.sending["r"].send_blocks(0, [2], last=True)
    async with asyncio.timeout(10):
        await ended.wait()
    await asyncio.gather(ends.receiving["r"].wait(), ends.sending["r"].wait(), return_exceptions=True)


async def test_a_slow_first_payload_does_not_rate_the_link_for_good(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a library connects at the first payload: the handshake goes on to larger ones."""
    whole, sizes = GlooGroups.recv, []

    def recv(self: GlooGroups, size: int) -> Any:
        sizes.append(size)
        if len([each for each in sizes if each >= 2**16]) == 1:
            time.sleep(0.3)
        return whole(self, size)

    monkeypatch.setattr(GlooGroups, "recv", recv)
    source, target = DevicePool("p", 8192), DevicePool("d", 8192)
    sending, receiving = pair("torch_dist", source, target)
    ends = await make_ends(source=source, target=target, sending=sending, receiving=receiving)
    ends.start("r", [1], send=[2])
    await ends.both("r")
    assert max(sizes) > 2**16


async def test_messages_grow_when_hand_offs_have_rated_the_link(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handshake that measured too little must not keep messages small for the life of the link."""
    source, target = DevicePool("p", 64), DevicePool("d", 64)
    sending, receiving = pair("tcp", source, target)
    ends = await make_ends(source=source, target=target, sending=sending, receiving=receiving, message_bytes=2**20)
    sizes: list[int] = []
    whole = SendLink.add

    def add(link: SendLink, transfer: SendTransfer) -> None:
        whole(link, transfer)
        sizes.append(transfer.message_bytes)

    monkeypatch.setattr(SendLink, "add", add)
    for name, ceiling_gbs in (("first", None), ("slow", 0.0001), ("rated", 5.0)):
        if ceiling_gbs is not None:
            link = ends.sender._links["d"]
            link.about = replace(link.about, ceiling_gbs=ceiling_gbs)
        ends.start(name, [1], send=[2])
        await ends.both(name)
    assert sizes[1:] == [2**16, 2**20]
