"""Which worker would go where: what the doctor examines in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from core.config import PdserveConfig
from core.worker import Role
from pdserve.launch.slots import Node, resolve_device, worker_bundle
from worker.spec import WorkerSpec

DEFAULT_BASE = 20_000
PORTS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's place: its node, the how-manieth of that node it is, and its first port (0: the system picks)."""

    worker_id: str
    role: Role
    node: Node
    slot: int
    port: int

    def spec(self, config: PdserveConfig, device: str, device_share: float, *, host: str) -> WorkerSpec:
        """What the worker would be told."""
        return WorkerSpec(
            worker_id=self.worker_id,
            role=self.role,
            host=host,
            node=self.node.ip,
            device=device,
            registry_address="",
            version="",
            port=self.port,
            slot=self.slot,
            device_share=device_share,
            config=config,
        )


def port_base(config: PdserveConfig, *, local: bool) -> int:
    """The registry's port, from which the workers' are counted; 0: the system picks all of them."""
    return config.cluster.port_base or (0 if local else DEFAULT_BASE)


def seats_of(config: PdserveConfig, nodes: Sequence[Node], base: int) -> tuple[Seat, ...]:
    """A seat for each worker. LaunchError if they do not fit."""
    device = resolve_device(config.cluster, nodes)
    bundle = worker_bundle(config.cluster, device, nodes)
    kind = "GPU" if device == "cuda" else "CPU"
    left = {node.node_id: node.num_gpus if device == "cuda" else node.num_cpus for node in nodes}
    roles = [Role.PREFILL] * config.cluster.prefill + [Role.DECODE] * config.cluster.decode
    seats: list[Seat] = []
    per_role: Counter[Role] = Counter()
    per_node: Counter[str] = Counter()
    for ordinal, role in enumerate(roles):
        node = next((each for each in nodes if left[each.node_id] >= bundle.get(kind, 0.0) - 1e-9), nodes[0])
        left[node.node_id] -= bundle.get(kind, 0.0)
        port = base + 1 + PORTS_PER_WORKER * ordinal if base else 0
        seats.append(Seat(f"{role}-{per_role[role]}", role, node, per_node[node.node_id], port))
        per_role[role] += 1
        per_node[node.node_id] += 1
    return tuple(seats)
