"""Starting a service in the background, and taking down a service: `up --detach` and `down`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import psutil

from ops.launch.leftovers import GRACE_S, end_processes, wait_ended
from ops.launch.operator import request_stop
from ops.launch.shutdown import DRAIN_S
from ops.launch.state import ServiceState, clear_dead_services, private, writable_state
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError, from_wire

STOP_TIMEOUT_S = 60.0
"""Limit: time to end a service after its requests. Then: its processes are killed."""


def start_detached(
    config: PdserveConfig,
    report: Callable[[str], None] = lambda stage: None,
    note: Callable[[str], None] = lambda text: None,
) -> int:
    """Start a service that outlives the caller and shares no pipes with it. Returns its port once it is ready; ``note``
    gets what users have to know about it. Raises the error that kept it from starting. If the caller is interrupted
    before that (also by SIGTERM), the service is ended again."""
    with writable_state() as folder:
        log_path = folder / f"up-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        log = open(log_path, "wb", opener=private)  # noqa: SIM115 - closed below
    read_fd, write_fd = os.pipe()
    with log, open(read_fd, encoding="utf-8") as reports, _sigterm_raises():
        try:
            command = [sys.executable, "-m", "ops.launch.supervisor", config.model_dump_json()]
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
                    process.returncode = 0  # collected by another process
                    port: int = message["ready"]
                    return port
        except BaseException:  # Ctrl-C does not reach the service's own session
            if process.poll() is None:
                _end(psutil.Process(process.pid), STOP_TIMEOUT_S, psutil.Process.terminate)
                process.poll()
            clear_dead_services()
            raise
    code = process.wait(STOP_TIMEOUT_S)
    clear_dead_services()
    raise LaunchError(f"the service ended while starting (exit code {code}); see {log_path}")


def stop_detached(
    port: int, drain_s: float = DRAIN_S, report: Callable[[str], None] = lambda stage: None
) -> ServiceState:
    """Take down the service that was started on this host with ``port``, wait until it has ended, and return what it
    was. Requests in progress may go on for ``drain_s``; new ones are refused. LaunchError if there is no such service;
    the remains of one that was killed are removed in any case."""
    state = ServiceState.read(port)
    supervisor = state.process()
    if supervisor is None:
        left = state.clear()
        also = f"; its remains were removed: {left}" if left else ""
        raise LaunchError(f"the service on port {port} (process {state.pid}) has already ended{also}")

    def stop(supervisor: psutil.Process) -> None:
        try:
            request_stop(state.socket, drain_s, drain_s + STOP_TIMEOUT_S, report)
        except LaunchError:  # it is ending already, or does not answer
            supervisor.terminate()

    _end(supervisor, drain_s + STOP_TIMEOUT_S, stop)
    state.clear()  # nothing is left unless it was killed
    return state


def _end(supervisor: psutil.Process, timeout_s: float, stop: Callable[[psutil.Process], None]) -> None:
    """``stop`` the supervisor, wait for its end up to ``timeout_s``, then kill what is left of it and its descendants
    by process id. An interruption only shortens the wait."""
    family = {supervisor}
    with contextlib.suppress(psutil.NoSuchProcess):
        family.update(supervisor.children(recursive=True))
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            stop(supervisor)
        wait_ended([supervisor], timeout_s)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update(supervisor.children(recursive=True))
        end_processes(family, GRACE_S)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Have SIGTERM raise SystemExit, as Ctrl-C raises KeyboardInterrupt. Only effective on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
