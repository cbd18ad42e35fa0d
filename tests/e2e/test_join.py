"""`pdserve up --address` on a Ray that is there already: it is used, and left as it was."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pdserve.launch.state import ServiceState
from tests.e2e.conftest import Cli
from tests.local_cluster import free_port
from tests.ray_nodes import ray_head

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_joins_and_leaves(cli: Cli, tmp_path: Path) -> None:
    at_home = Cli({**cli.env, "HOME": str(tmp_path)})
    port = free_port()
    with ray_head(tmp_path) as head:
        deadline_s = time.monotonic() + 180
        while (up := at_home.run("up", "--address", head.address, "--port", str(port), "--detach")).returncode:
            assert "Ray" in up.stderr, up.stderr  # the head is still coming up, and says so in one way or another
            assert time.monotonic() < deadline_s, up.stderr
        answer = at_home.run("generate", "import os", "--target", f"localhost:{port}", "--max-tokens", "3", "--json")
        result = json.loads(answer.stdout)
        assert result["kv_bytes"] == result["kv_bytes_expected"] > 0
        assert at_home.run("down", "--target", f"localhost:{port}").returncode == 0
        again = at_home.run(
            "up", "--address", head.address, "--port", str(port), "--detach"
        )  # all resources are free again
        assert again.returncode == 0, again.stderr
        # And when Ray goes, as with `ray down`, nothing of the service stays behind.
        state = ServiceState.load(Path(at_home.env["XDG_STATE_HOME"]) / "pdserve" / f"{port}.json")
        supervisor = state.process()
        assert supervisor is not None
        head.kill()
        supervisor.wait(180)
        assert not Path(state.socket).parent.exists()
        gone = at_home.run("down", "--target", f"localhost:{port}")
        assert gone.returncode == 1
        assert "no service was started on this host" in gone.stderr
