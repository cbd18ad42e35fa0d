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

    ``host`` is the address peers and gateway reach it under, ``node`` the one that Ray knows the host by; empty until
    the worker is on a host, which may be another after a restart. ``device`` is ``cpu`` or ``cuda`` (never ``auto``).
    ``registry_address`` is the gateway's internal ``host:port``, ``service`` the id of the service, which the gateway
    has too. ``port`` is the first of its own ports: control, then
    one for each KV transport (0: the system picks). ``slot`` counts the workers on one host (None: it takes the first
    that is free), of which at least ``num_slots`` are expected; ``device_share`` below 1 says that the slot is shared.
    ``allowed_cores`` are the cores that engines and workers share out, those this process may use if it is None.
    """

    worker_id: str
    role: Role
    host: str
    node: str
    device: str
    registry_address: str
    version: str
    service: str = ""
    port: int = 0
    slot: int | None = None
    device_share: float = 1.0
    config: PdserveConfig = field(default_factory=PdserveConfig)
    num_slots: int = 1
    allowed_cores: tuple[int, ...] | None = None

    @property
    def kv_port(self) -> int:
        """The first port of its KV transports; 0: the system picks."""
        return self.port + 1 if self.port else 0

    @property
    def cores(self) -> tuple[int, ...]:
        """The CPU cores its engine binds to: the slot's own, counted through what this process may use (slots beyond
        the last core begin again at the first). Empty on a GPU: there the cores are shared."""
        return self._cores_of(self.slot or 0) if self.device == "cpu" else ()

    @property
    def spare_cores(self) -> tuple[int, ...]:
        """The cores that none of the host's engines binds to."""
        if self.device != "cpu":
            return ()
        taken = {core for slot in range(max(self.num_slots, (self.slot or 0) + 1)) for core in self._cores_of(slot)}
        return tuple(core for core in self._allowed if core not in taken)

    @property
    def _allowed(self) -> tuple[int, ...]:
        return tuple(sorted(os.sched_getaffinity(0))) if self.allowed_cores is None else self.allowed_cores

    def _cores_of(self, slot: int) -> tuple[int, ...]:
        width, allowed = self.config.cluster.cores_per_worker, self._allowed
        return tuple(sorted({allowed[(slot * width + i) % len(allowed)] for i in range(width)}))

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
            "service": self.service,
            "port": self.port,
            "slot": self.slot,
            "device_share": self.device_share,
            "config": self.config.model_dump(mode="json"),
            "num_slots": self.num_slots,
            "allowed_cores": self.allowed_cores,
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> WorkerSpec:
        """The spec that `to_wire` described."""
        return cls(
            **{
                **data,
                "role": Role(data["role"]),
                "config": PdserveConfig.parse(data["config"]),
                "allowed_cores": None if data["allowed_cores"] is None else tuple(data["allowed_cores"]),
            }
        )
