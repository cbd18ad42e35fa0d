"""Device slots, as arithmetic: how many there are, what a worker asks Ray for, and whether the demand fits.

A slot is one GPU, or on CPUs ``cores_per_worker`` cores. More workers than slots is an error that says so, unless the
user asked for oversubscription: then the slots are shared, and Ray is asked for fractions of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.config import ClusterConfig
from core.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Node:
    """A host of the Ray cluster and its logical resources."""

    node_id: str
    ip: str
    num_cpus: float
    num_gpus: float


def resolve_device(config: ClusterConfig, nodes: Sequence[Node]) -> str:
    """``cpu`` or ``cuda``: what was asked for, or (auto) cuda where Ray sees GPUs. LaunchError if cuda has none."""
    num_gpus = sum(node.num_gpus for node in nodes)
    if config.device == "auto":
        return "cuda" if num_gpus >= 1 else "cpu"
    if config.device == "cuda" and num_gpus < 1 and not config.worker_resources:
        raise LaunchError(
            "cluster.device: cuda was asked for, but Ray sees no GPU; use --device cpu, or check the node"
        )
    return config.device


def count_slots(config: ClusterConfig, device: str, nodes: Sequence[Node]) -> int:
    """Device slots of all nodes."""
    if device == "cuda":
        return sum(int(node.num_gpus) for node in nodes)
    return sum(int(node.num_cpus // config.cores_per_worker) for node in nodes)


def worker_bundle(config: ClusterConfig, device: str, nodes: Sequence[Node]) -> dict[str, float]:
    """What each worker's placement bundle asks for. LaunchError if the workers do not fit."""
    workers = config.prefill + config.decode
    if workers == 0:
        raise LaunchError("cluster.prefill and cluster.decode are both 0; start at least one worker")
    if config.worker_resources:
        return dict(config.worker_resources)
    slots = count_slots(config, device, nodes)
    kind, size = ("GPU", 1.0) if device == "cuda" else ("CPU", float(config.cores_per_worker))
    if workers <= slots:
        return {kind: size}
    unit = "GPUs" if device == "cuda" else f"slots of {config.cores_per_worker} core(s)"
    if not config.oversubscribe:
        raise LaunchError(
            f"cluster.prefill + cluster.decode: {workers} workers, but the cluster has {slots} {unit}; "
            "ask for fewer, add nodes, or share slots with --oversubscribe"
        )
    per_node = [node.num_gpus if device == "cuda" else node.num_cpus for node in nodes]
    return {kind: _largest_share(per_node, workers, size)}


def _largest_share(capacities: Sequence[float], workers: int, size: float) -> float:
    """The largest fraction of a slot such that all workers fit onto the nodes (Ray counts in 1/10000)."""
    share = size
    for parts in range(2, 10_001):
        if sum(int(capacity / share + 1e-9) for capacity in capacities) >= workers:
            return share
        share = int(size / parts * 10_000) / 10_000
    raise LaunchError(f"{workers} workers do not fit onto the cluster even when they share slots")
