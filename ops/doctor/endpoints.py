"""Where a probe listens in place of a worker, and what was in its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pdserve.core.handoff import KVEndpoint
from worker.addresses import Interface


@dataclass(frozen=True, slots=True)
class Trouble:
    """``check`` is ``port``, ``interface``, ``transport`` or ``kv``. Of a port, ``holder`` is who listens there, in
    words, if that can be told."""

    check: str
    what: str
    port: int = 0
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """``control`` is ``host:port`` of its ping server (empty: it has none), ``interface`` what ``transfer.interface``
    means there, ``kv`` where its transports listen (empty: they do not)."""

    worker_id: str
    control: str
    interface: Interface | None
    kv: tuple[KVEndpoint, ...]
    troubles: tuple[Trouble, ...]

    def to_wire(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Endpoints:
        """What `to_wire` described."""
        interface = data["interface"]
        return cls(
            worker_id=data["worker_id"],
            control=data["control"],
            interface=None if interface is None else Interface(**interface),
            kv=tuple(KVEndpoint(**each) for each in data["kv"]),
            troubles=tuple(Trouble(**each) for each in data["troubles"]),
        )
