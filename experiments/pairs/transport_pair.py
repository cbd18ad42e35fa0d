"""A bare link of one of our transports, without blocks or requests; source and target are this module as a program."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from experiments.messages import Message, message_of
from experiments.pairs.buffer import Buffer
from experiments.pairs.endpoint import Expecting
from experiments.pairs.loop_endpoint import TIMEOUT_S, TRANSFER, TRANSPORT_VARIABLE, LoopEndpoint
from experiments.pairs.process_pair import ProcessPair
from kv_transfer.base import KVLink
from kv_transfer.factory import create_transport
from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import KVLayout, Region
from runtime.secret import ServiceSecret


class TransportPair(ProcessPair):
    """A link of ``transport`` between two processes: memory to memory."""

    module = "experiments.pairs.transport_pair"

    def __init__(self, transport: str) -> None:
        super().__init__()
        self.name = transport
        self.environment = {TRANSPORT_VARIABLE: transport, **ServiceSecret.new().environment()}


class FileBuffer(Buffer):
    """A buffer in a memory file, as engines have their pools in."""

    def __init__(self, num_bytes: int, *, filled: bool) -> None:
        layout = KVLayout.uniform("bytes", "float32", block_size=1, num_layers=1, num_kv_heads=1, head_dim=512)
        self.pool = Pool.create(layout, -(-num_bytes // layout.block_bytes))
        assert isinstance(self.pool.memory, HostMemory)
        self.memory = self.pool.memory
        self.array = np.frombuffer(self.memory.view(Region(0, num_bytes)), dtype=np.uint8)
        if filled:
            self.array[:] = Buffer(num_bytes, filled=True).array


class Address(Message):
    """The target's endpoint; the source has none."""

    endpoint: KVEndpoint | None = None


class TransportEndpoint(LoopEndpoint):
    """The target listens, the source connects."""

    def __init__(self, role: str, max_bytes: int) -> None:
        self.role = role
        self.start_loop()
        self.buffer: FileBuffer = FileBuffer(max_bytes, filled=role == "source")
        self._transport = create_transport(
            self.transport_name, self.buffer.pool.memory, ServiceSecret.from_environment(), timeout_s=TIMEOUT_S
        )
        self._endpoint = self.on_loop(self._transport.listen("127.0.0.1")) if role == "target" else None
        self._link: KVLink | None = None

    @property
    def address(self) -> Address:
        """Where it listens."""
        return Address(self._endpoint)

    def connect(self, address: bytes) -> None:
        """Open the link, or take it."""
        if self.role == "source":
            endpoint = message_of(address, Address, "the target").endpoint
            assert endpoint is not None, "a target listens"
            self._link = self.on_loop(self._transport.connect(endpoint, TIMEOUT_S))
            # Where no hardware serves the target's reads, a task that receives does.
            self._receiving = asyncio.run_coroutine_threadsafe(self._link.recv(), self._loop)
        else:
            self._link = self.on_loop(self._accept())

    async def _accept(self) -> KVLink:
        link = await self._transport.accept()
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
        assert self._link is not None, "a pair connects first"
        started_s = time.perf_counter()
        for start in range(0, num_bytes, TRANSFER.message_bytes):
            region = Region(start, min(TRANSFER.message_bytes, num_bytes - start))
            await self._link.send(b"payload", await self._link.payload([region]))
        return started_s

    async def _take(self, num_bytes: int) -> float:
        assert self._link is not None, "a pair connects first"
        filled = 0
        while filled < num_bytes:
            message = await self._link.recv()
            await self._link.fetch([Region(filled, message.size)])
            filled += message.size
        return time.perf_counter()


if __name__ == "__main__":
    TransportEndpoint.run()
