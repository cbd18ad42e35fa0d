"""Which worker would go where: what the doctor examines in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ops.launch.plan import Bundle, Node, plan
from ops.launch.ports import first_port, port_base
from ops.launch.slots import roles_of, worker_bundles
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError
from pdserve.core.worker import Role
from worker.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's place: its node, the how-manieth of that node it is, its first port (0: the system picks), and what
    it asks Ray for."""

    worker_id: str
    role: Role
    node: Node
    slot: int
    port: int
    bundle: Bundle

    def spec(self, config: PdserveConfig, device: str, host: str) -> WorkerSpec:
        """What the worker would be told, to listen on ``host``."""
        return WorkerSpec(
            worker_id=self.worker_id,
            role=self.role,
            host=host,
            node=self.node.ip,
            device=device,
            registry_address="",
            version="",
            port=self.port,
            device_share=min(1.0, self.bundle.get("GPU", 1.0)),
            config=config,
        )


def seats_of(
    config: PdserveConfig, device: str, nodes: Sequence[Node], *, idle: bool
) -> tuple[tuple[Seat, ...], tuple[str, ...]]:
    """A seat for each worker, and the names of those that no node has room for now. ``idle``: as if nothing ran on the
    nodes. LaunchError if they would not fit even then."""
    cluster = config.cluster
    bundles, roles = worker_bundles(cluster, device, nodes), roles_of(cluster)
    if idle:
        nodes = [replace(node, available=node.resources) for node in nodes]
    base = port_base(cluster)
    seats: list[Seat] = []
    left_over: list[str] = []
    per_role: Counter[Role] = Counter()
    per_node: Counter[str] = Counter()
    for ordinal, (role, node) in enumerate(zip(roles, plan(roles, bundles, nodes, cluster.placement), strict=True)):
        name = f"{role}-{per_role[role]}"
        per_role[role] += 1
        if node is None:
            left_over.append(name)
            continue
        seats.append(Seat(name, role, node, per_node[node.node_id], first_port(base, ordinal), bundles[role]))
        per_node[node.node_id] += 1
    if not seats and not cluster.autoscale:
        raise LaunchError(f"no node has room for any of {', '.join(left_over)} now")
    return tuple(seats), tuple(left_over)
