"""A bare link of one of our transports, without blocks or requests; source and target are this module as a program:
`python -m experiments.pairs.transport_pair TRANSPORT ROLE MAX_BYTES`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np

from experiments.messages import say
from experiments.pairs.endpoint import Endpoint, Expecting, fill
from experiments.pairs.pair import TIMEOUT_S, Pair
from kv_transfer.base import KVLink
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
    pool, which is the memory. The target listens."""

    pinned = True

    def start(self, transport: str, pool: Pool) -> Any:
        """Make the transport; the memory of the pool, filled, if it is the host's."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.pool = pool
        self.transport = create_transport(transport, pool.memory, ServiceSecret.from_environment(), timeout_s=TIMEOUT_S)
        if not isinstance(pool.memory, HostMemory):
            return None
        whole = Region(0, pool.layout.block_bytes * pool.num_blocks)
        return fill(np.frombuffer(pool.memory.view(whole), np.uint8), self.role)

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)


class TransportEndpoint(LoopEndpoint):
    """The source connects, and sends messages as large as a service's."""

    _link: KVLink

    def allocated(self, num_bytes: int, kind: str) -> Any:
        """A pool in a memory file, as engines have."""
        layout = KVLayout.uniform("bytes", "float32", block_size=1, num_layers=1, num_kv_heads=1, head_dim=512)
        memory = self.start(kind, Pool.create(layout, -(-num_bytes // layout.block_bytes)))
        if self.role == "target":
            self.address = self.on_loop(self.transport.listen("127.0.0.1"))
        return memory

    def connect(self, address: Any) -> None:
        """Open the link, or take it."""
        if self.role == "source":
            endpoint = msgspec.convert(address, KVEndpoint)
            self._link = self.on_loop(self.transport.connect(endpoint, TIMEOUT_S))
            # Where no hardware serves the target's reads, a task that receives does.
            self._receiving = asyncio.run_coroutine_threadsafe(self._link.recv(), self._loop)
        else:
            self._link = self.on_loop(self.transport.accept())
            self._loop.call_soon_threadsafe(self._link.introduced)

    def transfer(self, num_bytes: int) -> float:
        """Send everything, or take it: when the source began, or when the target had everything, by the host's
        clock."""
        if self.role == "target":
            say(Expecting())
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
