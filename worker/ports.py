"""What a worker reaches outside of its own process: its engine, its gateways, and those who reach it. A service has
real ports (`worker.worker.ServicePorts`), a simulated one others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from contract.control import Wire
from worker.server import ControlServer

if TYPE_CHECKING:
    from worker.incarnation import Incarnation


class WorkerPorts(Protocol):
    """How a `worker.worker.Worker` reaches what is outside of its process."""

    async def listen(self, server: ControlServer) -> None:
        """Have gateways reach ``server``, and set its address. LaunchError if that fails."""
        ...

    async def stop_listening(self, server: ControlServer) -> None:
        """End all streams to ``server``."""
        ...

    def registry(self, address: str) -> Wire:
        """The way to the registry of the gateway at ``address``."""
        ...

    async def start(self) -> Incarnation:
        """Start an engine with its KV ends. PdserveError if that fails; nothing is left running then."""
        ...
