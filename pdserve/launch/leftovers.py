"""What a service leaves behind whose supervisor was killed: the folder of its Ray, and perhaps processes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import psutil

RAY_FOLDERS = "/tmp"
"""Unix sockets live below a Ray's folder, and their paths must stay short."""

RAY_FOLDER_PREFIX = "pdserve-ray-"
OPERATOR_FOLDER_PREFIX = "pdserve-operator-"


def end_processes(processes: Collection[psutil.Process], timeout_s: float) -> None:
    """Wait for them to end, ``timeout_s`` at most; then kill, by id, those that have not."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)


def clear_leftovers(ray_folder: str) -> str:
    """End the processes of the Ray whose folder this is, and remove the folder. Returns what there was, in words;
    empty: nothing. Any other folder is left alone."""
    folder = Path(ray_folder)
    if folder.parent != Path(RAY_FOLDERS) or not folder.name.startswith(RAY_FOLDER_PREFIX):
        return ""
    family = set(_processes_of(folder))
    for process in list(family):
        with contextlib.suppress(psutil.Error):
            family.update(process.children(recursive=True))
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    end_processes(family, 5.0)
    found = [f"{len(family)} process(es)"] if family else []
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
        found.append(str(folder))
    return " and ".join(found)


def _processes_of(folder: Path) -> list[psutil.Process]:
    """Our own processes with an option like ``--session-dir=FOLDER/…``: Ray's have one, whoever only looks at a file
    there has not."""

    def is_rays(argument: str) -> bool:
        value = argument.partition("=")[2]
        return argument.startswith("-") and (value == str(folder) or value.startswith(f"{folder}/"))

    return [
        process
        for process in psutil.process_iter(["uids", "cmdline"])
        if process.info["uids"] is not None
        and process.info["uids"].real == os.getuid()
        and any(is_rays(argument) for argument in process.info["cmdline"] or ())
    ]
