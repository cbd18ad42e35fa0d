"""The MPS daemon of a node, started and ended by real processes over a strict stand-in for nvidia-cuda-mps-control."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ops.doctor.checks import check_mps
from ops.doctor.report import DoctorReport
from ops.launch.worker import make_worker
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError, LaunchError
from pdserve.core.worker import Role
from runtime.mps import (
    CONTROL,
    LOGS,
    MEMORY,
    PIPES,
    THREADS,
    TRANSFER_THREADS,
    VISIBLE,
    GpuModes,
    daemon_pid,
    engine_environment,
    memory_limit,
    mps_obstacle,
)
from tests.loopback import SECRET
from worker import mps
from worker.mps import join_mps
from worker.process import WorkerThread
from worker.spec import WorkerSpec

ROOT = Path(__file__).resolve().parents[2]
MEMBER = """
import json, os, sys
from pathlib import Path
from worker.mps import join_mps
settings = json.loads(os.environ.get("MEMBER_SETTINGS", "{}"))
membership = join_mps("auto", "cuda", folder=Path(sys.argv[1]), **settings)
print(json.dumps([membership.is_on, membership.why, {k: v for k, v in os.environ.items() if k.startswith("CUDA_")}]))
sys.stdout.flush()
if sys.stdin.readline() == "leave\\n":
    membership.close()
"""


class Node:
    """A node with the stand-in on PATH. ``notes`` are its commands."""

    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder, folder / "mps"
        binaries = folder / "bin"
        binaries.mkdir()
        control = binaries / CONTROL
        control.write_text(f"#!{sys.executable} -S\n{(ROOT / 'tests/worker/fake_mps_control.py').read_text()}")
        control.chmod(0o755)
        self._notes = folder / "notes"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CUDA_")},
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "FAKE_MPS_NOTES": str(self._notes),
            VISIBLE: "3",
        }
        self._members: list[subprocess.Popen[str]] = []

    @property
    def notes(self) -> list[str]:
        """What the stand-in was told."""
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    def member(self, **variables: str) -> tuple[subprocess.Popen[str], tuple[bool, str, dict[str, str]]]:
        """A worker's process, and what it found."""
        process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(self.folder)],
            env={**self.environment, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._members.append(process)
        assert process.stdout is not None
        is_on, why, found = json.loads(process.stdout.readline())
        return process, (is_on, why, found)

    def daemon(self) -> int:
        """The daemon's process id; 0 if it does not run."""
        return daemon_pid(self.folder / "pipe")

    def end_keeper(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """End the process that keeps it, and wait until its locks are free."""
        [found] = [
            each
            for each in psutil.process_iter(["cmdline"])
            if "worker.mps_keeper" in (each.info["cmdline"] or ()) and str(self.folder) in each.info["cmdline"]
        ]
        found.send_signal(signum)
        found.wait(30)

    def _processes(self) -> list[psutil.Process]:
        """Those whose command names the folder."""
        return [
            each
            for each in psutil.process_iter(["cmdline"])
            if any(str(self.root) in argument for argument in each.info["cmdline"] or ())
        ]

    def close(self) -> None:
        """End what is left, by id, and wait for keepers and daemons: they write into the folder until they end."""
        for process in self._members:
            process.kill()
            process.communicate()
        eventually(lambda: not self._processes(), timeout_s=60.0)
        assert not self.daemon()
        assert not [line for line in self.notes if line.startswith("misuse")]


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # short, because sockets are made below it
        each = Node(Path(folder))
        yield each
        each.close()


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for it."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def leave(process: subprocess.Popen[str]) -> None:
    """Have a member leave in order."""
    process.communicate("leave\n", timeout=30)


def test_workers_share_a_daemon_that_ends_with_the_last_one(node: Node) -> None:
    """Limits are set for each worker. The stand-in refuses them in the daemon's environment, where they would hold for
    all clients."""
    first, (is_on, why, found) = node.member()
    assert is_on
    assert why == f"the daemon in {node.folder}"
    assert found == {PIPES: f"{node.folder}/pipe", LOGS: f"{node.folder}/log", THREADS: "25", VISIBLE: "3"}
    settings = json.dumps({"transfer_threads": 40, "memory_mb": 4096})
    second, (_, _, found) = node.member(MEMBER_SETTINGS=settings)
    assert (found[THREADS], found[MEMORY]) == ("40", "0=4096M")
    third, (_, _, found) = node.member(MEMBER_SETTINGS=settings, **{THREADS: "60", MEMORY: "0=1G"})
    assert (found[THREADS], found[MEMORY]) == ("60", "0=1G"), "the user's own limits stay"
    assert stat.S_IMODE(node.folder.stat().st_mode) == 0o700
    leave(first)
    leave(second)
    time.sleep(0.2)
    assert node.daemon()
    leave(third)
    eventually(lambda: not node.daemon() and not node.folder.exists())
    assert node.notes == ["started", "get_server_list", "quit"]
    eventually(lambda: not list(node.folder.parent.glob("mps.*")))


def test_the_daemon_ends_when_workers_are_killed(node: Node) -> None:
    """Their supervisor, Ray or the kernel may have done it: nothing of theirs runs any more."""
    members = [node.member()[0] for _ in range(2)]
    assert node.daemon()
    for process in members:
        process.kill()
    eventually(lambda: not node.daemon() and not node.folder.exists())
    again, (is_on, _, _) = node.member()
    assert is_on
    assert node.daemon()
    leave(again)


def test_a_worker_that_comes_while_the_daemon_ends_gets_another_one(node: Node) -> None:
    for _ in range(2):
        leaving, _ = node.member()
        leaving.kill()
        coming, (is_on, why, _) = node.member()
        assert is_on, why
        assert node.daemon()
        leave(coming)


def test_the_keeper_may_be_killed(node: Node) -> None:
    """Its daemon goes on, is adopted by the next keeper, and ends with the last worker."""
    first, _ = node.member()
    daemon = node.daemon()
    node.end_keeper()
    second, (is_on, _, _) = node.member()
    assert is_on
    assert node.daemon() == daemon
    node.end_keeper()
    leave(first)
    leave(second)  # no keeper is left: the last one starts it again
    eventually(lambda: not node.daemon() and not node.folder.exists())
    assert node.notes.count("started") == 1


def test_the_keeper_ends_the_daemon_on_sigterm(node: Node) -> None:
    member, _ = node.member()
    node.end_keeper(signal.SIGTERM)
    eventually(lambda: not node.daemon())
    member.kill()


def test_a_daemon_that_does_not_quit_is_killed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    member, _ = node.member(FAKE_MPS_STUBBORN="1")
    daemon = node.daemon()
    member.kill()
    eventually(lambda: not psutil.pid_exists(daemon), timeout_s=60.0)


def test_what_keeps_a_daemon_from_starting_is_told(node: Node) -> None:
    _, (is_on, why, found) = node.member(FAKE_MPS_FAILS="1")
    assert not is_on
    assert "the daemon could not be started" in why
    assert "Insufficient privileges" in why
    assert PIPES not in found


def test_a_daemon_that_runs_already_is_used_and_left_alone(node: Node) -> None:
    theirs = node.folder.parent / "theirs"
    for each in (theirs, theirs / "pipe", theirs / "log"):
        each.mkdir(mode=0o700)
    variables = {**node.environment, PIPES: str(theirs / "pipe"), LOGS: str(theirs / "log")}
    control = str(node.folder.parent / "bin" / CONTROL)
    subprocess.run([control, "-d"], env={k: v for k, v in variables.items() if k != VISIBLE}, check=True)
    member, (is_on, why, found) = node.member(**{PIPES: str(theirs / "pipe")})
    assert is_on
    assert "which pdserve neither starts nor ends" in why
    assert THREADS not in found
    leave(member)
    assert daemon_pid(theirs / "pipe")
    subprocess.run([control], input="quit\n", text=True, env=variables, check=True)


def test_a_folder_of_others_is_not_used(node: Node) -> None:
    node.folder.mkdir(mode=0o700)
    node.folder.chmod(0o755)
    _, (is_on, why, _) = node.member()
    assert not is_on
    assert "must be a folder of this user alone" in why
    assert node.notes == []


@pytest.mark.parametrize(
    ("environment", "modes", "why"),
    [
        ({"PATH": "/nowhere"}, None, "nvidia-cuda-mps-control is not on PATH"),
        ({VISIBLE: "MIG-5"}, None, "MIG instances"),
        ({}, GpuModes((9, 0), "Default", True), "MIG instances"),
        ({}, GpuModes((6, 1), "Default", False), "compute capability 6.1, and MPS needs 7.0"),
        ({}, GpuModes((9, 0), "Default", False), None),
    ],
)
def test_obstacles(node: Node, environment: dict[str, str], modes: GpuModes | None, why: str | None) -> None:
    found = mps_obstacle({**node.environment, **environment}, modes)
    assert found is None if why is None else why in str(found)


def test_two_processes_do_not_fit_onto_an_exclusive_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "gpu_modes", lambda _: GpuModes((9, 0), "Exclusive_Process", False))
    with pytest.raises(LaunchError, match=r"cluster\.mps: the GPU's compute mode is Exclusive_Process"):
        join_mps("off", "cuda", {})
    assert not join_mps("auto", "cpu", {}).is_on


def test_a_worker_that_cannot_join_says_why() -> None:
    def refuse() -> None:
        raise LaunchError("cluster.mps: no")

    spec = WorkerSpec(
        worker_id="prefill-0",
        role=Role.PREFILL,
        host="127.0.0.1",
        node="",
        device="cuda",
        registry_addresses=("127.0.0.1:1",),
        version="test",
    )
    thread = WorkerThread(spec, make_worker, SECRET, prepare=refuse)
    with pytest.raises(LaunchError, match=r"cluster\.mps: no"):
        thread.wait_ready(10.0)
    thread.stop()


def test_the_limit_of_transfers_is_not_the_engines() -> None:
    limited = {PIPES: "/p", THREADS: "40", TRANSFER_THREADS: "40", MEMORY: "0=1G", "HOME": "/h"}
    assert engine_environment(limited) == {PIPES: "/p", MEMORY: "0=1G", "HOME": "/h"}
    assert engine_environment({PIPES: "/p", THREADS: "40"})[THREADS] == "40", "the user's own"


def test_the_limit_of_memory_is_read() -> None:
    assert memory_limit({}, 0) is None
    assert memory_limit({MEMORY: "0=4096M"}, 0) == 4 * 2**30
    assert memory_limit({MEMORY: "0=1G, 1=512MB"}, 1) == 512 * 2**20
    assert memory_limit({MEMORY: "1=512MB"}, 0) is None
    with pytest.raises(ConfigError, match="CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: '4G' is not of the form"):
        memory_limit({MEMORY: "4G"}, 0)


def test_the_setting() -> None:
    assert PdserveConfig().cluster.mps == "off"
    assert PdserveConfig.parse({"cluster": {"mps": "off"}}).cluster.mps == "off"
    assert PdserveConfig.parse({"cluster": {"mps": False}}).cluster.mps == "off"  # as YAML reads off
    assert list(check_mps(DoctorReport(PdserveConfig.parse({"cluster": {"mps": "auto"}}), "cuda"))) == []
