"""Everything a worker needs to know to start, as plain values that survive a trip through Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.config import PdserveConfig
from core.worker import Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker: who it is, where it listens, which device slot is its own, and the service's configuration.

    ``host`` is the address peers and gateway reach it under. ``device`` is ``cpu`` or ``cuda`` (never ``auto``).
    ``cores`` are the CPU cores its engine binds to (empty: all of the process's). ``registry_address`` is the
    gateway's internal ``host:port``.
    """

    worker_id: str
    role: Role
    host: str
    node: str
    device: str
    registry_address: str
    version: str
    cores: tuple[int, ...] = ()
    config: PdserveConfig = field(default_factory=PdserveConfig)

    def to_wire(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "worker_id": self.worker_id,
            "role": str(self.role),
            "host": self.host,
            "node": self.node,
            "device": self.device,
            "registry_address": self.registry_address,
            "version": self.version,
            "cores": list(self.cores),
            "config": self.config.model_dump(mode="json"),
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> WorkerSpec:
        """The spec that `to_wire` described."""
        return cls(
            **{
                **data,
                "role": Role(data["role"]),
                "cores": tuple(data["cores"]),
                "config": PdserveConfig.parse(data["config"]),
            }
        )
