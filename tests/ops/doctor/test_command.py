"""`pdserve doctor` as a user types it, for a service on a Ray of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.local_cluster import ROOT


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli({**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "COLUMNS": "120"})


def test_this_host(cli: Cli) -> None:
    run = cli.run("doctor", "--oversubscribe", "--port", "0")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "prefill-0 → decode-0" in run.stdout
    assert "shm" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("fit: 1 node, 1 pair examined; 0 would fail")


def test_cuda_without_a_gpu(cli: Cli) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this host has a GPU")
    run = cli.run("doctor", "--device", "cuda", "--port", "0", "--json")
    assert run.returncode == 1
    (finding,) = json.loads(run.stdout)["findings"]
    assert (finding["check"], finding["level"]) == ("device", "fail")
    assert "--device cpu" in finding["remedy"]


def test_bad_options_fail_as_with_up(cli: Cli) -> None:
    run = cli.run("doctor", "--placement", "nowhere")
    assert run.returncode == 2
    assert "cluster.placement" in run.stderr
