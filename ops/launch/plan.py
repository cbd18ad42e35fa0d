"""Which node each worker should go to, as arithmetic over the nodes' resources.

Ray places and re-places; this says what to ask it for, because Ray knows nothing of pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.core.config import PlacementPolicy
from pdserve.core.worker import Role

Bundle = Mapping[str, float]
"""Ray resources that one worker asks for."""

_SLACK = 1e-6  # Ray counts in 1/10000


@dataclass(frozen=True, slots=True)
class Node:
    """A host of the Ray cluster: all its logical resources, and those that nobody has now."""

    node_id: str
    ip: str
    resources: Mapping[str, float]
    available: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_cpus(self) -> float:
        """Logical cores."""
        return self.resources.get("CPU", 0.0)

    @property
    def num_gpus(self) -> float:
        """Logical GPUs."""
        return self.resources.get("GPU", 0.0)


@dataclass(slots=True)
class _Room:
    node: Node
    free: dict[str, float]
    roles: Counter[Role]

    def fits(self, *bundles: Bundle) -> bool:
        needed: Counter[str] = Counter()
        for bundle in bundles:
            needed.update(bundle)
        return all(self.free.get(name, 0.0) + _SLACK >= amount for name, amount in needed.items())

    def take(self, role: Role, bundle: Bundle) -> None:
        for name, amount in bundle.items():
            self.free[name] = self.free.get(name, 0.0) - amount
        self.roles[role] += 1


def plan(
    roles: Sequence[Role],
    bundles: Mapping[Role, Bundle],
    nodes: Sequence[Node],
    policy: PlacementPolicy,
    present: Iterable[tuple[str, Role]] = (),
) -> list[Node | None]:
    """A node for each of ``roles``, in order; None where no node has room. ``present`` are the service's workers that
    are there already (node id and role); what they use is not in ``available`` any more.

    ``pack`` fills few nodes and completes pairs first; ``spread`` takes the node with the fewest workers of the same
    role (so that no node's loss takes all of them), then the fewest of the other; ``strict_spread`` one without any.
    """
    rooms = [_Room(node, dict(node.available), Counter()) for node in nodes]
    by_id = {room.node.node_id: room for room in rooms}
    for node_id, role in present:
        if node_id in by_id:
            by_id[node_id].roles[role] += 1
    chosen: list[Node | None] = [None] * len(roles)
    for index in _in_pairs(roles):
        role = roles[index]
        fitting = [room for room in rooms if room.fits(bundles[role])]
        if policy == "strict_spread":
            fitting = [room for room in fitting if not room.roles]
        if not fitting:
            continue
        room = _tightest(fitting, role, bundles) if policy == "pack" else _emptiest(fitting, role)
        room.take(role, bundles[role])
        chosen[index] = room.node
    return chosen


def _in_pairs(roles: Sequence[Role]) -> list[int]:
    """The indexes, prefill and decode by turns as far as they go."""
    of_role = {role: [index for index, each in enumerate(roles) if each is role] for role in Role}
    longest = max((len(indexes) for indexes in of_role.values()), default=0)
    return [indexes[turn] for turn in range(longest) for indexes in of_role.values() if turn < len(indexes)]


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def _tightest(rooms: Sequence[_Room], role: Role, bundles: Mapping[Role, Bundle]) -> _Room:
    other = _other(role)

    def order(room: _Room) -> tuple[bool, bool, int]:
        completes = room.roles[other] > room.roles[role]
        begins = room.fits(bundles[role], bundles.get(other, {}))
        return (not completes, not begins, -room.roles.total())

    return min(rooms, key=order)


def _emptiest(rooms: Sequence[_Room], role: Role) -> _Room:
    return min(rooms, key=lambda room: (room.roles[role], room.roles[_other(role)]))
