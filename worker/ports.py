"""What a worker reaches outside of its own process, as interfaces: its engine, its gateways, and those who reach it. A
service has real ones (`worker.incarnation`, `worker.authentication`), a simulated one others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

from engine.messages import Command, EngineEvent, KVEvent
from worker.authentication import Wire
from worker.server import ControlServer

if TYPE_CHECKING:
    from worker.incarnation import Incarnation


class KVEventReader(Protocol):
    """The events of an engine about blocks, for the KV loop."""

    def follow(self, on_event: Callable[[KVEvent], None]) -> None:
        """Call ``on_event`` for each event, in order, on the running loop."""
        ...

    def close(self) -> None:
        """Stop. A second call has no effect."""
        ...


class EnginePort(Protocol):
    """An engine that has been started (`engine.process.client.EngineClient`)."""

    @property
    def pid(self) -> int:
        """Id of its process."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        ...

    def send(self, command: Command) -> None:
        """Send a command, from any thread. Ignored after its end."""
        ...

    def events(self) -> AsyncIterator[EngineEvent]:
        """Its events, in order, for one reader. Ends with the engine."""
        ...

    def take_kv_events(self) -> KVEventReader:
        """The reader of its events about blocks, once."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """End it."""
        ...


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
