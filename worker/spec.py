"""Everything a worker needs to know to start, as plain values that survive a trip through Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.spec import ENGINE_MODULE
from pdserve.core.config import PdserveConfig
from pdserve.core.worker import Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker: who it is, where it listens, which cores are its own, and the service's configuration.

    ``host`` is the address peers and gateway reach it under, ``node`` the one that Ray knows the host by; empty until
    the worker is on a host, which may be another after a restart. ``device`` is ``cpu`` or ``cuda`` (never ``auto``).
    ``registry_address`` is the gateway's internal ``host:port``, ``service`` the id of the service, which the gateway
    has too. ``port`` is the first of its own ports: control, then
    one for each KV transport (0: the system picks). ``device_share`` below 1 says that its device slot is shared.
    ``num_slots`` workers of the service, at least, are expected on its host. ``cores`` are what its engine binds to:
    empty until they are claimed there (`worker.cores.claim_cores`), and on a GPU, where engines are not bound.
    ``engine_module`` is what its engine process runs.
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
    device_share: float = 1.0
    config: PdserveConfig = field(default_factory=PdserveConfig)
    num_slots: int = 1
    cores: tuple[int, ...] = ()
    engine_module: str = ENGINE_MODULE

    @property
    def kv_port(self) -> int:
        """The first port of its KV transports; 0: the system picks."""
        return self.port + 1 if self.port else 0

    def to_wire(self) -> dict[str, Any]:
        """Plain values, which JSON can carry."""
        config = self.config.model_dump(mode="json")
        return {**asdict(self), "role": str(self.role), "cores": list(self.cores), "config": config}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> WorkerSpec:
        """The spec that `to_wire` described."""
        return cls(
            **{
                **data,
                "role": Role(data["role"]),
                "config": PdserveConfig.parse(data["config"]),
                "cores": tuple(data["cores"]),
            }
        )
