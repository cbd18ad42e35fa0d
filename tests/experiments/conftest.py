"""The command line, the scripted service that commands and benchmarks talk to, and a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.command_line import pdserve, service
from tests.local_cluster import LocalCluster, local_cluster

__all__ = ["pdserve", "service"]


@pytest.fixture(scope="session")
def tcp_service() -> Iterator[LocalCluster]:
    """A service of one pair over tcp, for all tests that leave it idle."""
    with local_cluster({"transfer": {"transport": "tcp", "overlap": "chunk", "layer_groups": 3}}) as cluster:
        yield cluster
