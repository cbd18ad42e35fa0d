"""`pdserve up --gateways 2`: the commands know both gateways, workers are added and removed at both, and one that is
killed comes back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve import Client
from tests.e2e.conftest import Cli
from tests.local_cluster import ROOT, free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
WAIT_S = 90.0


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli({**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "COLUMNS": "200"})


@pytest.fixture
def port(cli: Cli) -> Iterator[int]:
    port = free_ports(2)
    yield port
    cli.run("down", "--target", f"127.0.0.1:{port}", "--now")


@pytest.mark.cluster
def test_two_gateways_of_one_service(cli: Cli, port: int, tmp_path: Path) -> None:
    config = tmp_path / "pdserve.yaml"
    config.write_text("gateway: {host: 127.0.0.1, replicas: 2}\nengine: {num_blocks: 64}\n")
    up = cli.run("up", "-c", str(config), "--model", "tiny", "--oversubscribe", "--port", str(port), "--detach")
    assert up.returncode == 0, up.stderr
    targets = [f"127.0.0.1:{port + number}" for number in range(2)]
    assert ",".join(targets) in up.stderr

    def status(target: str) -> dict[str, Any]:
        answer = cli.run("status", "--target", target, "--json")
        assert answer.returncode == 0, answer.stderr
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    for target in targets:
        gateways = status(target)["gateways"]
        assert isinstance(gateways, list)
        assert [(each["target"], each["state"]) for each in gateways] == [(each, "ready") for each in targets]
    assert f"{targets[1]}  ready" in cli.run("status", "--target", targets[0]).stdout
    assert ",".join(targets) in cli.run("list").stdout
    names = [log["name"] for log in json.loads(cli.run("logs", "--target", targets[1], "--json").stdout)["logs"]]
    assert {"gateway", "gateway-1"} <= set(names)

    with Client(targets) as client:
        expected = [client.generate("Once", max_tokens=4).result().token_ids for _ in range(2)]
        assert expected[0] == expected[1]

        # Both know a worker that joins, and neither one that has left.
        scale = cli.run("scale", "--target", targets[0], "--prefill", "2", "--oversubscribe")
        assert scale.returncode == 0, scale.stderr
        for count in (2, 1):
            for target in targets:
                with Client(target) as each:
                    workers = [worker for worker in each.status().workers if worker.role == "prefill"]
                    assert [worker.state for worker in workers] == ["ready"] * count
            if count == 2:
                assert cli.run("scale", "--target", targets[1], "--prefill", "1").returncode == 0

        # One that is killed is started again, and knows all workers.
        psutil.Process(gateways[1]["pid"]).kill()
        assert client.generate("Once", max_tokens=4).result().token_ids == expected[0]
        assert client.generate("Once", max_tokens=4).result().token_ids == expected[0]
        deadline_s = time.monotonic() + WAIT_S
        with Client(targets[1]) as second:
            while not (second.ready(1.0) and len(second.status().workers) == 2):
                assert time.monotonic() < deadline_s
                time.sleep(0.2)
            assert second.generate("Once", max_tokens=4).result().token_ids == expected[0]
    down = cli.run("down", "--target", targets[1])
    assert down.returncode == 0, down.stderr
    for target in targets:
        with Client(target) as gone:
            assert not gone.ready(1.0)
