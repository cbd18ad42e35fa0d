"""Arithmetic of device slots."""

from __future__ import annotations

import pytest

from ops.launch.plan import Bundle, Node, count_slots, plan, resolve_device, shared_bundles, worker_bundles
from pdserve.core.config import ClusterConfig
from pdserve.core.errors import LaunchError
from pdserve.core.worker import Role

TWO_CORES = [Node("a", "10.0.0.1", {"CPU": 2.0})]
GPU_HOST = {"CPU": 16.0, "GPU": 2.0}
TWO_GPU_HOSTS = [Node("a", "10.0.0.1", GPU_HOST), Node("b", "10.0.0.2", GPU_HOST)]


def worker_bundle(config: ClusterConfig, device: str, nodes: list[Node]) -> Bundle:
    bundles = worker_bundles(config, device, nodes)
    assert bundles[Role.PREFILL] == bundles[Role.DECODE]
    return bundles[Role.PREFILL]


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
    config = ClusterConfig(prefill=1, decode=1, worker_resources={"kv_host": 1.0})
    hosts = [Node("a", "10.0.0.1", {"CPU": 1.0, "kv_host": 2.0})]
    assert worker_bundle(config, "cpu", hosts) == {"kv_host": 1.0}
    with pytest.raises(LaunchError, match=r"1 x \{kv_host: 1\} for prefill .* 10\.0\.0\.1 has \{CPU: 2\}"):
        worker_bundles(config, "cpu", TWO_CORES)


def test_workers_on_gpus_ask_for_them() -> None:
    """Without, Ray shows each worker all GPUs, and all would use the first one."""
    config = ClusterConfig(prefill=1, decode=1, device="cuda", worker_resources={"kv_host": 1.0})
    hosts = [Node("a", "10.0.0.1", {"CPU": 4.0, "GPU": 2.0, "kv_host": 2.0})]
    with pytest.raises(LaunchError, match=r"cluster\.worker_resources: \{kv_host: 1\} has no GPU"):
        worker_bundles(config, "cuda", hosts)
    with pytest.raises(LaunchError, match="give a decode worker one"):
        worker_bundles(config.model_copy(update={"prefill_resources": {"GPU": 1.0}}), "cuda", hosts)
    both = {"prefill_resources": {"GPU": 1.0}, "decode_resources": {"GPU": 0.5}}
    assert worker_bundles(config.model_copy(update=both), "cuda", hosts)[Role.DECODE]["GPU"] == 0.5
    assert worker_bundle(ClusterConfig(worker_resources={"GPU": 1.0}), "cuda", hosts) == {"GPU": 1.0}


def test_roles_ask_for_nodes_of_their_own() -> None:
    config = ClusterConfig(prefill=1, decode=1, prefill_resources={"prefill": 1.0}, decode_resources={"decode": 1.0})
    hosts = [Node("a", "10.0.0.1", {"CPU": 1.0, "prefill": 1.0}), Node("b", "10.0.0.2", {"CPU": 1.0, "decode": 1.0})]
    assert worker_bundles(config, "cpu", hosts) == {
        Role.PREFILL: {"CPU": 1.0, "prefill": 1.0},
        Role.DECODE: {"CPU": 1.0, "decode": 1.0},
    }
    with pytest.raises(LaunchError, match="do not fit"):
        worker_bundles(config, "cpu", [*hosts[:1], *hosts[:1]])


def test_what_does_not_fit_now_may_be_asked_for() -> None:
    config = ClusterConfig(prefill=3, decode=2, autoscale=True)
    assert worker_bundle(config, "cpu", TWO_CORES) == {"CPU": 1.0}
    assert resolve_device(ClusterConfig(device="cuda", autoscale=True), TWO_CORES) == "cuda"


def test_strict_spread_wants_as_many_nodes() -> None:
    config = ClusterConfig(prefill=2, decode=1, placement="strict_spread")
    with pytest.raises(LaunchError, match=r"cluster\.placement: strict_spread wants a node for each of 3 .* are 2"):
        worker_bundles(config, "cuda", TWO_GPU_HOSTS)


def test_wide_slots_are_shared_as_well() -> None:
    config = ClusterConfig(cores_per_worker=4, oversubscribe=True)
    assert worker_bundle(config, "cpu", TWO_CORES) == {"CPU": 1.0}


def test_added_workers_may_share_a_cpu_slot_but_no_gpu() -> None:
    config = ClusterConfig(decode_resources={"decode": 1.0})
    shared = shared_bundles(config, "cpu")
    assert set(shared[Role.PREFILL]) == {"memory"}
    assert set(shared[Role.DECODE]) == {"memory", "decode"}
    taken = Node("a", "10.0.0.1", {"CPU": 2.0, "memory": 1e9}, {"CPU": 0.0, "memory": 1e9})
    assert plan([Role.PREFILL], worker_bundles(ClusterConfig(), "cpu", [taken]), [taken], "pack") == [None]
    assert plan([Role.PREFILL], shared, [taken], "pack") == [taken]
    assert shared_bundles(config, "cuda") == {}
    assert shared_bundles(ClusterConfig(worker_resources={"kv_host": 1.0}), "cpu") == {}
    assert shared_bundles(ClusterConfig(placement="strict_spread"), "cpu") == {}
