"""The session-wide local Ray: one service of 2 prefill and 2 decode workers, brought up and down by the CLI itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.launch.leftovers import clear_leftovers
from ops.launch.state import ServiceState
from pdserve import Client
from pdserve.client.status import ServiceStatus
from tests.local_cluster import ROOT, free_port

UP_TIMEOUT_S = 300
WAIT_S = 180.0
UMASK, NICER = 0o022, 1
SHARED_FOLDERS = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))


@dataclass(frozen=True)
class Cli:
    """Runs `pdserve` as a user would; ``before`` is run in its process first."""

    env: dict[str, str]
    before: str = ""

    @classmethod
    def of(cls, state: Path) -> Cli:
        """With ``state`` as state folder and home, so that a token of Ray in the tester's home is not used."""
        own = {"HOME": str(state), "XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return cls({**os.environ, **own})

    @property
    def notes(self) -> Path:
        """Where it notes services."""
        state = self.env.get("XDG_STATE_HOME")
        return (Path(state) if state else Path(self.env["HOME"], ".local", "state")) / "pdserve"

    def noted(self, port: int) -> ServiceState:
        """What is noted of a service."""
        return ServiceState.load(self.notes / f"{port}.json")

    def command(self, *arguments: str) -> list[str]:
        """`pdserve ARGUMENTS`."""
        return [sys.executable, "-c", f"{self.before}from ops.cli.main import main; main()", *arguments]

    def run(self, *arguments: str, timeout_s: float = UP_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """`pdserve ARGUMENTS` to its end; its pipes must be closed by then, or this times out."""
        return subprocess.run(
            self.command(*arguments),
            env=self.env,
            cwd=self.env.get("XDG_STATE_HOME") or self.env["HOME"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def done(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same; it has to succeed."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done

    def up_when_joined(self, *arguments: str) -> str:
        """What `pdserve up` prints; it is tried again while the Ray that it joins is still coming up."""
        deadline_s = time.monotonic() + WAIT_S
        while (up := self.run("up", *arguments, "--detach")).returncode:
            assert "Ray" in up.stderr, up.stderr  # it says so in one way or another
            assert time.monotonic() < deadline_s, up.stderr
        return up.stderr


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli.of(tmp_path_factory.mktemp("state"))


@dataclass(frozen=True)
class RunningService:
    """A service on Ray, of a user with a new home. ``new`` are the entries of shared folders that were not there
    before, and ``said`` is what `up` has printed."""

    port: int
    http_port: int
    cli: Cli
    home: Path
    temporary: Path
    new: frozenset[Path]
    said: str

    @property
    def target(self) -> str:
        """Where it answers."""
        return f"127.0.0.1:{self.port}"

    @property
    def state(self) -> ServiceState:
        """What is noted of it."""
        return self.cli.noted(self.port)

    @property
    def operator(self) -> str:
        """Where the supervisor tells addresses and processes."""
        return self.state.operator

    @property
    def family(self) -> list[psutil.Process]:
        """All its processes; the first is the supervisor, which `up` left behind."""
        supervisor = psutil.Process(self.state.pid)
        return [supervisor, *supervisor.children(recursive=True)]


def entries() -> set[Path]:
    return {path for folder in SHARED_FOLDERS for path in folder.iterdir()}


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    home, temporary = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("tmp")
    foreign = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "XDG_"))}
    of_another_ray = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "0" * 64}
    own = {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    cli = Cli({**foreign, **of_another_ray, **own}, f"import os; os.umask({UMASK}); os.nice({NICER}); ")
    config = tmp_path_factory.mktemp("config") / "pdserve.yaml"
    config.write_text("engine: {block_size: 16, num_blocks: 256, max_num_batched_tokens: 256}\n")
    port, http_port = free_port(), free_port()
    options = ("--model", "tiny", "--set", "model.dtype=float32", "--prefill", "2", "--decode", "2", "--oversubscribe")
    ports = ("--port", str(port), "--set", f"gateway.http_port={http_port}")
    before = entries()
    said = cli.done("up", "-c", str(config), *options, *ports, "--detach").stderr
    service = RunningService(port, http_port, cli, home, temporary, frozenset(entries() - before), said)
    state = service.state
    yield service
    if state.process() is not None:
        cli.run("down", "--target", service.target)
    clear_leftovers(state.ray_folder)
    shutil.rmtree(Path(state.socket).parent, ignore_errors=True)


def wait_for(target: str, what: str, condition: Callable[[ServiceStatus], Any]) -> ServiceStatus:
    """The status once ``condition`` holds; AssertionError with the last one if it does not."""
    deadline_s = time.monotonic() + WAIT_S
    with Client(target) as client:
        while not condition(status := client.status()):
            assert time.monotonic() < deadline_s, f"{what}: {[(w.worker_id, w.state) for w in status.workers]}"
            time.sleep(0.2)
    return status


def states(status: ServiceStatus) -> dict[str, str]:
    """The state of each worker."""
    return {worker.worker_id: worker.state for worker in status.workers}


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run; zombies do not."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
