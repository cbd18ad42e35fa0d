"""Keeps the MPS daemon of a node: ``python -m worker.mps_keeper FOLDER READY_FD``.

It leaves its parent, starts the daemon (or adopts the one that a killed keeper left), writes ``ready`` or what failed
to ``READY_FD``, waits until no worker holds the members' lock, and ends the daemon. SIGTERM ends the daemon at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from runtime.mps import CONTROL, LOGS, MEMORY, PIPES, THREADS, VISIBLE, daemon_pid
from worker.mps import KEEPER, MEMBERS

_COMMAND_S = 15.0
_QUIT_S = 10.0
_LOOK_S = 0.05


class MpsDaemon:
    """The control daemon whose pipes are below ``folder``. It sees all GPUs of the node, because workers number theirs
    by Ray's CUDA_VISIBLE_DEVICES, which has to mean the same there. Limits are those of each worker."""

    def __init__(self, folder: Path) -> None:
        self._pipes = folder / "pipe"
        dropped = {VISIBLE, THREADS, MEMORY}
        self._environment = {name: value for name, value in os.environ.items() if name not in dropped}
        self._environment |= {PIPES: str(self._pipes), LOGS: str(folder / "log")}

    def start(self) -> None:
        """Start it, unless it runs. RuntimeError if it does not answer."""
        if not daemon_pid(self._pipes):
            self._run(["-d"], "")
        self._run([], "get_server_list\n")

    def quit(self) -> None:
        """End it and its server, by force if it does not end."""
        pid = daemon_pid(self._pipes)
        if not pid:
            return
        with contextlib.suppress(RuntimeError):
            self._run([], "quit\n")
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            if signum is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            deadline_s = time.monotonic() + _QUIT_S
            while daemon_pid(self._pipes) == pid and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
            if daemon_pid(self._pipes) != pid:
                return

    def _run(self, arguments: list[str], commands: str) -> None:
        try:
            done = subprocess.run(
                [CONTROL, *arguments],
                input=commands,
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                env=self._environment,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(f"{CONTROL} {' '.join(arguments)}: {error}") from None
        if done.returncode:
            said = " ".join(f"{done.stdout} {done.stderr}".split())
            raise RuntimeError(f"{CONTROL} {' '.join(arguments)} ended with status {done.returncode}: {said}")


def main() -> None:
    """The whole process."""
    folder, ready_fd = Path(sys.argv[1]), int(sys.argv[2])
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir("/")
    alone = os.open(folder / KEEPER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    members = os.open(folder / MEMBERS, os.O_RDWR | os.O_CLOEXEC)
    daemon = MpsDaemon(folder)
    said = "ready"
    try:
        try:
            daemon.start()
        except RuntimeError as error:
            said = str(error)
        with os.fdopen(ready_fd, "w") as ready:
            ready.write(said)
        if said == "ready":
            fcntl.flock(members, fcntl.LOCK_EX)  # when the last worker has ended
    finally:
        daemon.quit()
        gone = folder.with_name(f"{folder.name}.{os.getpid()}")  # at once: a worker may make the folder anew
        with contextlib.suppress(OSError):
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


if __name__ == "__main__":
    main()
