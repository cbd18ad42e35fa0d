"""The remains of a service whose supervisor was killed are removed: its Ray's folder and processes, and nothing
else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from ops.launch.detach import stop_detached
from ops.launch.leftovers import RAY_FOLDER_PREFIX, RAY_FOLDERS, clear_leftovers, end_processes, wait_ended
from ops.launch.state import ServiceState, clear_dead_services
from pdserve.core.errors import LaunchError


def sleeper(*arguments: str, code: str = "import time; print(flush=True); time.sleep(60)") -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(5)


def gone_process() -> int:
    process = sleeper()
    end(process)
    return process.pid


def test_down_clears_what_a_killed_supervisor_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = Path(tempfile.mkdtemp(prefix=RAY_FOLDER_PREFIX, dir=RAY_FOLDERS))
    (folder / "session").mkdir()
    rays, other = sleeper(f"--session-dir={folder}/session"), sleeper(str(folder), f"--session-dir={folder}x")
    try:
        ServiceState(gone_process(), time.time(), 7, "", str(folder)).claim()
        with pytest.raises(LaunchError, match=rf"has already ended; .*: 1 process\(es\) and {folder}$"):
            stop_detached(7)
        assert not folder.exists()
        assert rays.poll() is not None
        assert other.poll() is None
        with pytest.raises(LaunchError, match="no service was started"):
            stop_detached(7)
    finally:
        end(rays)
        end(other)


def test_processes_that_write_to_the_folder_go_and_readers_stay(tmp_path: Path) -> None:
    """Ray's agents have other titles than the command they were started with, and no parent once it was killed."""
    folder = Path(tempfile.mkdtemp(prefix=RAY_FOLDER_PREFIX, dir=RAY_FOLDERS))
    log = folder / "agent.log"
    log.touch()
    opened = "import sys, time; file = open(sys.argv[1], sys.argv[2]); print(flush=True); time.sleep(60)"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    agent = sleeper(str(log), "a", code=opened)
    stubborn = sleeper(str(log), "a", code=deaf + opened)
    reader = sleeper(str(log), "r", code=opened)
    noted = sleeper()
    other = sleeper()
    try:
        identity = noted.pid, psutil.Process(noted.pid).create_time()
        later = other.pid, psutil.Process(other.pid).create_time() - 1000  # its id belonged to another process then
        assert clear_leftovers(str(folder), [identity, later]) == f"3 process(es) and {folder}"
        assert not folder.exists()
        assert all(process.poll() is not None for process in (agent, stubborn, noted))
        assert reader.poll() is None
        assert other.poll() is None
    finally:
        for process in (agent, stubborn, reader, noted, other):
            end(process)


def test_the_next_up_clears_what_killed_services_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = Path(tempfile.mkdtemp(prefix=RAY_FOLDER_PREFIX, dir=RAY_FOLDERS))
    ServiceState(gone_process(), time.time(), 7, "", str(folder)).claim()
    alive = ServiceState(os.getpid(), psutil.Process().create_time(), 8, "")
    alive.claim()
    assert clear_dead_services() == {7: str(folder)}
    assert not folder.exists()
    assert ServiceState.all() == [alive]
    with pytest.raises(LaunchError, match=r"no service .* port 7; services of this user use port 8"):
        ServiceState.read(7)


def test_a_zombie_does_not_count_as_running() -> None:
    process = sleeper()
    state = ServiceState(process.pid, psutil.Process(process.pid).create_time(), 7, "")
    assert state.process() is not None
    process.kill()
    deadline_s = time.monotonic() + 5
    while state.process() is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.wait(5)


def test_a_zombie_is_not_waited_for() -> None:
    """Of a parent that does not collect it, as the init process of a container may be."""
    parent = subprocess.Popen(["sh", "-c", "true & exec sleep 60"])
    try:
        deadline_s = time.monotonic() + 20
        while not (zombies := [p for p in psutil.Process(parent.pid).children() if p.status() == psutil.STATUS_ZOMBIE]):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        began_s = time.monotonic()
        assert wait_ended(zombies, 60.0) == []
        end_processes(zombies, 60.0)
        assert time.monotonic() - began_s < 30
        assert zombies[0].status() == psutil.STATUS_ZOMBIE
    finally:
        end(parent)


def test_a_state_without_a_folder_is_of_a_ray_that_was_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ServiceState.path(7).parent.mkdir()
    ServiceState.path(7).write_text(f'{{"pid": {gone_process()}, "create_time": 1.0, "port": 7, "log": ""}}')
    with pytest.raises(LaunchError, match=r"has already ended$"):
        stop_detached(7)


def test_no_other_folder_is_ever_removed(tmp_path: Path) -> None:
    mine = tmp_path / f"{RAY_FOLDER_PREFIX}x"
    mine.mkdir()
    for folder in (str(mine), str(tmp_path), "", "/", "/tmp", f"/tmp/{RAY_FOLDER_PREFIX}x/../.."):
        assert clear_leftovers(folder) == ""
    assert mine.exists()
