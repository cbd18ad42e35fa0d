"""Source or target of `MooncakeTcp`: `python -m benchmarks.peers.mooncake_program ROLE MAX_BYTES`."""

from __future__ import annotations

import importlib
import time
from typing import Any

from experiments.pairs.endpoint import CannotRun, Endpoint


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
        self._remote = ("", 0)

    @property
    def address(self) -> dict[str, Any]:
        """Where the engine listens and where its buffer is."""
        return {"host": f"127.0.0.1:{self._engine.get_rpc_port()}", "buffer": self.buffer.address}

    def connect(self, address: dict[str, Any]) -> None:
        """Keep the address: the engine connects with its first transfer."""
        self._remote = (address["host"], address["buffer"])

    def transfer(self, num_bytes: int) -> float:
        """Read from the other engine's buffer."""
        host, remote_address = self._remote
        started_s = time.perf_counter()
        status = self._engine.transfer_sync_read(host, self.buffer.address, remote_address, num_bytes)
        seconds = time.perf_counter() - started_s
        if status:
            raise RuntimeError(f"a read of {num_bytes} bytes failed (status {status})")
        return seconds


if __name__ == "__main__":
    MooncakeEndpoint.run()
