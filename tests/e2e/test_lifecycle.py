"""Starting, losing and ending a service on a Ray of its own: nothing is left that is not noted, and nothing at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from ops.launch.leftovers import clear_leftovers, wait_ended
from ops.launch.state import ServiceState
from pdserve import Client
from pdserve.core.errors import NotReady
from tests.e2e.conftest import Cli, alive
from tests.local_cluster import free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
WAIT_S = 90.0
ORPHANS_S = 30.0
"""How long processes may live after their supervisor; some seconds on a machine that has nothing else to do."""


class Host:
    """What a user's services are on this host, in a state folder of its own. What still runs in the end is killed."""

    def __init__(self, folder: Path) -> None:
        self.cli = Cli.of(folder)
        self.port = free_port()
        self.target = f"127.0.0.1:{self.port}"
        self.config = folder / "pdserve.yaml"
        self.config.write_text("engine: {hang_timeout_s: 60, num_blocks: 64}\n")
        self._sessions: set[int] = set()

    def begin_up(self) -> subprocess.Popen[str]:
        """`pdserve up --detach` that is on its way."""
        return self.begin("up", "-c", str(self.config), "--port", str(self.port), "--detach")

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """A command that is on its way."""
        return subprocess.Popen(
            self.cli.command(*arguments),
            env=self.cli.env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def up(self) -> ServiceState:
        """The service once it is ready."""
        with self.begin_up() as up:
            _, told = up.communicate(timeout=WAIT_S)
        assert up.returncode == 0, told
        return self.state()

    def state(self) -> ServiceState:
        """What is noted of the service."""
        state = self.cli.noted(self.port)
        self._sessions.add(state.pid)  # a detached service is a session of its own, whatever becomes of its processes
        return state

    def noted(self) -> list[ServiceState]:
        """All services that are noted still."""
        return [ServiceState.load(path) for path in self.cli.notes.glob("*.json")]

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Return once it holds."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, what
            time.sleep(0.05)

    def starting(self) -> ServiceState | None:
        """What is noted of a service that has begun to start its Ray."""
        if not (self.cli.notes / f"{self.port}.json").exists():
            return None
        state = self.state()
        return state if state.phase == "starting" and Path(state.ray_folder, "ray", "session_latest").exists() else None

    def processes(self) -> list[psutil.Process]:
        """All that any service of this test has running."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) in self._sessions:
                    found.append(process)
        return alive(found)

    def check_gone(self, *states: ServiceState) -> None:
        """AssertionError if anything is left of these services."""
        assert not self.processes()
        for state in states:
            assert not Path(state.ray_folder).exists()
            assert not Path(state.socket).parent.exists()
        assert not self.noted()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    for process in host.processes():
        process.kill()
    for state in host.noted():
        clear_leftovers(state.ray_folder)
        shutil.rmtree(Path(state.socket).parent, ignore_errors=True)


@pytest.mark.cluster
def test_up_that_is_told_to_stop_leaves_nothing(host: Host) -> None:
    """Told by SIGTERM to the command while Ray comes up, and by `down` while workers are placed, which never ends."""
    host.config.write_text("cluster: {autoscale: true, prefill_resources: {nothing: 1}}\n")
    states = []
    for tell in ("SIGTERM", "down"):
        with host.begin_up() as up:
            host.until("noted before Ray is started", lambda: host.starting() is not None)
            states.append(state := host.state())
            if tell == "down":
                waiting = "waiting for room: {CPU: 1, nothing: 1} for prefill-0; now free: "
                host.until("it says what it waits for", lambda: waiting in Path(state.log).read_text())  # noqa: B023
                listed = json.loads(host.cli.run("list", "--json").stdout)["services"]
                assert [(each["port"], each["pid"], each["state"]) for each in listed] == [
                    (host.port, state.pid, "starting")
                ]
                host.cli.done("down", "--target", host.target)
                host.check_gone(*states)
            else:
                up.terminate()
            _, told = up.communicate(timeout=WAIT_S)
        assert up.returncode == (1 if tell == "down" else 143)
        assert ("error: the service was asked to stop while it was starting" in told) == (tell == "down")
        host.check_gone(*states)


@pytest.mark.cluster
def test_a_lost_raylet_a_killed_supervisor_and_an_end_that_waits(host: Host) -> None:
    first = host.up()
    assert len(host.processes()) > 8
    again = host.cli.run("up", "--port", str(host.port), "--detach")
    assert again.returncode == 1
    assert "cannot listen" in again.stderr or "uses port" in again.stderr

    # Without its raylet no worker would be started again. It is noticed, and all comes up anew, on the same port.
    raylet = next(process for process in host.processes() if process.name() == "raylet")
    raylet.kill()
    host.until("the loss is noticed", lambda: host.state().phase == "restarting")
    host.until("ready again", lambda: host.state().phase == "ready")
    second = host.state()
    assert (second.pid, second.port) == (first.pid, first.port)
    assert second.ray_folder != first.ray_folder
    assert not Path(first.ray_folder).exists()
    with Client(host.target) as client:
        assert len(client.generate([5] * 20, max_tokens=3, ignore_eos=True, timeout_s=60).result().token_ids) == 3
        assert {worker.state for worker in client.status().workers} == {"ready"}

    # The supervisor is killed, and all its processes end; the next `up` removes the files that it left.
    supervisor = psutil.Process(second.pid)
    family = supervisor.children(recursive=True)
    assert {"gcs_server", "raylet"} < {process.name() for process in family}
    supervisor.kill()
    assert not wait_ended(family, ORPHANS_S)
    assert Path(second.ray_folder).exists()
    listed = json.loads(host.cli.run("list", "--json").stdout)["services"]
    assert [service["state"] for service in listed] == ["killed"]
    third = host.up()
    assert not Path(second.ray_folder).exists()
    assert not Path(second.socket).parent.exists()
    assert not [process for process in host.processes() if os.getsid(process.pid) == second.pid]

    # `down` waits for what is in progress, and refuses what is new meanwhile.
    with Client(host.target) as client, ThreadPoolExecutor(1) as threads:
        with Client(third.operator) as operator:
            prefill = next(worker for worker in operator.status().workers if worker.worker_id == "prefill-0")
        os.kill(prefill.engine_pid, signal.SIGSTOP)
        try:
            stream = client.generate([5] * 20, max_tokens=50, ignore_eos=True, mode="pd", timeout_s=120)
            result = threads.submit(stream.result)  # a stream begins when its first token is asked for
            host.until("the request is in progress", lambda: client.status().running == 1)
            down = host.begin("down", "--target", host.target, "--drain", "60")
            host.until("it is about to end", lambda: host.state().phase == "stopping")
            host.until("the gateway drains", lambda: not client.status().ready)
            with pytest.raises(NotReady, match="is being stopped"):
                client.generate([5], max_tokens=1, timeout_s=20).result()
        finally:
            os.kill(prefill.engine_pid, signal.SIGCONT)
        assert len(result.result().token_ids) == 50
    _, told = down.communicate(timeout=WAIT_S)
    assert down.returncode == 0, told
    assert "waiting for requests in progress: 1" in told
    host.check_gone(second, third)
