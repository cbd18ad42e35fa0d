"""Source or target of `MooncakeTcp`: `python -m experiments.benchmarks.mooncake_program ROLE MAX_BYTES`."""

from __future__ import annotations

import importlib
import time
from typing import Any

from experiments.messages import Message, message_of
from experiments.pairs.endpoint import CannotRun, Endpoint


class Address(Message):
    """Where the engine listens, and the address of its buffer."""

    host: str
    buffer: int


class MooncakeEndpoint(Endpoint):
    """An engine with one registered buffer; it finds a free port itself."""

    def __init__(self, role: str, max_bytes: int) -> None:
        library = importlib.import_module("mooncake.engine")
        super().__init__(role, max_bytes)
        self._engine: Any = library.TransferEngine()
        if status := self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise CannotRun(f"the transfer engine does not start (status {status})")
        if status := self._engine.register_memory(self.buffer.address, max_bytes):
            raise CannotRun(f"the transfer engine does not register memory (status {status})")
        self._remote = Address("", 0)

    @property
    def address(self) -> Address:
        """What the other engine has to know."""
        return Address(f"127.0.0.1:{self._engine.get_rpc_port()}", self.buffer.address)

    def connect(self, address: bytes) -> None:
        """Keep the address: the engine connects with its first transfer."""
        self._remote = message_of(address, Address, "the other engine")

    def transfer(self, num_bytes: int) -> float:
        """Read from the other engine's buffer."""
        started_s = time.perf_counter()
        status = self._engine.transfer_sync_read(self._remote.host, self.buffer.address, self._remote.buffer, num_bytes)
        seconds = time.perf_counter() - started_s
        if status:
            raise RuntimeError(f"a read of {num_bytes} bytes failed (status {status})")
        return seconds


if __name__ == "__main__":
    MooncakeEndpoint.run()
