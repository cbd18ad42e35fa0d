"""Slot arithmetic: who fits where."""

from __future__ import annotations

import pytest

from core.config import ClusterConfig
from core.errors import LaunchError
from pdserve.launch.slots import Node, count_slots, resolve_device, worker_bundle

TWO_CORES = [Node("a", "10.0.0.1", 2.0, 0.0)]
TWO_GPU_HOSTS = [Node("a", "10.0.0.1", 16.0, 2.0), Node("b", "10.0.0.2", 16.0, 2.0)]


def test_auto_takes_gpus_where_there_are_any() -> None:
    assert resolve_device(ClusterConfig(), TWO_CORES) == "cpu"
    assert resolve_device(ClusterConfig(), TWO_GPU_HOSTS) == "cuda"
    assert resolve_device(ClusterConfig(device="cpu"), TWO_GPU_HOSTS) == "cpu"


def test_cuda_without_a_gpu_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"cluster\.device"):
        resolve_device(ClusterConfig(device="cuda"), TWO_CORES)


@pytest.mark.parametrize(("cores", "slots"), [(1, 2), (2, 1), (3, 0)])
def test_cores_make_slots(cores: int, slots: int) -> None:
    assert count_slots(ClusterConfig(cores_per_worker=cores), "cpu", TWO_CORES) == slots


def test_a_worker_asks_for_its_slot() -> None:
    assert worker_bundle(ClusterConfig(), "cpu", TWO_CORES) == {"CPU": 1.0}
    assert worker_bundle(ClusterConfig(prefill=2, decode=2), "cuda", TWO_GPU_HOSTS) == {"GPU": 1.0}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_workers_than_slots_says_so(device: str) -> None:
    nodes = TWO_CORES if device == "cpu" else TWO_GPU_HOSTS
    with pytest.raises(LaunchError, match="--oversubscribe"):
        worker_bundle(ClusterConfig(prefill=3, decode=2), device, nodes)


@pytest.mark.parametrize("workers", [3, 4, 5, 7, 16])
def test_oversubscribed_workers_share_and_fit(workers: int) -> None:
    config = ClusterConfig(prefill=workers - 1, decode=1, oversubscribe=True)
    for nodes, kind in ((TWO_CORES, "CPU"), (TWO_GPU_HOSTS, "GPU")):
        share = worker_bundle(config, "cuda" if kind == "GPU" else "cpu", nodes)[kind]
        capacities = [n.num_gpus if kind == "GPU" else n.num_cpus for n in nodes]
        assert 0 < share <= 1
        assert sum(int(capacity / share) for capacity in capacities) >= workers


def test_no_worker_at_all() -> None:
    with pytest.raises(LaunchError, match=r"both 0"):
        worker_bundle(ClusterConfig(prefill=0, decode=0), "cpu", TWO_CORES)


def test_resources_of_ones_own() -> None:
    config = ClusterConfig(prefill=5, decode=5, worker_resources={"kv_host": 1.0})
    assert worker_bundle(config, "cpu", TWO_CORES) == {"kv_host": 1.0}
