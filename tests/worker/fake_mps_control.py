"""Stands in for nvidia-cuda-mps-control, which needs a GPU. Strict about its environment and the order of commands:
what the real one would refuse, or misunderstand, ends it with status 1 and a line in FAKE_MPS_NOTES."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"


def pipes() -> Path:
    """The folder that the environment names."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))


def misuse(what: str) -> None:
    """Note it and end."""
    with Path(os.environ["FAKE_MPS_NOTES"]).open("a") as notes:
        notes.write(f"misuse: {what}\n")
    sys.stderr.write(what + "\n")
    os._exit(1)


def note(what: str) -> None:
    """For the test."""
    with Path(os.environ["FAKE_MPS_NOTES"]).open("a") as notes:
        notes.write(what + "\n")


def running() -> int:
    """The process id of the daemon that has these pipes; 0 if there is none."""
    try:
        pid = int((pipes() / f"{PROGRAM}.pid").read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return 0
    return pid


def start() -> None:
    """-d: return when the daemon listens."""
    if os.environ.get("FAKE_MPS_FAILS"):
        sys.stderr.write("Insufficient privileges\n")
        os._exit(1)
    if running():
        misuse("An instance of this daemon is already running")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        folder = Path(os.environ.get(name, "/missing"))
        if not folder.is_dir() or stat.S_IMODE(folder.stat().st_mode) != 0o700:
            misuse(f"{name} must be a folder of mode 700: {folder}")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"):
        if name in os.environ:
            misuse(f"{name} would hold for all clients")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(pipes() / "control"))
    server.listen()
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("FAKE_MPS_STUBBORN") else signal.SIG_DFL)
    (pipes() / f"{PROGRAM}.pid").write_text(str(os.getpid()))
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # else the one that started it would wait for the end of its output
        os.dup2(quiet, fd)
    note("started")
    while True:
        connection, _ = server.accept()
        command = connection.recv(1000).decode().strip()
        note(command)
        connection.sendall(b"ok\n")
        if command == "quit" and not os.environ.get("FAKE_MPS_STUBBORN"):
            for name in ("control", f"{PROGRAM}.pid"):
                (pipes() / name).unlink()
            os._exit(0)


def command() -> None:
    """Pass commands from standard input to the daemon."""
    for line in sys.stdin:
        if not running():
            sys.stdout.write("Cannot find MPS control daemon process\n")
            os._exit(1)
        if line.strip() not in ("quit", "get_server_list"):
            misuse(f"unknown command: {line}")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(pipes() / "control"))
            client.sendall(line.encode())
            client.recv(10)


if __name__ == "__main__":
    start() if sys.argv[1:] == ["-d"] else command()
