"""`pdserve doctor --address` on a running Ray: before a service, beside one, and with the wrong token."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Cli
from tests.local_cluster import ROOT, free_port, free_ports
from tests.ray_nodes import ray_head

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def at_home(tmp_path: Path) -> Cli:
    return home_of(tmp_path / "home", tmp_path)


def home_of(home: Path, state: Path) -> Cli:
    """A user whose token is made of the first letter of the folder's name."""
    token = home / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.touch(0o600)
    token.write_text(home.name[0] * 64)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return Cli({**environment, "HOME": str(home), "XDG_STATE_HOME": str(state)})


def told(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one line of JSON, which agrees with the exit status."""
    assert run.stdout.count("\n") == 1, run.stdout + run.stderr
    report: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == (0 if report["ok"] else 1), run.stderr
    return report


def failed(report: dict[str, Any]) -> list[str]:
    return sorted({each["check"] for each in report["findings"] if each["level"] == "fail"})


@pytest.mark.ray
@pytest.mark.cluster
def test_a_joined_ray(at_home: Cli, tmp_path: Path) -> None:
    home = Path(at_home.env["HOME"])
    port = str(free_port())
    with ray_head(home, "--num-cpus=2", "--num-gpus=2") as head:
        config = tmp_path / "pdserve.yaml"
        config.write_text(f"cluster: {{port_base: {free_ports(12)}}}\n")
        where = ("-c", str(config), "--address", head.address, "--port", port)
        deadline_s = time.monotonic() + 180
        while "join" in failed(report := told(at_home.run("doctor", *where, "--device", "cpu", "--json"))):
            assert time.monotonic() < deadline_s, report["findings"]  # the head is still coming up
        assert report["ok"], report["findings"]
        (node,), (pair,) = report["nodes"], report["pairs"]
        assert node["workers"] == ["prefill-0", "decode-0"]
        assert pair["transport"] == "shm"
        assert pair["gbs"] > 0.01

        gpus = told(at_home.run("doctor", *where, "--json"))  # Ray hands out two: auto takes them
        if not gpus["nodes"][0]["devices"]:
            assert failed(gpus) == ["device"]

        stranger = home_of(tmp_path / "stranger", tmp_path)
        started_s = time.monotonic()
        refused = told(stranger.run("doctor", *where, "--json"))
        assert failed(refused) == ["join"]
        assert "auth_token" in refused["findings"][0]["remedy"]
        assert time.monotonic() - started_s < 180

        up = at_home.run("up", *where, "--device", "cpu", "--detach")
        assert up.returncode == 0, up.stderr
        assert "asks for no token" not in up.stderr
        try:
            beside = told(at_home.run("doctor", *where, "--device", "cpu", "--json"))
            assert beside["ok"], beside["findings"]
            assert beside["services"] == [int(port)]
            checks = {each["check"] for each in beside["findings"]}
            # Other services may run on this host, too, and its CPU may have to emulate bfloat16.
            assert checks - {"cores", "dtype"} == {"port", "memory"}
            assert beside["pairs"][0]["gbs"] > 0.01
        finally:
            assert at_home.run("down", "--target", f"localhost:{port}").returncode == 0


def test_no_ray_at_all(at_home: Cli) -> None:
    run = at_home.run("doctor", "--address", f"127.0.0.1:{free_port()}", "--json")
    report = told(run)
    assert failed(report) == ["join"]
    assert "refused" in report["findings"][0]["what"]
