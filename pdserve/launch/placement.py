"""Puts each worker on a device slot of its own: one placement group, one bundle per worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from core.config import ClusterConfig
from core.errors import LaunchError
from core.worker import Role
from pdserve.launch.slots import Node, resolve_device, worker_bundle


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker goes: its bundle, its node, and the how-manieth worker of that node it is."""

    worker_id: str
    role: Role
    bundle_index: int
    node: Node
    slot: int


@dataclass(frozen=True, slots=True)
class Placement:
    """All workers' places, and the group that holds them."""

    group: PlacementGroup
    device: str
    bundle: dict[str, float]
    places: tuple[Place, ...]

    def workers_on(self, node: Node) -> int:
        """How many of the workers are on ``node``."""
        return sum(place.node == node for place in self.places)

    def remove(self) -> None:
        """Give the resources back."""
        remove_placement_group(self.group)


def place_workers(config: ClusterConfig, nodes: Sequence[Node]) -> Placement:
    """Reserve a slot for each worker. LaunchError if they do not fit, now or within the start-up time."""
    device = resolve_device(config, nodes)
    bundle = worker_bundle(config, device, nodes)
    roles = [Role.PREFILL] * config.prefill + [Role.DECODE] * config.decode
    group = placement_group([dict(bundle) for _ in roles], strategy="PACK")
    try:
        ray.get(group.ready(), timeout=config.start_timeout_s)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise LaunchError(
            f"Ray could not place {len(roles)} workers of {bundle} within {config.start_timeout_s:.0f} s; "
            "see `ray status` for what is missing"
        ) from None
    by_id = {node.node_id: node for node in nodes}
    node_of = placement_group_table(group)["bundles_to_node_id"]
    counts: Counter[Role] = Counter()
    per_node: Counter[str] = Counter()
    places = []
    for index, role in enumerate(roles):
        node = by_id[node_of[index]]
        places.append(Place(f"{role}-{counts[role]}", role, index, node, per_node[node.node_id]))
        counts[role] += 1
        per_node[node.node_id] += 1
    return Placement(group, device, bundle, tuple(places))
