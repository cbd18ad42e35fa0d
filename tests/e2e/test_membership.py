"""Workers join and leave a running service, and a node dies under it: nothing a client would notice."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve import Client
from pdserve.client.status import ServiceStatus
from tests.e2e.conftest import Cli, operator_of
from tests.local_cluster import free_port, free_ports, leaked_blocks
from tests.ray_nodes import RayNode, ray_head, ray_node

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
WAIT_S = 180.0
PROMPTS = ["def read_lines(path):", "import os\n\n", "class Queue:\n    def __init__(self", "for name in names:\n"]


class Load:
    """Clients that ask for the same prompts again and again, until `close`. All answers have to be the same."""

    def __init__(self, target: str, clients: int = 3) -> None:
        self.target = target
        self.failures: list[str] = []
        self.count = 0
        with Client(target) as client:
            self._expected = {prompt: client.generate(prompt, max_tokens=24).result().text for prompt in PROMPTS}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, index: int) -> None:
        with Client(self.target) as client:
            while not self._stop.is_set():
                prompt = PROMPTS[(self.count + index) % len(PROMPTS)]
                try:
                    text = client.generate(prompt, max_tokens=24, timeout_s=60).result().text
                except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
                    self.failures.append(repr(error))
                    continue
                if text != self._expected[prompt]:
                    self.failures.append(f"{prompt!r}: {text!r}")
                self.count += 1
                self._stop.wait(0.05)  # the machine has more to do than to answer

    def close(self) -> None:
        """End it."""
        self._stop.set()
        for thread in self._threads:
            thread.join(180)

    def check(self) -> None:
        """AssertionError if anything failed, or nothing was asked."""
        assert not self.failures, self.failures[:5]
        assert self.count > len(PROMPTS)


def wait_for(
    target: str, what: str, condition: Callable[[ServiceStatus], bool], timeout_s: float = 180
) -> ServiceStatus:
    """The status once ``condition`` holds; AssertionError with the last one if it does not."""
    deadline_s = time.monotonic() + WAIT_S
    with Client(target) as client:
        while not condition(status := client.status()):
            assert time.monotonic() < deadline_s, f"{what}: {[(w.worker_id, w.state) for w in status.workers]}"
            time.sleep(0.2)
    return status


def states(status: ServiceStatus) -> dict[str, str]:
    return {worker.worker_id: worker.state for worker in status.workers}


def pids(status: ServiceStatus) -> set[int]:
    return {worker.pid for worker in status.workers}


def pending_demand(head: RayNode, home: Path) -> str:
    """What `ray status` lists as pending, once it lists anything: the autoscaler looks every few seconds."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", f"--address={head.address}"]
    deadline_s = time.monotonic() + WAIT_S
    while True:
        environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
        _, _, pending = shown.stdout.partition("Pending Demands:")
        if "placement group" in pending or time.monotonic() > deadline_s:
            return pending or shown.stdout + shown.stderr
        time.sleep(1.0)


@pytest.mark.cluster
def test_workers_come_and_go_and_a_node_dies(cli: Cli, tmp_path: Path) -> None:
    at_home = Cli({**cli.env, "HOME": str(tmp_path)})
    port, base = free_port(), free_ports(12)
    target = f"127.0.0.1:{port}"
    config = tmp_path / "pdserve.yaml"
    config.write_text(
        f"cluster: {{port_base: {base}, device: cpu}}\nmodel: {{dtype: float32}}\nrouter: {{forget_s: 2}}\n"
        "engine: {block_size: 16, num_blocks: 128}\n"
    )
    with (
        ray_head(tmp_path) as head,
        ray_node(tmp_path, head.address) as other,
        contextlib.ExitStack() as stack,
    ):
        arguments = ("-c", str(config), "--address", head.address, "--port", str(port), "--nodes", "2")
        deadline_s = time.monotonic() + 180
        while (up := at_home.run("up", *arguments, "--prefill", "1", "--decode", "2", "--detach")).returncode:
            assert "Ray" in up.stderr, up.stderr  # the head is still coming up, and says so in one way or another
            assert time.monotonic() < deadline_s, up.stderr
        load = stack.enter_context(contextlib.closing(Load(target)))
        operator = operator_of(Path(cli.env["XDG_STATE_HOME"]) / "pdserve" / f"{port}.json")
        status = wait_for(operator, "all ready", lambda status: set(states(status).values()) == {"ready"})
        assert {int(worker.address.rpartition(":")[2]) for worker in status.workers} == {base + 1, base + 5, base + 9}

        # Everything is taken: one more waits, and Ray knows.
        more = at_home.run("scale", "--prefill", "2", "--target", target)
        assert more.returncode == 0, more.stderr
        assert "scaled: 2P2D" in more.stderr
        assert "prefill-1 wait for a node" in more.stderr
        assert "prefill-1: starting" not in more.stderr
        assert states(wait_for(target, "awaited", lambda s: "prefill-1" in states(s)))["prefill-1"] == "awaited"

        assert "{'CPU': 1.0} * 1" in pending_demand(head, tmp_path)

        # A worker leaves, finishing what it has; its slot is the other's.
        fewer = at_home.run("scale", "--decode", "1", "--target", target)
        assert fewer.returncode == 0, fewer.stderr
        all_ready = {"prefill-0": "ready", "prefill-1": "ready", "decode-0": "ready"}
        before = pids(wait_for(operator, "2P1D", lambda status: states(status) == all_ready))
        refused = at_home.run("scale", "--decode", "0", "--target", target)
        assert refused.returncode == 1
        assert "a service keeps its initial roles" in refused.stderr

        # The other node dies, with whomever it has; Ray puts it elsewhere once there is room.
        with ray_node(tmp_path, head.address):
            time.sleep(2.0)  # for the node to be there
            other.kill()
            wait_for(
                operator,
                "one replaced",
                lambda status: states(status) == all_ready and len(pids(status) - before) == 1,
            )
            load.close()
            load.check()
            assert leaked_blocks(wait_for(target, "blocks back", lambda status: leaked_blocks(status) == 0)) == 0
            assert at_home.run("down", "--target", target).returncode == 0
