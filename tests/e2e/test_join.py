"""`pdserve up --address` on a Ray that is there already: its nodes are used, workers join and leave and a node dies
without a client noticing, and the Ray is left as it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.client.status import ServiceStatus
from tests.e2e.conftest import WAIT_S, Cli, alive, states, wait_for
from tests.e2e.test_scale_roles import PROMPTS
from tests.load import Load
from tests.local_cluster import free_port, free_ports, leaked_blocks
from tests.ray_nodes import RayNode, ray_head, ray_node

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def at_home(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli({**cli.env, "HOME": str(tmp_path_factory.mktemp("home"))})


@pytest.fixture(scope="module")
def head(at_home: Cli) -> Iterator[RayNode]:
    with ray_head(Path(at_home.env["HOME"])) as head:
        yield head


def pending_demand(head: RayNode, home: str) -> str:
    """What `ray status` lists as pending, once it lists anything: the autoscaler looks every few seconds."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", f"--address={head.address}"]
    environment = {"HOME": home, "PATH": "/usr/bin:/bin"}
    deadline_s = time.monotonic() + WAIT_S
    while True:
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
        _, _, pending = shown.stdout.partition("Pending Demands:")
        if "placement group" in pending or time.monotonic() > deadline_s:
            return pending or shown.stdout + shown.stderr
        time.sleep(1.0)


def pids(status: ServiceStatus) -> set[int]:
    return {worker.pid for worker in status.workers}


def test_workers_come_and_go_and_a_node_dies(at_home: Cli, head: RayNode, tmp_path: Path) -> None:
    home, port, base = Path(at_home.env["HOME"]), free_port(), free_ports(12)
    target = f"127.0.0.1:{port}"
    config = tmp_path / "pdserve.yaml"
    config.write_text(
        f"cluster: {{port_base: {base}, device: cpu}}\nmodel: {{dtype: float32}}\nrouter: {{forget_s: 2}}\n"
        "engine: {block_size: 16, num_blocks: 128}\n"
    )
    with ray_node(home, head.address) as other:
        arguments = ("-c", str(config), "--address", head.address, "--port", str(port), "--nodes", "2")
        at_home.up_when_joined(*arguments, "--prefill", "1", "--decode", "2")
        operator = at_home.noted(port).operator
        with Load(target, PROMPTS, max_tokens=24) as load:
            status = wait_for(operator, "all ready", lambda status: set(states(status).values()) == {"ready"})
            ports = {int(worker.address.rpartition(":")[2]) for worker in status.workers}
            assert ports == {base + 1, base + 5, base + 9}

            # Everything is taken: one more waits, and Ray knows.
            more = at_home.done("scale", "--prefill", "2", "--target", target).stderr
            assert "scaled: 2P2D" in more
            assert "waiting for a node: prefill-1" in more
            assert "prefill-1: starting" not in more
            assert states(wait_for(target, "awaited", lambda s: "prefill-1" in states(s)))["prefill-1"] == "awaited"
            assert "{'CPU': 1.0} * 1" in pending_demand(head, str(home))

            # A worker leaves, finishing what it has; its slot is the other's.
            at_home.done("scale", "--decode", "1", "--target", target)
            ready = {"prefill-0": "ready", "prefill-1": "ready", "decode-0": "ready"}
            before = pids(wait_for(operator, "2P1D", lambda status: states(status) == ready))
            refused = at_home.run("scale", "--decode", "0", "--target", target)
            assert refused.returncode == 1
            assert "a service keeps its initial roles" in refused.stderr

            # The other node dies, with whatever it has; Ray puts it elsewhere once there is room.
            with ray_node(home, head.address):
                time.sleep(2.0)  # for the node to be there
                other.kill()
                wait_for(operator, "replaced", lambda s: states(s) == ready and len(pids(s) - before) == 1)
                load.stop()
                load.check()
                wait_for(target, "blocks back", lambda status: not leaked_blocks(status))
                at_home.done("down", "--target", target)


def test_joins_and_leaves(at_home: Cli, head: RayNode, tmp_path: Path) -> None:
    """Last in this file: the Ray ends."""
    port, config = free_port(), tmp_path / "pdserve.yaml"
    config.write_text(f"cluster: {{port_base: {free_ports(12)}}}\n")
    up_here = ("-c", str(config), "--address", head.address, "--port", str(port))
    said = at_home.up_when_joined(*up_here)
    assert re.search(rf"^note: Ray at \S+:{head.address.rpartition(':')[2]} asks for no token: ", said, re.MULTILINE)
    assert said.count("note: Ray runs workers at niceness 15, and `pdserve up` has 0: ") == 1
    answer = at_home.run("generate", "import os", "--target", f"localhost:{port}", "--max-tokens", "3", "--json")
    result = json.loads(answer.stdout)
    assert result["kv_bytes"] == result["kv_bytes_expected"] > 0

    # Another one finds no room, and says what it waits for.
    config = tmp_path / "other.yaml"
    config.write_text(f"cluster: {{port_base: {free_ports(12)}, start_timeout_s: 4}}\n")
    other = at_home.run("up", "-c", str(config), "--address", head.address, "--port", str(free_port()), "--detach")
    assert other.returncode == 1
    assert "could not place prefill-0, decode-0 within 4 s: no node has {CPU: 1} for" in other.stderr, other.stderr
    waited = max(at_home.notes.glob("up-*.log"), key=os.path.getmtime)
    assert "waiting for room: {CPU: 1} for prefill-0, decode-0; now free: " in waited.read_text()

    # Its supervisor is killed. Nothing tells which of Ray's processes are the service's but what was noted of them.
    state = at_home.noted(port)
    noted = [psutil.Process(pid) for pid, _ in state.processes]
    assert len(noted) == 5, "the gateway, two workers, two engines"
    psutil.Process(state.pid).kill()
    gone = at_home.run("down", "--target", f"localhost:{port}")
    assert "has already ended" in gone.stderr
    assert not alive(noted)
    at_home.done("up", *up_here, "--detach")  # all resources are free again

    # And when Ray goes, as with `ray down`, nothing of the service stays behind.
    state = at_home.noted(port)
    supervisor = state.process()
    assert supervisor is not None
    head.kill()
    supervisor.wait(180)
    assert not Path(state.socket).parent.exists()
    gone = at_home.run("down", "--target", f"localhost:{port}")
    assert gone.returncode == 1
    assert "no service was started on this host" in gone.stderr
