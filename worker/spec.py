"""Everything a worker needs to know to start, as plain values that survive a trip through Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.config import PdserveConfig
from core.worker import Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker: who it is, where it listens, which device slot is its own, and the service's configuration.

    ``host`` is the address peers and gateway reach it under. ``device`` is ``cpu`` or ``cuda`` (never ``auto``).
    ``registry_address`` is the gateway's internal ``host:port``. ``slot`` counts the workers on one host,
    ``device_share`` below 1 says that the slot is shared.
    """

    worker_id: str
    role: Role
    host: str
    node: str
    device: str
    registry_address: str
    version: str
    slot: int = 0
    device_share: float = 1.0
    config: PdserveConfig = field(default_factory=PdserveConfig)

    @property
    def cores(self) -> tuple[int, ...]:
        """The CPU cores its engine binds to: the slot's own, counted through what this process may use (slots beyond
        the last core begin again at the first). Empty on a GPU: there the cores are shared."""
        if self.device != "cpu":
            return ()
        allowed = sorted(os.sched_getaffinity(0))
        width = self.config.cluster.cores_per_worker
        return tuple(sorted({allowed[(self.slot * width + i) % len(allowed)] for i in range(width)}))

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
            "slot": self.slot,
            "device_share": self.device_share,
            "config": self.config.model_dump(mode="json"),
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> WorkerSpec:
        """The spec that `to_wire` described."""
        return cls(
            **{
                **data,
                "role": Role(data["role"]),
                "config": PdserveConfig.parse(data["config"]),
            }
        )
