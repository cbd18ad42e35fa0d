"""The MPS daemon of a node, which all workers of a user share. It runs as long as one of them does.

Each worker holds a shared lock on a file for as long as it lives; the kernel frees it when the worker ends, however it
ends. A keeper process (`worker.mps_keeper`), a child of no worker, waits for the file to be its own, and then ends the
daemon. A folder has the locks and the daemon's pipes and logs, and goes with the daemon.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdserve.core.errors import LaunchError
from runtime.mps import (
    LOGS,
    MEMORY,
    PIPES,
    THREADS,
    TRANSFER_THREADS,
    GpuModes,
    foreign_daemon,
    gpu_modes,
    mps_obstacle,
)

MEMBERS, KEEPER, STARTING = "members.lock", "keeper.lock", "starting.lock"
_START_S = 30.0
_RETRY_S = 0.05
_ROOT = Path(__file__).resolve().parents[1]
_log = logging.getLogger(__name__)


def mps_folder() -> Path:
    """The folder of this user's daemon on this node. Its path is short, because sockets are made below it."""
    return Path(f"/tmp/pdserve-mps-{os.getuid()}")


@dataclass(slots=True)
class MpsMembership:
    """A worker's use of MPS. ``is_on``: CUDA in this process and its children uses a daemon; ``why`` says which, or why
    not. Held until `close`, or the end of the process."""

    is_on: bool
    why: str
    _lock: int = -1
    _folder: Path | None = None

    def close(self) -> None:
        """Leave. The daemon ends with its last member. May be called twice."""
        lock, self._lock = self._lock, -1
        if lock < 0 or self._folder is None:
            return
        with contextlib.suppress(LaunchError, OSError):
            _start_keeper(self._folder)  # unless it was killed, it runs
        os.close(lock)


def join_mps(
    setting: Literal["auto", "off"],
    device: str,
    environment: MutableMapping[str, str] = os.environ,
    folder: Path | None = None,
    *,
    transfer_threads: int = 25,
    memory_mb: int | None = None,
) -> MpsMembership:
    """Start the node's daemon, or join it, and lead CUDA to it by ``environment``, which must be this process's. Call
    it before CUDA is initialised. LaunchError if the GPU admits one process alone, and there is no MPS.

    ``transfer_threads`` and ``memory_mb`` are `cluster.mps_transfer_threads` and `cluster.mps_memory_mb`. They do not
    replace limits that the environment has."""
    if not device.startswith("cuda"):
        return MpsMembership(False, f"the device is {device}")
    modes = gpu_modes(environment)
    daemon = foreign_daemon(environment)
    if daemon is not None and daemon != str((folder or mps_folder()) / "pipe"):
        return MpsMembership(True, f"the daemon with its pipes in {daemon}, which pdserve neither starts nor ends")
    if setting == "off":
        return _without("cluster.mps is off", modes)
    obstacle = mps_obstacle(environment, modes)
    if obstacle is not None:
        return _without(obstacle, modes)
    folder = folder or mps_folder()
    lock = -1
    try:
        lock = _members_lock(folder)
        _start_keeper(folder)
    except (OSError, LaunchError) as error:
        if lock >= 0:
            os.close(lock)
        return _without(f"the daemon could not be started: {error}", modes)
    environment[PIPES], environment[LOGS] = str(folder / "pipe"), str(folder / "log")
    if THREADS not in environment:
        environment[THREADS] = environment[TRANSFER_THREADS] = str(transfer_threads)
    if memory_mb is not None:
        environment.setdefault(MEMORY, f"0={memory_mb}M")
    return MpsMembership(True, f"the daemon in {folder}", lock, folder)


def _without(why: str, modes: GpuModes | None) -> MpsMembership:
    if modes is not None and modes.compute_mode == "Exclusive_Process":
        raise LaunchError(
            "cluster.mps: the GPU's compute mode is Exclusive_Process, which admits one process, and a worker is two; "
            f"MPS would serve both, but {why}. Set the mode with `nvidia-smi -c DEFAULT`, or make MPS possible"
        )
    return MpsMembership(False, why)


def _members_lock(folder: Path) -> int:
    """A shared lock on the members' file of a folder that exists and is this user's alone. TimeoutError (an OSError)
    if a daemon that is ending does not end."""
    deadline_s = time.monotonic() + _START_S
    while True:
        lock = -1
        try:
            _make_private(folder)
            lock = os.open(folder / MEMBERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.stat(folder / MEMBERS).st_ino == os.fstat(lock).st_ino:
                return lock
        except (BlockingIOError, FileNotFoundError):  # a keeper ends its daemon, or its folder has just gone
            pass
        if lock >= 0:
            os.close(lock)
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the MPS daemon in {folder} does not end")
        time.sleep(_RETRY_S)


def _make_private(folder: Path) -> None:
    for each in (folder, folder / "pipe", folder / "log"):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{each} must be a folder of this user alone (mode 700)")


def _start_keeper(folder: Path) -> None:
    """Start the keeper, and with it the daemon, unless it runs. LaunchError if that fails."""
    starting = os.open(folder / STARTING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(starting, fcntl.LOCK_EX)  # bounded by _START_S of whoever holds it
        if _keeper_runs(folder):
            return
        said_fd, say_fd = os.pipe()
        try:
            with (folder / "keeper.log").open("ab") as log:
                # Not a child of this process: Ray ends an actor's children with it.
                subprocess.run(
                    [sys.executable, "-P", "-m", "worker.mps_keeper", str(folder), str(say_fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(say_fd,),
                    env={**os.environ, "PYTHONPATH": str(_ROOT)},
                    start_new_session=True,
                    check=True,
                    timeout=_START_S,
                )
            os.close(say_fd)
            say_fd = -1
            with os.fdopen(os.dup(said_fd)) as said:
                answer = said.read().strip()  # the keeper bounds its calls, and closes the pipe
        except (subprocess.SubprocessError, OSError) as error:
            raise LaunchError(f"its keeper did not start: {error}") from None
        finally:
            os.close(said_fd)
            if say_fd >= 0:
                os.close(say_fd)
        if answer != "ready":
            raise LaunchError(answer or "its keeper ended")
    finally:
        os.close(starting)


def _keeper_runs(folder: Path) -> bool:
    lock = os.open(folder / KEEPER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
