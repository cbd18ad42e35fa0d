"""Source or target of `Nixl`: `python -m experiments.benchmarks.nixl_program ROLE MAX_BYTES`."""

from __future__ import annotations

import base64
import importlib
import time
from typing import Any

from experiments.messages import Message, message_of
from experiments.pairs.endpoint import CannotRun, Endpoint

_TIMEOUT_S = 50.0


class Address(Message):
    """The agent's metadata in base64, and the address of its buffer."""

    metadata: str
    buffer: int


class NixlEndpoint(Endpoint):
    """An agent with one registered buffer. Metadata travel with the commands, so no agent listens. There is no progress
    thread, which would occupy a core and be slower on few cores; both sides poll during a transfer."""

    def __init__(self, role: str, max_bytes: int) -> None:
        nixl = importlib.import_module("nixl_cu12._api")
        super().__init__(role, max_bytes)
        self._agent: Any = nixl.nixl_agent(role, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        if "UCX" not in self._agent.backends:
            raise CannotRun("NIXL has no UCX backend here")
        self._agent.register_memory([(self.buffer.address, max_bytes, 0, "")], "DRAM")
        self._remote = ("", 0)

    @property
    def address(self) -> Address:
        """What the other agent has to know."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return Address(metadata, self.buffer.address)

    def connect(self, address: bytes) -> None:
        """Make the other agent and its buffer known to this one."""
        other = message_of(address, Address, "the other agent")
        name = self._agent.add_remote_agent(base64.b64decode(other.metadata))
        self._remote = (name.decode() if isinstance(name, bytes) else name, other.buffer)

    def transfer(self, num_bytes: int) -> float:
        """Read from the other agent's buffer, from posting until done."""
        name, remote_address = self._remote
        local, remote = (
            self._agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
            for address in (self.buffer.address, remote_address)
        )
        handle = self._agent.initialize_xfer("READ", local, remote, name)
        started_s = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - started_s < _TIMEOUT_S:
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - started_s
        if state != "DONE":
            raise RuntimeError(f"a read of {num_bytes} bytes is in state {state} after {seconds:.1f} s")
        self._agent.release_xfer_handle(handle)
        return seconds

    def serve(self) -> None:
        """Poll for notifications, which makes an agent answer."""
        while not self.commanded():
            self._agent.get_new_notifs()


if __name__ == "__main__":
    NixlEndpoint.run()
