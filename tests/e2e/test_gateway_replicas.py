"""`pdserve up` with two gateways: the commands know both, workers are added and removed at both, and one that is killed
comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from pdserve import Client
from tests.e2e.conftest import Cli, wait_for
from tests.local_cluster import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(400)]
CONFIG = "gateway: {replicas: 2}\nengine: {num_blocks: 64}\nmodel: {path: tiny, dtype: float32}\n"


@dataclass(frozen=True)
class Replicas:
    """The service, and its gateways' targets."""

    cli: Cli
    targets: list[str]

    def gateways(self, target: str) -> list[dict[str, Any]]:
        """What `pdserve status` tells of them."""
        found = json.loads(self.cli.done("status", "--target", target, "--json").stdout)["gateways"]
        assert [(each["target"], each["state"]) for each in found] == [(each, "ready") for each in self.targets]
        return list(found)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("state")
    cli, port, config = Cli.of(folder), free_ports(2), folder / "pdserve.yaml"
    config.write_text(CONFIG)
    targets = [f"127.0.0.1:{port + number}" for number in range(2)]
    try:
        up = cli.done("up", "-c", str(config), "--oversubscribe", "--port", str(port), "--detach")
        assert ",".join(targets) in up.stderr
        yield Replicas(cli, targets)
        cli.done("down", "--target", targets[1])
        for target in targets:
            with Client(target) as gone:
                assert not gone.ready(1.0)
    finally:
        cli.run("down", "--target", targets[0], "--now")


def test_commands_know_both(replicas: Replicas) -> None:
    cli, targets = replicas.cli, replicas.targets
    for target in targets:
        replicas.gateways(target)
    assert f"{targets[1]}  ready" in cli.run("status", "--target", targets[0]).stdout
    assert ",".join(targets) in cli.run("list").stdout
    names = [log["name"] for log in json.loads(cli.run("logs", "--target", targets[1], "--json").stdout)["logs"]]
    assert {"gateway", "gateway-1"} <= set(names)


def test_both_know_a_worker_that_joins_and_neither_one_that_has_left(replicas: Replicas) -> None:
    for at, count in ((0, 2), (1, 1)):
        scale = ("scale", "--target", replicas.targets[at], "--prefill", str(count))
        replicas.cli.done(*scale, *(["--oversubscribe"] if count == 2 else []))
        for target in replicas.targets:
            with Client(target) as each:
                workers = [worker for worker in each.status().workers if worker.role == "prefill"]
            assert [worker.state for worker in workers] == ["ready"] * count


def test_one_that_is_killed_is_started_again_and_knows_all_workers(replicas: Replicas) -> None:
    with Client(replicas.targets) as client, Client(replicas.targets[1]) as second:
        expected = client.generate("Once", max_tokens=4).result().token_ids
        psutil.Process(replicas.gateways(replicas.targets[0])[1]["pid"]).kill()
        for _ in range(2):
            assert client.generate("Once", max_tokens=4).result().token_ids == expected
        second.wait_ready(90.0)
        wait_for(replicas.targets[1], "all workers", lambda status: len(status.workers) == 2)
        assert second.generate("Once", max_tokens=4).result().token_ids == expected
