"""Transports whose payloads stay on a device, with host tensors in its place: everything but the GPU's own calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from kv_transfer.base import KVTransport
from kv_transfer.device_memory import DeviceMemory, PeerDeviceMemory
from kv_transfer.memory_store import MemoryStore
from kv_transfer.sink import Sink
from kv_transfer.transports.cuda_ipc import CudaIpcTransport
from kv_transfer.transports.torch_dist import TorchDistTransport
from pdserve.core.errors import PeerLost, TransferRefused
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import KVLayout

MakeEnds = Callable[..., Awaitable[Any]]
LAYOUT = KVLayout("model", "float32", block_size=4, num_layers=2, num_kv_heads=2, head_dim=8)


def bytes_of(store: MemoryStore) -> torch.Tensor:
    """A pool and what lies behind it, as a tensor."""
    return torch.frombuffer(store.whole, dtype=torch.uint8)


class OneGpu:
    """What processes would share: pools by their handles."""

    def __init__(self) -> None:
        self._pools: dict[str, torch.Tensor] = {}

    def transport(self, name: str, store: MemoryStore, gpu: str = "GPU-1") -> CudaIpcTransport:
        """A worker's, whose pool is ``store``."""
        self._pools[name] = bytes_of(store)
        return CudaIpcTransport(DeviceMemory([name], bytes_of(store)), gpu, timeout_s=2.0, opened=self.open)

    def open(self, handle: Sequence[Any]) -> torch.Tensor:
        """As `kv_transfer.device_memory.open_cuda`."""
        if handle[0] not in self._pools:
            raise RuntimeError("invalid device context")
        return self._pools[handle[0]]


def pair(kind: str, source: MemoryStore, target: MemoryStore) -> tuple[KVTransport, KVTransport]:
    """Transports for both ends."""
    if kind == "torch_dist":
        return TorchDistTransport(timeout_s=5.0, on_device=True), TorchDistTransport(timeout_s=5.0, on_device=True)
    gpu = OneGpu()
    return gpu.transport("p", source), gpu.transport("d", target)


@pytest.mark.parametrize("kind", ["torch_dist", "cuda_ipc"])
async def test_blocks_and_layers_go_from_device_to_device(make_ends: MakeEnds, kind: str) -> None:
    source, target = MemoryStore(LAYOUT, 64), MemoryStore(LAYOUT, 64)
    sending, receiving = pair(kind, source, target)
    ends = await make_ends(source=source, target=target, sending=sending, receiving=receiving)
    target_ids, source_ids = [40, 3, 17, 18, 19, 60], [5, 6, 7, 20, 9, 8]
    ends.sender.start("r", ends.receiver.expect("r", target_ids, 1, ends.in_s(10)), ends.in_s(10))
    ends.sender.send_blocks("r", 0, source_ids[:4], range(1))
    ends.sender.send_blocks("r", 0, source_ids[:4], range(1, 2))
    ends.sender.send_blocks("r", 4, source_ids[4:], last=True, trailer=b"token 1")
    received, sent = await asyncio.gather(ends.receiver.wait("r"), ends.sender.wait("r"))
    assert ends.blocks_of(target, target_ids[1:]) == ends.blocks_of(source, source_ids[1:])
    assert received.proof.kv_bytes == sent.bytes == 5 * LAYOUT.block_bytes
    assert (received.proof.transport, received.proof.checksum, received.trailer) == (kind, "off", b"token 1")
    assert ends.sender.links()[0].transport == kind
    assert ends.receiver.refused == {}


async def test_workers_on_different_gpus_do_not_meet() -> None:
    gpu, store = OneGpu(), MemoryStore(LAYOUT, 4)
    here, there = gpu.transport("p", store, "GPU-1"), gpu.transport("d", store, "GPU-2")
    endpoint = await there.listen("127.0.0.1")
    assert here.obstacle(endpoint) == "it uses another GPU of this host"
    assert here.obstacle(KVEndpoint("cuda_ipc", "elsewhere/GPU-1/name")) == "it is on another host, or another user's"
    with pytest.raises(PeerLost, match="another GPU"):
        await here.connect(endpoint, 1.0)
    await there.aclose()


async def test_memory_that_cannot_be_opened_is_refused() -> None:
    with pytest.raises(TransferRefused, match="invalid device context"):
        PeerDeviceMemory(["unknown"], OneGpu().open)


async def test_only_what_lies_in_the_pool_can_be_sent() -> None:
    gpu, source, target = OneGpu(), MemoryStore(LAYOUT, 4), MemoryStore(LAYOUT, 4)
    here, there = gpu.transport("p", source), gpu.transport("d", target)
    endpoint = await there.listen("127.0.0.1")
    link, accepted = await asyncio.gather(here.connect(endpoint, 2.0), there.accept())
    accepted.introduced()
    elsewhere: list[Any] = [torch.zeros(16, dtype=torch.uint8)]
    with pytest.raises(ValueError, match="outside the pool"):
        await link.send(b"h", elsewhere)
    await link.send(b"h", source.read_blocks([2], on_device=True))
    message = await accepted.recv()
    sink = Sink([torch.empty(message.size, dtype=torch.uint8)])
    await accepted.take(sink)
    assert sink.left == 0
    await here.aclose()
    await there.aclose()
