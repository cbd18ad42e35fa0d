"""Starting a service in the background, and taking down what was started: what `up --detach` and `down` do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from core.config import PdserveConfig
from core.errors import LaunchError, from_wire
from pdserve.launch.leftovers import clear_leftovers, end_processes
from pdserve.launch.state import ServiceState, state_folder

STOP_TIMEOUT_S = 60.0


def start_detached(
    config: PdserveConfig,
    report: Callable[[str], None] = lambda stage: None,
    note: Callable[[str], None] = lambda text: None,
) -> int:
    """Start a service that outlives the caller and holds none of its pipes; returns its port once it is ready.
    ``note`` gets what users have to know of it.
    Raises what kept it from starting; interrupted before that, it ends what it started."""
    state_folder().mkdir(parents=True, exist_ok=True)
    log_path = state_folder() / f"up-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    read_fd, write_fd = os.pipe()
    with log_path.open("wb") as log, open(read_fd, encoding="utf-8") as reports:
        try:
            command = [sys.executable, "-m", "pdserve.launch.supervisor", config.model_dump_json()]
            process = subprocess.Popen(
                [*command, str(write_fd), str(log_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        finally:
            os.close(write_fd)
        try:
            for line in reports:
                message = json.loads(line)
                if "stage" in message:
                    report(message["stage"])
                elif "note" in message:
                    note(message["note"])
                elif "error" in message:
                    process.wait(STOP_TIMEOUT_S)
                    raise from_wire(*message["error"])
                else:
                    process.returncode = 0  # it is nobody's child to wait for any more
                    port: int = message["ready"]
                    return port
        except BaseException:  # Ctrl-C above all: it does not reach a session of its own
            if process.poll() is None:
                _end_family(psutil.Process(process.pid), STOP_TIMEOUT_S)
                process.poll()
            raise
    raise LaunchError(f"the service ended while starting (exit code {process.wait(STOP_TIMEOUT_S)}); see {log_path}")


def stop_detached(port: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Take down the service that was started on this host with ``port``, and wait until nothing of it is left.
    LaunchError if there is none (what a killed one left behind is removed all the same)."""
    state = ServiceState.read(port)
    supervisor = state.process()
    if supervisor is None:
        left = clear_leftovers(state.ray_folder)
        state.clear()
        also = f"; what it had left is removed now: {left}" if left else ""
        raise LaunchError(f"the service on port {port} (process {state.pid}) is gone already{also}")
    _end_family(supervisor, timeout_s)
    clear_leftovers(state.ray_folder)  # there are some only if it had to be killed
    state.clear()


def _end_family(process: psutil.Process, timeout_s: float) -> None:
    """Ask ``process`` to end, give it ``timeout_s``, then kill by id what is left of it and its descendants. An
    interruption only shortens the wait."""
    family = {process}
    try:
        family.update(process.children(recursive=True))
        process.terminate()
        psutil.wait_procs([process], timeout=timeout_s)
    except psutil.NoSuchProcess:
        pass
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update(process.children(recursive=True))
        end_processes(family, 5.0)
