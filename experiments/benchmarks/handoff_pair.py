"""Pairs of our sender and receiver: whole hand-offs of blocks (for bare transports see
`experiments.pairs.transport_pair`). The module is also the program of both ends, over a pool of the model's block
layout."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator

from experiments.messages import message_of
from experiments.pairs.endpoint import Buffer, Expecting
from experiments.pairs.pair import TIMEOUT_S, Pair
from experiments.pairs.transport_pair import TRANSFER, LoopEndpoint
from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from pdserve.core.clock import MonotonicClock
from pdserve.core.handoff import KVEndpoint, KVPeer
from pdserve.core.kv_layout import KVLayout, Region
from runtime.secret import ServiceSecret

_SHAPES = {"135m": (30, 3, 64), "8b": (32, 8, 128)}  # layers, KV heads, head size


def layout_of(shape: str) -> KVLayout:
    """Blocks of 64 tokens in bfloat16, as the engine has them by default, of the model 135m or 8b."""
    layers, kv_heads, head_dim = _SHAPES[shape]
    return KVLayout.uniform(shape, "bfloat16", 64, layers, kv_heads, head_dim)


def handoff_pair(shape: str, transport: str, *, checked: bool = True, device: str = "cpu") -> Pair:
    """Hand-offs of the blocks of ``shape`` over ``transport``: scattered blocks of one pool, read, hashed, sent,
    verified and put into scattered blocks of the other. With the ``device`` cuda the pools are in the memory of two
    GPUs; their blocks are empty, and hand-offs cannot be checked."""
    name, module = f"{shape} blocks over {transport}", "experiments.benchmarks.handoff_pair"
    return Pair(name, module, transport, shape, device, environment=ServiceSecret.new().environment(), checked=checked)


class BlockBuffer(Buffer):
    """A pool whose blocks hand-offs use in a random order, so that hardly any two of them touch."""

    def __init__(self, pool: Pool, *, filled: bool) -> None:
        self._pool = pool
        if filled and isinstance(pool.memory, HostMemory):
            whole = pool.layout.block_bytes * pool.num_blocks
            pool.memory.view(Region(0, whole))[:] = Buffer(whole, filled=True).view
        self._order = list(range(pool.num_blocks))
        random.Random(filled).shuffle(self._order)

    def blocks(self, num_bytes: int) -> list[int]:
        """The blocks of a hand-off of ``num_bytes``."""
        return self._order[: -(-num_bytes // self._pool.layout.block_bytes)]

    def clear(self, num_bytes: int) -> None:
        """Zero the blocks of a hand-off."""
        for view in self._views(num_bytes):
            view[:] = bytes(len(view))

    def digest(self, num_bytes: int) -> str:
        """Digest of the blocks of a hand-off."""
        digest = hashlib.sha256()
        for view in self._views(num_bytes):
            digest.update(view)
        return digest.hexdigest()

    def _views(self, num_bytes: int) -> Iterator[memoryview]:
        assert isinstance(self._pool.memory, HostMemory), "hand-offs between GPUs are not checked"
        return map(self._pool.memory.view, self._pool.regions(self.blocks(num_bytes)))


class HandoffEndpoint(LoopEndpoint):
    """The target receives, the source sends. Connecting makes the handshake, measuring included."""

    buffer: BlockBuffer

    def __init__(self, role: str, max_bytes: int, transport: str, shape: str, device: str) -> None:
        layout = layout_of(shape)
        if device != "cpu":
            device += ":0" if role == "source" else ":1"
        super().__init__(role, Pool.create(layout, -(-max_bytes // layout.block_bytes), device), transport)
        self.buffer = BlockBuffer(self.pool, filled=role == "source")
        self._clock, self._count = MonotonicClock(), 0
        self._endpoints: tuple[KVEndpoint, ...] = self.on_loop(self._open())

    async def _open(self) -> tuple[KVEndpoint, ...]:
        if self.role == "source":
            self._sender = KVSender(
                self.pool,
                [self.transport],
                worker_id="source",
                checksum=True,
                message_bytes=TRANSFER.message_bytes,
                max_inflight_bytes=TRANSFER.max_inflight_bytes,
                clock=self._clock,
                lease_s=TIMEOUT_S,
                connect_timeout_s=TIMEOUT_S,
            )
            return ()
        self._receiver = KVReceiver(
            self.pool,
            [self.transport],
            worker_id="target",
            epoch="e",
            checksum=True,
            clock=self._clock,
            lease_s=TIMEOUT_S,
        )
        return await self._receiver.start("127.0.0.1")

    @property
    def address(self) -> tuple[KVEndpoint, ...]:
        """Where the target listens."""
        return self._endpoints

    def connect(self, address: bytes) -> None:
        """The source shakes hands; the target waits for it anyway."""
        if self.role == "source":
            self._peer = KVPeer("target", "e", message_of(address, tuple[KVEndpoint, ...], "the target"))
            self.on_loop(self._sender.connect(self._peer.worker_id, self._peer.epoch, self._peer.endpoints))

    def transfer(self, num_bytes: int) -> float:
        """One hand-off, which the target announces over the link before the source begins. Returns when the source
        started, or when the target had verified everything, on the host's clock."""
        self._count += 1
        blocks = self.buffer.blocks(num_bytes)
        if self.role == "target":
            return self.on_loop(self._receive(blocks))
        return self.on_loop(self._send(blocks))

    async def _receive(self, blocks: list[int]) -> float:
        name = str(self._count)
        self._receiver.announce(name, "source", blocks, 0, self._clock.now() + TIMEOUT_S)
        self.answer(Expecting())
        received = await self._receiver.wait(name)
        expected = len(blocks) * self.pool.layout.block_bytes
        if received.proof.kv_bytes != expected:
            raise RuntimeError(f"{received.proof.kv_bytes} bytes arrived, {expected} were expected")
        return received.verified_s

    async def _send(self, blocks: list[int]) -> float:
        name = str(self._count)
        await asyncio.sleep(0)
        started_s = self._clock.now()
        self._sender.push(name, self._peer, len(blocks), self._clock.now() + TIMEOUT_S)
        self._sender.send_blocks(name, 0, blocks, last=True)
        await self._sender.wait(name)
        return started_s


if __name__ == "__main__":
    HandoffEndpoint.run()
