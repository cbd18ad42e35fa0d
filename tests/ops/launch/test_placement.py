"""Placement on logical GPUs: a slot for each worker, a device for each slot; what does not fit is a demand."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ops.launch.members import node_of, reserve_slot, wait_placed
from ops.launch.ray_session import RaySession
from pdserve.core.errors import LaunchError
from tests.ray_nodes import ray_head

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaySession]:
    with ray_head(tmp_path_factory.mktemp("home"), "--num-cpus=2", "--num-gpus=2") as head:
        session = RaySession(head.address)
        deadline_s = time.monotonic() + 180
        while True:
            try:
                session.start()
                break
            except LaunchError:  # the head has no node yet
                assert time.monotonic() < deadline_s
        yield session
        session.stop()


@pytest.fixture
def groups() -> Iterator[list[PlacementGroup]]:
    made: list[PlacementGroup] = []
    yield made
    for group in made:
        remove_placement_group(group)


def visible_devices() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def test_two_slots_two_devices(session: RaySession, groups: list[PlacementGroup]) -> None:
    (node,) = session.nodes()
    assert (node.num_cpus, node.num_gpus) == (2.0, 2.0)
    groups += [reserve_slot({"GPU": 1.0}, node, "pack", ()) for _ in range(2)]
    assert wait_placed(groups, 120.0) == []
    assert [node_of(group) for group in groups] == [node.node_id] * 2
    seen = ray.get(
        [
            ray.remote(visible_devices)
            .options(num_cpus=0, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0))
            .remote()
            for group in groups
        ]
    )
    assert sorted(seen) == ["0", "1"]
    assert "GPU" not in session.nodes()[0].available


def test_what_does_not_fit_waits_and_can_be_given_up(session: RaySession, groups: list[PlacementGroup]) -> None:
    groups.append(reserve_slot({"unobtainium": 1.0}, None, "pack", ()))
    assert wait_placed(groups, 0.5) == groups
    assert node_of(groups[0]) == ""


def test_strict_spread_stays_off_taken_nodes(session: RaySession, groups: list[PlacementGroup]) -> None:
    (node,) = session.nodes()
    groups += [
        reserve_slot({"CPU": 1.0}, None, "strict_spread", [node.node_id]),
        reserve_slot({"CPU": 1.0}, node, "strict_spread", [node.node_id]),
    ]
    assert wait_placed(groups, 2.0) == groups[:1]
