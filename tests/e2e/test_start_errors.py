"""What keeps a service from starting is told in one line, with the key or file, and leaves nothing running."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.conftest import Cli
from tests.local_cluster import free_port

pytestmark = pytest.mark.timeout(180)


def check(cli: Cli, expected: str, *arguments: str) -> None:
    port = free_port()
    started_by = {"PDSERVE_TEST_START": str(port)}  # every process of the start inherits it, and nothing else has it
    answer = Cli({**cli.env, **started_by}).run("up", "--port", str(port), "--detach", *arguments)
    assert answer.returncode != 0
    assert expected in answer.stderr
    assert "Traceback" not in answer.stderr
    left = [
        p
        for p in psutil.process_iter(["environ", "cmdline"])
        if started_by.items() <= (p.info["environ"] or {}).items()
    ]
    assert not left, [p.info["cmdline"] for p in left]


@pytest.mark.ray
def test_more_workers_than_slots(cli: Cli) -> None:
    check(cli, "--oversubscribe", "--prefill", "40", "--decode", "40")


@pytest.mark.cluster
def test_no_ray_at_the_address(cli: Cli) -> None:
    address = f"127.0.0.1:{free_port()}"
    check(cli, f"cluster.address: cannot join Ray at '{address}': ", "--address", address)
