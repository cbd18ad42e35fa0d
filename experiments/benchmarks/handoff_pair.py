"""Pairs of our sender and receiver: whole hand-offs of blocks (for bare transports see
`experiments.pairs.transport_pair`). The module is also the program of both ends, over a pool of the model's block
layout."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import msgspec

from experiments.messages import say
from experiments.pairs.endpoint import Expecting
from experiments.pairs.pair import TIMEOUT_S, Pair
from experiments.pairs.transport_pair import TRANSFER, LoopEndpoint
from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from pdserve.core.clock import MonotonicClock
from pdserve.core.handoff import KVEndpoint, KVPeer
from pdserve.core.kv_layout import KVLayout
from runtime.secret import ServiceSecret

_SHAPES = {"135m": (30, 3, 64), "8b": (32, 8, 128)}  # layers, KV heads, head size


def layout_of(shape: str) -> KVLayout:
    """Blocks of 64 tokens in bfloat16, as the engine has them by default, of the model 135m or 8b."""
    return KVLayout.uniform(shape, "bfloat16", 64, *_SHAPES[shape])


def handoff_pair(shape: str, transport: str, *, checked: bool = True, device: str = "cpu") -> Pair:
    """Hand-offs of the blocks of ``shape`` over ``transport``: scattered blocks of one pool, read, hashed, sent,
    verified and put into scattered blocks of the other. With the ``device`` cuda the pools are in the memory of two
    GPUs; their blocks are empty, and hand-offs cannot be checked."""
    name, kind = f"{shape} blocks over {transport}", f"{transport} {shape} {device}"
    environment = ServiceSecret.new().environment()
    return Pair(name, "experiments.benchmarks.handoff_pair", kind, environment=environment, checked=checked)


class HandoffEndpoint(LoopEndpoint):
    """The target receives, the source sends. Connecting makes the handshake, measuring included."""

    def allocated(self, num_bytes: int, kind: str) -> Any:
        """A pool whose blocks hand-offs use in a random order, so that hardly any two of them touch."""
        transport, shape, device = kind.split()
        layout, sends = layout_of(shape), self.role == "source"
        num_blocks = -(-num_bytes // layout.block_bytes)
        memory = self.start(
            transport, Pool.create(layout, num_blocks, device if device == "cpu" else f"{device}:{1 - sends}")
        )
        self._order = list(range(num_blocks))
        random.Random(sends).shuffle(self._order)
        self._clock, self._count = MonotonicClock(), 0
        self.on_loop(self._open())
        return memory

    async def _open(self) -> None:
        config = TRANSFER.model_copy(update={"lease_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S})
        ends: dict[str, Any] = {"worker_id": self.role, "clock": self._clock}
        if self.role == "target":
            self._receiver = KVReceiver(self.pool, [self.transport], config, epoch="e", **ends)
            self.address = await self._receiver.start("127.0.0.1")
        else:
            self._sender = KVSender(self.pool, [self.transport], config, **ends)

    def connect(self, address: Any) -> None:
        """The source shakes hands; the target waits for it anyway."""
        if self.role == "source":
            self._peer = KVPeer("target", "e", msgspec.convert(address, tuple[KVEndpoint, ...]))
            self.on_loop(self._sender.connect(self._peer))

    def views(self, num_bytes: int) -> Iterable[memoryview]:
        """The blocks of a hand-off."""
        assert isinstance(self.pool.memory, HostMemory), "hand-offs between GPUs are not checked"
        return map(self.pool.memory.view, self.pool.regions(self._blocks(num_bytes)))

    def _blocks(self, num_bytes: int) -> list[int]:
        return self._order[: -(-num_bytes // self.pool.layout.block_bytes)]

    def transfer(self, num_bytes: int) -> float:
        """One hand-off, which the target announces over the link before the source begins. Returns when the source
        started, or when the target had verified everything, on the host's clock."""
        self._count += 1
        move = self._receive if self.role == "target" else self._send
        return self.on_loop(move(str(self._count), self._blocks(num_bytes)))

    async def _receive(self, name: str, blocks: list[int]) -> float:
        transfer = self._receiver.announce(name, "source", blocks, 0, self._clock.now() + TIMEOUT_S)
        say(Expecting())
        received = await transfer.wait()
        expected = len(blocks) * self.pool.layout.block_bytes
        if received.proof.kv_bytes != expected:
            raise RuntimeError(f"{received.proof.kv_bytes} bytes arrived, {expected} were expected")
        return received.verified_s

    async def _send(self, name: str, blocks: list[int]) -> float:
        await asyncio.sleep(0)
        started_s = self._clock.now()
        transfer = self._sender.push(name, self._peer, len(blocks), self._clock.now() + TIMEOUT_S)
        transfer.send_blocks(0, blocks, last=True)
        await transfer.wait()
        return started_s


if __name__ == "__main__":
    HandoffEndpoint.run()
