"""Holds a device slot for one worker: a placement group of one bundle.

One group per worker, so that workers come and go one by one: what a worker leaves is free for others at once, what
does not fit yet is a demand that Ray's autoscaler sees, and when a node dies Ray takes the bundle, and the actor in it,
to another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from ops.launch.plan import Bundle, Node
from pdserve.core.config import PlacementPolicy


def reserve_slot(
    bundle: Bundle, target: Node | None, policy: PlacementPolicy, taken: Collection[str]
) -> PlacementGroup:
    """Ask Ray for ``bundle``, on ``target`` if it has room. Under ``strict_spread`` never on the nodes ``taken`` (ids).
    Returns at once: the group may have to wait for a node."""
    others = sorted(set(taken) - ({target.node_id} if target else set()))
    # Selectors are hard, targets are not: after a node's death any other may do.
    selector = [{"ray.io/node-id": f"!in({','.join(others)})"}] if policy == "strict_spread" and others else None
    return placement_group(
        [dict(bundle)],
        strategy="STRICT_PACK",
        _soft_target_node_id=target.node_id if target else None,
        bundle_label_selector=selector,
    )


def node_of(group: PlacementGroup) -> str:
    """The id of the node that has the group's bundle now; empty while none has."""
    table = placement_group_table(group)
    return str(table["bundles_to_node_id"].get(0, "")) if table["state"] == "CREATED" else ""


def wait_placed(groups: Sequence[PlacementGroup], timeout_s: float) -> list[PlacementGroup]:
    """Wait until every group has a node, at most ``timeout_s``; returns those that have none."""
    asked = {group.ready(): group for group in groups}
    _, waiting = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    return [asked[reference] for reference in waiting]
