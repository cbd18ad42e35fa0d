"""Fixtures of the tests on several hosts (marker `cluster`). They build on each other, each for the whole session:

- `hosts`: a desk, a head and three workers, made of namespaces.
- `ray_cluster`: the same after `ray up` from the desk with the project's own cluster.yaml.
- `running_service`: the same after `pdserve up` on the head: 2 prefill and 2 decode workers of the tiny model.

A test asks for `service`: the running service, whole again whatever the test before did to hosts (but the head) and
network. A test that takes the cluster down is marked ``last``. `timings` takes what the summary is to show.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from pdserve import Client
from tests.cluster.hosts import Hosts, missing
from tests.cluster.ray_cluster import RayCluster

WORKERS = ("worker-1", "worker-2", "worker-3")
RAY_OPTIONS = {"head": "--num-cpus=0"} | dict.fromkeys(WORKERS, "--num-cpus=1")

_timings = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "last: takes the cluster down, after all others")
    config.stash[_timings] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, seconds in config.stash[_timings].items():
        terminalreporter.write_line(f"{what}: {seconds:.1f} s")


@pytest.fixture(scope="session")
def timings(pytestconfig: pytest.Config) -> dict[str, float]:
    """Seconds by what took them; the test run's summary shows them."""
    return pytestconfig.stash[_timings]


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where hosts cannot be made; fails if this is root in continuous integration."""
    if problem := missing():
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(problem)
        pytest.skip(problem)


@pytest.fixture(scope="session")
def hosts(namespaces: None) -> Iterator[Hosts]:
    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)  # so that what follows is undone then, too
    try:
        with Hosts(["desk", "head", *WORKERS], single_core=WORKERS) as made:
            yield made
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.fixture(scope="session")
def ray_cluster(hosts: Hosts, timings: dict[str, float]) -> RayCluster:
    cluster = RayCluster(hosts, RAY_OPTIONS)
    began_s = time.monotonic()
    cluster.up()
    timings["ray up"] = time.monotonic() - began_s
    cluster.wait_joined()
    timings["ray up to all hosts joined"] = time.monotonic() - began_s
    return cluster


@pytest.fixture(scope="session")
def running_service(ray_cluster: RayCluster, timings: dict[str, float]) -> RayCluster:
    began_s = time.monotonic()
    ray_cluster.up_service()
    timings["pdserve up"] = time.monotonic() - began_s
    with Client(ray_cluster.target) as client:
        next(iter(client.generate("def read_lines(path):", max_tokens=1)))
    timings["ray up to first token"] = timings["ray up to all hosts joined"] + time.monotonic() - began_s
    return ray_cluster


@pytest.fixture
def service(running_service: RayCluster) -> RayCluster:
    running_service.make_whole()
    return running_service
