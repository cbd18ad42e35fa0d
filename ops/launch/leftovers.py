"""The remains of a service whose supervisor was killed: its processes, and the folder of its Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

RAY_FOLDERS = "/tmp"
"""The parent of private Ray folders. Kept short because Unix sockets below it have a limited path length."""

RAY_FOLDER_PREFIX = "pdserve-ray-"
OPERATOR_FOLDER_PREFIX = "pdserve-operator-"

GRACE_S = 5.0
"""How long a process may take to end after SIGTERM before it is killed."""
_POLL_S = 0.02
CLEAR_TIMEOUT_S = 30.0
"""Limit: end of the processes that a former service left, 5 s each until SIGKILL. Then: they are named."""

ProcessId = tuple[int, float]
"""Process id and creation time, which together are unique."""


def wait_ended(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait up to ``timeout_s`` for processes to end; returns those that still run. Zombies have ended. (For them
    `psutil.wait_procs` waits until their parent collects them, which the init of a container may do late or never.)"""
    deadline_s = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return alive


def end_processes(processes: Collection[psutil.Process], timeout_s: float) -> None:
    """Wait up to ``timeout_s`` for processes to end, then kill the others by process id."""
    alive = wait_ended(processes, timeout_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_ended(alive, 5.0)


def end_children() -> None:
    """End all descendants of this process by process id."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    end_processes(children, 3.0)


def identify(process: psutil.Process) -> ProcessId:
    """The identity by which `find` finds a process."""
    return process.pid, process.create_time()


def find(identity: ProcessId) -> psutil.Process | None:
    """The process if it is still running. Zombies do not count as running."""
    try:
        process = psutil.Process(identity[0])
        same = abs(process.create_time() - identity[1]) < 1.0
        return process if same and _runs(process) else None
    except psutil.NoSuchProcess:
        return None


def is_private_ray(path: str) -> bool:
    """Whether ``path`` is, or lies in, the folder of a Ray that a service started for itself."""
    parts = Path(path).parts
    folders = Path(RAY_FOLDERS).parts
    return parts[: len(folders)] == folders and "".join(parts[len(folders) :][:1]).startswith(RAY_FOLDER_PREFIX)


def clear_leftovers(ray_folder: str, noted: Iterable[ProcessId] = ()) -> str:
    """End the processes of the Ray in this folder and the ``noted`` ones, with their descendants, then remove the
    folder. Returns a description of what was removed; empty if there was nothing. Folders that are not of a private Ray
    are left alone."""
    folder = Path(ray_folder) if is_private_ray(ray_folder) and Path(ray_folder).parent == Path(RAY_FOLDERS) else None
    noted = tuple(noted)
    ended: set[psutil.Process] = set()
    deadline_s = time.monotonic() + CLEAR_TIMEOUT_S
    while family := family_of(folder, noted):  # repeated, because a process that ends may have started another
        ended |= family
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        end_processes(family, GRACE_S)
        if time.monotonic() > deadline_s:
            break
    found = [f"{len(ended)} process(es)"] if ended else []
    if stuck := sorted(process.pid for process in family):
        found.append(f"still running: {', '.join(map(str, stuck))}")
    if folder is not None and folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
        found.append(str(folder))
    return " and ".join(found)


def family_of(folder: Path | None, noted: Iterable[ProcessId]) -> set[psutil.Process]:
    """The running processes of the Ray in this folder, the ``noted`` ones, and their descendants; without this one."""
    family = {process for identity in noted if (process := find(identity)) is not None}
    if folder is not None:
        family.update(_processes_of(folder))
    for process in list(family):
        with contextlib.suppress(psutil.Error):
            family.update(process.children(recursive=True))
    return {process for process in family if process.pid != os.getpid() and _runs(process)}


def _runs(process: psutil.Process) -> bool:
    try:
        # While a process ends, its first thread may be a zombie before the others have ended.
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def _processes_of(folder: Path) -> list[psutil.Process]:
    """This user's processes that write to a file in ``folder`` (Ray's processes log there) or have an option like
    ``--session-dir=FOLDER/…``. Processes that only read there are not Ray's."""
    found = []
    for process in psutil.process_iter(["uids", "cmdline"]):
        uids, arguments = process.info["uids"], process.info["cmdline"] or ()
        if uids is None or uids.real != os.getuid():
            continue
        if any(_names(folder, argument) for argument in arguments) or _writes_to(folder, process):
            found.append(process)
    return found


def _names(folder: Path, argument: str) -> bool:
    value = argument.partition("=")[2]
    return argument.startswith("-") and (value == str(folder) or value.startswith(f"{folder}/"))


def _writes_to(folder: Path, process: psutil.Process) -> bool:
    try:
        files = process.open_files()
    except psutil.Error:
        return False
    return any(file.path.startswith(f"{folder}/") and getattr(file, "mode", "r") != "r" for file in files)
