"""Placement: device slots, and the node for each worker. Pure arithmetic over the resources of Ray nodes.

A device slot is one GPU, or ``cores_per_worker`` CPU cores. More workers than slots are an error, unless the user asked
for oversubscription (workers then share slots, as fractions of Ray resources) or for more nodes. Ray places the
workers; `plan` chooses the nodes to ask it for, because Ray does not know about prefill-decode pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from pdserve.core.config import ClusterConfig, PlacementPolicy
from pdserve.core.errors import LaunchError
from pdserve.core.worker import Role

Bundle = Mapping[str, float]
"""Ray resources that one worker asks for."""

_SLACK = 1e-6  # Ray counts in 1/10000


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the Ray cluster: all its logical resources, and those that are free."""

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


def plan(
    roles: Sequence[Role],
    bundles: Mapping[Role, Bundle],
    nodes: Sequence[Node],
    policy: PlacementPolicy,
    present: Iterable[tuple[str, Role]] = (),
) -> list[Node | None]:
    """A node for each of ``roles``, in order; None where no node has room. ``present`` are the service's existing
    workers (node id and role); ``available`` does not include what they use.

    ``pack`` fills few nodes and completes pairs first. ``spread`` prefers the node with the fewest workers of the same
    role, so that the loss of one node does not take all of them, then the fewest of the other role. ``strict_spread``
    takes only nodes without a worker."""
    free = {node.node_id: dict(node.available) for node in nodes}
    workers: dict[str, Counter[Role]] = {node.node_id: Counter() for node in nodes}
    for node_id, role in present:
        if node_id in workers:
            workers[node_id][role] += 1

    def fits(node: Node, *wanted: Bundle) -> bool:
        names = {name for bundle in wanted for name in bundle}
        has = free[node.node_id]
        return all(has.get(name, 0.0) + _SLACK >= sum(each.get(name, 0.0) for each in wanted) for name in names)

    def order(node: Node) -> tuple[int, ...]:
        """Of nodes that the next worker fits onto: the first one is taken."""
        there = workers[node.node_id]
        if policy != "pack":
            return there[role], there[role.other]
        begins_pair = fits(node, bundles[role], bundles.get(role.other, {}))
        return there[role.other] <= there[role], not begins_pair, -there.total()

    chosen: list[Node | None] = [None] * len(roles)
    for index in _in_pairs(roles):
        role = roles[index]
        fitting = [node for node in nodes if fits(node, bundles[role])]
        if policy == "strict_spread":
            fitting = [node for node in fitting if not workers[node.node_id]]
        if fitting:
            node = chosen[index] = min(fitting, key=order)
            workers[node.node_id][role] += 1
            for name, amount in bundles[role].items():
                free[node.node_id][name] = free[node.node_id].get(name, 0.0) - amount
    return chosen


def _in_pairs(roles: Sequence[Role]) -> list[int]:
    """The indexes of ``roles``, alternating between prefill and decode as far as possible."""
    of_role = {role: [index for index, each in enumerate(roles) if each is role] for role in Role}
    longest = max((len(indexes) for indexes in of_role.values()), default=0)
    return [indexes[turn] for turn in range(longest) for indexes in of_role.values() if turn < len(indexes)]


_ONE = dict.fromkeys(Role, 1)
SHARED_MEMORY_BYTES = 1 << 20
"""Every node has this much memory free; a bundle must not be empty."""


def resolve_device(config: ClusterConfig, nodes: Sequence[Node]) -> str:
    """``cpu`` or ``cuda``: the configured device, or for auto cuda if Ray has GPUs. LaunchError if cuda is configured
    and Ray has no GPU."""
    num_gpus = sum(node.num_gpus for node in nodes)
    if config.device == "auto":
        return "cuda" if num_gpus >= 1 else "cpu"
    if config.device == "cuda" and num_gpus < 1 and not config.worker_resources and not config.autoscale:
        raise LaunchError("cluster.device: cuda is configured, but Ray has no GPU; use --device cpu, or check the node")
    return config.device


def count_slots(config: ClusterConfig, device: str, nodes: Sequence[Node]) -> int:
    """Device slots of all nodes."""
    if device == "cuda":
        return sum(int(node.num_gpus) for node in nodes)
    return sum(int(node.num_cpus // config.cores_per_worker) for node in nodes)


def roles_of(config: ClusterConfig) -> list[Role]:
    """The role of each configured worker; LaunchError if there are none."""
    if not config.num_prefill + config.num_decode:
        raise LaunchError("cluster.prefill and cluster.decode are both 0; start at least one worker")
    return [Role.PREFILL] * config.num_prefill + [Role.DECODE] * config.num_decode


def worker_bundles(
    config: ClusterConfig, device: str, nodes: Sequence[Node], slots: Mapping[Role, int] = _ONE
) -> dict[Role, Bundle]:
    """The Ray resources for a worker of each role, which takes so many device ``slots``. LaunchError if the workers
    would not fit onto the nodes even if those were empty, unless `ClusterConfig.autoscale` allows them to wait."""
    roles = roles_of(config)
    check_gpus(config, device)
    if device == "cuda" and max(slots.values()) > 1:
        raise LaunchError("engine.tensor_parallel: pdserve's engine is tensor-parallel on CPUs alone so far")
    kind, size = ("GPU", 1.0) if device == "cuda" else ("CPU", float(config.cores_per_worker))
    whole = _bundles(config, kind, size, slots)
    idle = [replace(node, available=node.resources) for node in nodes]
    may_wait = config.autoscale and config.placement != "strict_spread"  # unknown for nodes to come
    if may_wait or _all_fit(config, roles, whole, idle):
        return whole
    if config.oversubscribe and not config.worker_resources:
        for parts in range(2, len(roles) * max(1, ceil(size * max(slots.values()))) + 1):
            share = int(size / parts * 10_000) / 10_000
            if _all_fit(config, roles, shared := _bundles(config, kind, share, slots), idle):
                return shared
    raise LaunchError(_why_not(config, device, whole, nodes, slots))


def check_gpus(config: ClusterConfig, device: str) -> None:
    """LaunchError if workers on GPUs would ask Ray for none. Ray then shows every worker all GPUs of its node, and all
    workers of a node would use the first one."""
    if device != "cuda" or not config.worker_resources:
        return
    for role, count in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        bundle = _bundles(config, "GPU", 1.0)[role]
        if count and bundle.get("GPU", 0.0) <= 0.0:
            raise LaunchError(
                f"cluster.worker_resources: {in_words(bundle)} has no GPU, so Ray would not give a {role} worker one "
                "of its own, and all workers of a node would use its first GPU; add GPU: 1 (or a share), or use "
                "cluster.device: cpu"
            )


def shared_bundles(config: ClusterConfig, device: str) -> dict[Role, Bundle]:
    """The Ray resources for a worker that is added later and shares a slot: a minimal amount of memory, because the
    slots are taken. Empty where sharing is impossible: a GPU's memory is divided when the service starts, and custom
    resources are taken literally."""
    if device == "cuda" or config.worker_resources or config.placement == "strict_spread":
        return {}
    return _bundles(config, "memory", float(SHARED_MEMORY_BYTES))


def in_words(resources: Bundle) -> str:
    """Resources for a message, without those that every node has."""
    shown = {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "memory", "object_store_memory"))
    }
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in shown.items()) + "}"


def _bundles(config: ClusterConfig, kind: str, amount: float, slots: Mapping[Role, int] = _ONE) -> dict[Role, Bundle]:
    more = {Role.PREFILL: config.prefill_resources, Role.DECODE: config.decode_resources}
    return {role: {**(config.worker_resources or {kind: amount * slots[role]}), **more[role]} for role in Role}


def _all_fit(config: ClusterConfig, roles: Sequence[Role], bundles: dict[Role, Bundle], nodes: Sequence[Node]) -> bool:
    return None not in plan(roles, bundles, nodes, config.placement)


def _why_not(
    config: ClusterConfig, device: str, bundles: dict[Role, Bundle], nodes: Sequence[Node], taken: Mapping[Role, int]
) -> str:
    workers, slots = config.prefill + config.decode, count_slots(config, device, nodes)
    wanted_slots = config.prefill * taken[Role.PREFILL] + config.decode * taken[Role.DECODE]
    if not config.worker_resources and wanted_slots > slots and not config.oversubscribe:
        unit = "GPUs" if device == "cuda" else f"slots of {config.cores_per_worker} core(s)"
        what = f"{workers} workers" if workers == wanted_slots else f"{workers} workers on {wanted_slots} devices"
        return (
            f"cluster.prefill + cluster.decode: {what}, but the cluster has {slots} {unit}; "
            "ask for fewer, add nodes, share slots with --oversubscribe, or have Ray add nodes with cluster.autoscale"
        )
    if config.placement == "strict_spread" and workers > len(nodes):
        return (
            f"cluster.placement: strict_spread wants a node for each of {workers} workers, and there are {len(nodes)}; "
            "ask for fewer, or use spread"
        )
    wanted = " and ".join(
        f"{count} x {in_words(bundles[role])} for {role}"
        for role, count in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
        if count
    )
    have = "; ".join(f"{node.ip} has {in_words(node.resources)}" for node in nodes)
    return f"the workers do not fit onto the cluster (cluster.placement: {config.placement}): {wanted}; {have}"
