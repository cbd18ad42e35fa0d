"""The first process of a host of `hosts.Hosts`, run as a script with the standard library alone: it makes the host's
file system, starts its sshd and reaps whatever is orphaned. It ends, and with it all of the host, when its standard
input closes: no host outlives the process that made it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path


def mount(*arguments: str | Path) -> None:
    """One mount, seen by this host alone."""
    subprocess.run(["mount", *arguments], check=True, stdin=subprocess.DEVNULL)


def bind(source: Path, target: Path, *, writable: bool = False) -> None:
    """Show ``source`` at ``target`` too."""
    target.mkdir(parents=True, exist_ok=True)
    mount("--bind", source, target)
    if not writable:
        mount("-o", "remount,bind,ro", target)


def make_file_system(state: Path, home: Path, python: Path, packages: Path) -> None:
    """Its own home, /tmp, /run, /dev/shm and /proc. ``python`` and ``packages`` (an interpreter's installation and
    installed packages) may lie below those, so they are kept aside while those are covered."""
    kept = state / "python"
    bind(python, kept)
    bind(packages, state / "packages")
    bind(home, Path.home(), writable=True)
    for folder in ("/tmp", "/run", "/dev/shm"):
        mount("-t", "tmpfs", "-o", "size=2g,mode=1777", "tmpfs", folder)
    bind(kept, python)
    Path("/run/sshd").mkdir(mode=0o755)
    for name in ("hosts", "resolv.conf"):
        if (path := Path("/etc", name).resolve()).exists():
            mount("--bind", state / name, path)
    mount("-t", "proc", "proc", "/proc")


def reap_until_closed() -> None:
    """Wait for whatever ends here, until standard input closes."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if 0 in readable:
            return
        os.read(wake_read, 4096)
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break


def main() -> None:
    """``sys.argv[1]``: JSON with name, state, home, python, packages. Prints its process id as the outside sees it, and
    a second line once it is ready; starts sshd after a line has come back, when there is a network."""
    host = json.loads(sys.argv[1])
    os.write(1, f"{os.readlink('/proc/self')}\n".encode())  # /proc is still the outside's
    socket.sethostname(host["name"])
    make_file_system(*(Path(host[key]) for key in ("state", "home", "python", "packages")))
    os.write(1, b"ready\n")
    os.read(0, 1)
    config = Path(host["state"]) / host["name"] / "sshd_config"
    with (config.parent / "sshd.log").open("ab") as log:
        subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    reap_until_closed()


if __name__ == "__main__":
    main()
