"""Everything that a worker needs to start, in a form that can be sent through Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.spec import ENGINE_MODULE
from pdserve.core.config import PdserveConfig
from pdserve.core.worker import Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The identity of a worker, its addresses, its cores, and the configuration of the service.

    ``role`` is the one that it starts with, by which its engine's memory is divided; the service may change it later.
    ``host`` is the address at which peers and the gateway reach the worker, and ``node`` Ray's address of its host;
    both may be empty until the worker is on a host. ``device`` is ``cpu`` or ``cuda``, never ``auto``.
    ``registry_addresses`` are the internal ``host:port`` of all gateways. ``service`` is the service's id, which they
    check. ``port`` is the control port, and the following ports belong to the KV transports (0: the system chooses all
    of them). ``device_share`` is the worker's share of its device slot (1: all of it). ``num_slots`` is the least
    number of the service's workers that are expected on its host. ``cores`` are the cores that its engine binds to:
    empty until they are claimed (`worker.cores.claim_cores`), and on GPUs. ``engine_module`` is the module that its
    engine process runs.
    """

    worker_id: str
    role: Role
    host: str
    node: str
    device: str
    registry_addresses: tuple[str, ...]
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
        """The first port of its KV transports; 0 if the system chooses them."""
        return self.port + 1 if self.port else 0

    @property
    def num_cores(self) -> int:
        """The cores that its engine binds to on a CPU, if there are so many."""
        return self.config.cluster.cores_per_worker * self.config.engine.slots[self.role]

    @property
    def token_budget(self) -> int:
        """The most tokens of one step that its engine is prepared for."""
        return self.config.engine.token_budget(self.device, self.role)

    def token_budget_as(self, role: Role) -> int:
        """The most tokens of one step while the worker has this role."""
        return min(self.token_budget, self.config.engine.token_budget(self.device, role))

    def to_wire(self) -> dict[str, Any]:
        """Plain values, which JSON can carry."""
        config = self.config.model_dump(mode="json")
        return {**asdict(self), "role": str(self.role), "config": config}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> WorkerSpec:
        """The spec from the values of `to_wire`. ConfigError if the configuration is invalid."""
        return cls(
            **{
                **data,
                "role": Role(data["role"]),
                "config": PdserveConfig.parse(data["config"]),
                "registry_addresses": tuple(data["registry_addresses"]),
                "cores": tuple(data["cores"]),
            }
        )
