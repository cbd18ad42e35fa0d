"""`down` after the supervisor was killed: its Ray's folder and processes go too, and nobody else's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from core.errors import LaunchError
from pdserve.launch.detach import stop_detached
from pdserve.launch.leftovers import RAY_FOLDER_PREFIX, RAY_FOLDERS, clear_leftovers
from pdserve.launch.state import ServiceState


def sleeper(*arguments: str) -> subprocess.Popen[bytes]:
    code = "import time; print(flush=True); time.sleep(60)"
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
        ServiceState(gone_process(), time.time(), 7, "", str(folder)).write()
        with pytest.raises(LaunchError, match=rf"gone already; .*: 1 process\(es\) and {folder}$"):
            stop_detached(7)
        assert not folder.exists()
        assert rays.poll() is not None
        assert other.poll() is None
        with pytest.raises(LaunchError, match="no service was started"):
            stop_detached(7)
    finally:
        end(rays)
        end(other)


def test_a_zombie_is_gone() -> None:
    process = sleeper()
    state = ServiceState(process.pid, psutil.Process(process.pid).create_time(), 7, "")
    assert state.process() is not None
    process.kill()
    deadline_s = time.monotonic() + 5
    while state.process() is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.wait(5)


def test_a_state_without_a_folder_is_of_a_ray_that_was_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ServiceState.path(7).parent.mkdir()
    ServiceState.path(7).write_text(f'{{"pid": {gone_process()}, "create_time": 1.0, "port": 7, "log": ""}}')
    with pytest.raises(LaunchError, match=r"gone already$"):
        stop_detached(7)


def test_no_other_folder_is_ever_removed(tmp_path: Path) -> None:
    mine = tmp_path / f"{RAY_FOLDER_PREFIX}x"
    mine.mkdir()
    for folder in (str(mine), str(tmp_path), "", "/", "/tmp", f"/tmp/{RAY_FOLDER_PREFIX}x/../.."):
        assert clear_leftovers(folder) == ""
    assert mine.exists()
