"""`pdserve up --address` on a Ray that is there already: it is used, and left as it was."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import psutil
import pytest

from ops.launch.state import ServiceState
from tests.e2e.conftest import Cli
from tests.local_cluster import free_port, free_ports
from tests.ray_nodes import ray_head

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def runs(process: psutil.Process) -> bool:
    """Whether it does; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.cluster
def test_joins_and_leaves(cli: Cli, tmp_path: Path) -> None:
    at_home = Cli({**cli.env, "HOME": str(tmp_path)})
    port = free_port()
    config = tmp_path / "pdserve.yaml"
    config.write_text(f"cluster: {{port_base: {free_ports(12)}}}\n")
    up_here = ("up", "-c", str(config))
    with ray_head(tmp_path) as head:
        deadline_s = time.monotonic() + 180
        while (up := at_home.run(*up_here, "--address", head.address, "--port", str(port), "--detach")).returncode:
            assert "Ray" in up.stderr, up.stderr  # the head is still coming up, and says so in one way or another
            assert time.monotonic() < deadline_s, up.stderr
        assert re.search(
            rf"^note: Ray at \S+:{head.address.rpartition(':')[2]} asks for no token: ", up.stderr, re.MULTILINE
        )
        assert up.stderr.count("note: Ray runs workers at niceness 15, and `pdserve up` has 0: ") == 1
        answer = at_home.run("generate", "import os", "--target", f"localhost:{port}", "--max-tokens", "3", "--json")
        result = json.loads(answer.stdout)
        assert result["kv_bytes"] == result["kv_bytes_expected"] > 0

        # Another one finds no room, and says what it waits for.
        config = tmp_path / "other.yaml"
        config.write_text(f"cluster: {{port_base: {free_ports(12)}, start_timeout_s: 4}}\n")
        other = at_home.run("up", "-c", str(config), "--address", head.address, "--port", str(free_port()), "--detach")
        assert other.returncode == 1
        assert "could not place prefill-0, decode-0 within 4 s: no node has {CPU: 1} for" in other.stderr
        waited = max((Path(at_home.env["XDG_STATE_HOME"]) / "pdserve").glob("up-*.log"), key=os.path.getmtime)
        assert "waiting for room: {CPU: 1} for prefill-0, decode-0; now free: " in waited.read_text()

        # Its supervisor is killed. Nothing tells which of Ray's processes are the service's but what was noted of them.
        state = ServiceState.load(Path(at_home.env["XDG_STATE_HOME"]) / "pdserve" / f"{port}.json")
        noted = [psutil.Process(pid) for pid, _ in state.processes]
        assert len(noted) == 5, "the gateway, two workers, two engines"
        psutil.Process(state.pid).kill()
        gone = at_home.run("down", "--target", f"localhost:{port}")
        assert "has already ended" in gone.stderr
        assert not [process for process in noted if runs(process)]
        again = at_home.run(
            *up_here, "--address", head.address, "--port", str(port), "--detach"
        )  # all resources are free again
        assert again.returncode == 0, again.stderr
        assert at_home.run("down", "--target", f"localhost:{port}").returncode == 0
        again = at_home.run(*up_here, "--address", head.address, "--port", str(port), "--detach")
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
