"""Which worker would be placed on which node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ops.launch.plan import Bundle, Node, plan, roles_of, worker_bundles
from ops.launch.ports import first_port, port_base
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError
from pdserve.core.worker import Role
from worker.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one worker: its node, its index among the workers of that node, its first port (0: chosen by the
    system), and the resources that it asks Ray for."""

    worker_id: str
    role: Role
    node: Node
    index_on_node: int
    port: int
    bundle: Bundle

    def spec(self, config: PdserveConfig, device: str, host: str) -> WorkerSpec:
        """The worker's specification, listening on ``host``."""
        return WorkerSpec(
            worker_id=self.worker_id,
            role=self.role,
            host=host,
            node=self.node.ip,
            device=device,
            registry_addresses=(),
            version="",
            port=self.port,
            device_share=min(1.0, self.bundle.get("GPU", 1.0)),
            config=config,
        )


def seats_of(
    config: PdserveConfig, device: str, nodes: Sequence[Node], *, idle: bool
) -> tuple[tuple[Seat, ...], tuple[str, ...]]:
    """A seat for each worker, and the names of the workers that no node has room for now. With ``idle`` the nodes count
    as empty. LaunchError if the workers would not fit even onto empty nodes."""
    cluster = config.cluster
    bundles, roles = worker_bundles(cluster, device, nodes), roles_of(cluster)
    if idle:
        nodes = [replace(node, available=node.resources) for node in nodes]
    base = port_base(cluster)
    seats: list[Seat] = []
    unplaced: list[str] = []
    per_role: Counter[Role] = Counter()
    per_node: Counter[str] = Counter()
    for ordinal, (role, node) in enumerate(zip(roles, plan(roles, bundles, nodes, cluster.placement), strict=True)):
        name = f"{role}-{per_role[role]}"
        per_role[role] += 1
        if node is None:
            unplaced.append(name)
            continue
        seats.append(
            Seat(
                name,
                role,
                node,
                per_node[node.node_id],
                first_port(base, ordinal, config.gateway.replicas),
                bundles[role],
            )
        )
        per_node[node.node_id] += 1
    if not seats and not cluster.autoscale:
        raise LaunchError(f"no node has room for any of {', '.join(unplaced)} now")
    return tuple(seats), tuple(unplaced)
