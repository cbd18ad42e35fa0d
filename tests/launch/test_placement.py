"""Placement on Ray's logical GPUs: each worker its own bundle, each bundle its own device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.config import ClusterConfig
from core.errors import LaunchError
from pdserve.launch.placement import place_workers
from pdserve.launch.ray_session import RaySession
from pdserve.launch.service import end_children

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    session = RaySession("local")
    session.start(num_cpus=2, num_gpus=2)
    yield session
    session.stop()
    end_children()


def visible_devices() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def test_two_bundles_two_devices(session: RaySession) -> None:
    placement = place_workers(ClusterConfig(prefill=1, decode=1, device="auto"), session.nodes())
    try:
        assert placement.device == "cuda"
        assert [(p.worker_id, p.slot) for p in placement.places] == [("prefill-0", 0), ("decode-0", 1)]
        seen = ray.get(
            [
                ray.remote(visible_devices)
                .options(
                    num_cpus=0,
                    num_gpus=1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, place.bundle_index),
                )
                .remote()
                for place in placement.places
            ]
        )
        assert sorted(seen) == ["0", "1"]
    finally:
        placement.remove()


def test_a_demand_that_never_fits_ends_in_time(session: RaySession) -> None:
    config = ClusterConfig(worker_resources={"unobtainium": 1.0}, start_timeout_s=2.0)
    with pytest.raises(LaunchError, match="unobtainium"):
        place_workers(config, session.nodes())
