"""A bare link of one of our transports, without blocks or requests; source and target are this module as a program:
`python -m experiments.pairs.transport_pair TRANSPORT ROLE MAX_BYTES`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from experiments.messages import message_of
from experiments.pairs.endpoint import Buffer, Endpoint, Expecting, pin
from experiments.pairs.pair import TIMEOUT_S, Pair
from kv_transfer.base import KVLink, KVTransport
from kv_transfer.factory import create_transport
from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
from pdserve.core.config import TransferConfig
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import KVLayout, Region
from runtime.secret import ServiceSecret

TRANSFER = TransferConfig()
"""What a service has by default."""
T = TypeVar("T")


def transport_pair(transport: str) -> Pair:
    """A link of ``transport`` between two processes: memory to memory."""
    return Pair(transport, "experiments.pairs.transport_pair", transport, environment=ServiceSecret.new().environment())


class LoopEndpoint(Endpoint):
    """Base of the endpoints that are ours: an event loop in a thread, like a worker's KV ends, and a transport over a
    pool. The target listens."""

    def __init__(self, role: str, pool: Pool, transport: str) -> None:
        self.role = role
        pin(role)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.pool = pool
        secret = ServiceSecret.from_environment()
        self.transport: KVTransport = create_transport(transport, pool.memory, secret, timeout_s=TIMEOUT_S)

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, TIMEOUT_S), self._loop).result()


class PoolBuffer(Buffer):
    """The first bytes of a pool in a memory file, as engines have theirs in."""

    def __init__(self, pool: Pool, num_bytes: int, *, filled: bool) -> None:
        assert isinstance(pool.memory, HostMemory)
        self.array = np.frombuffer(pool.memory.view(Region(0, num_bytes)), dtype=np.uint8)
        if filled:
            self.array[:] = Buffer(num_bytes, filled=True).array


class TransportEndpoint(LoopEndpoint):
    """The source connects, and sends messages as large as a service's."""

    _link: KVLink

    def __init__(self, role: str, max_bytes: int, transport: str) -> None:
        layout = KVLayout.uniform("bytes", "float32", block_size=1, num_layers=1, num_kv_heads=1, head_dim=512)
        super().__init__(role, Pool.create(layout, -(-max_bytes // layout.block_bytes)), transport)
        self.buffer = PoolBuffer(self.pool, max_bytes, filled=role == "source")
        self._endpoint = self.on_loop(self.transport.listen("127.0.0.1")) if role == "target" else None

    @property
    def address(self) -> KVEndpoint | None:
        """Where the target listens."""
        return self._endpoint

    def connect(self, address: bytes) -> None:
        """Open the link, or take it."""
        if self.role == "source":
            endpoint = message_of(address, KVEndpoint, "the target")
            self._link = self.on_loop(self.transport.connect(endpoint, TIMEOUT_S))
            # Where no hardware serves the target's reads, a task that receives does.
            self._receiving = asyncio.run_coroutine_threadsafe(self._link.recv(), self._loop)
        else:
            self._link = self.on_loop(self._accept())

    async def _accept(self) -> KVLink:
        link = await self.transport.accept()
        link.introduced()
        return link

    def transfer(self, num_bytes: int) -> float:
        """Send everything, or take it: when the source began, or when the target had everything, by the host's
        clock."""
        if self.role == "target":
            self.answer(Expecting())
            return self.on_loop(self._take(num_bytes))
        return self.on_loop(self._send(num_bytes))

    async def _send(self, num_bytes: int) -> float:
        started_s = time.perf_counter()
        for start in range(0, num_bytes, TRANSFER.message_bytes):
            region = Region(start, min(TRANSFER.message_bytes, num_bytes - start))
            await self._link.send(b"payload", await self._link.payload([region]))
        return started_s

    async def _take(self, num_bytes: int) -> float:
        filled = 0
        while filled < num_bytes:
            message = await self._link.recv()
            await self._link.fetch([Region(filled, message.size)])
            filled += message.size
        return time.perf_counter()


if __name__ == "__main__":
    TransportEndpoint.run()
