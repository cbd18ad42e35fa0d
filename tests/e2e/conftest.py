"""The session-wide local Ray: one service of 2 prefill and 2 decode workers, brought up and down by the CLI itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ops.launch.state import ServiceState
from tests.local_cluster import ROOT, free_port

UP_TIMEOUT_S = 300


@dataclass(frozen=True)
class Cli:
    """Runs `pdserve` as a user would, with a state folder of its own."""

    env: dict[str, str]

    def run(self, *arguments: str, timeout_s: float = UP_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """`pdserve ARGUMENTS` to its end; its pipes must be closed by then, or this times out."""
        code = "from ops.cli.main import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=self.env,
            cwd=self.env["XDG_STATE_HOME"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    state = tmp_path_factory.mktemp("state")
    return Cli({**os.environ, "XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT), "COLUMNS": "120"})


@dataclass(frozen=True)
class RunningService:
    """A service on Ray. ``supervisor`` is the process that `up` left behind."""

    target: str
    port: int
    supervisor: psutil.Process
    cli: Cli
    state_file: Path

    @property
    def operator(self) -> str:
        """Where the supervisor tells addresses and processes."""
        return operator_of(self.state_file)


def operator_of(state_file: Path) -> str:
    """The target at which a service's supervisor tells addresses and processes."""
    return ServiceState.load(state_file).operator


@pytest.fixture(scope="session")
def service(cli: Cli) -> Iterator[RunningService]:
    port = free_port()
    config = Path(cli.env["XDG_STATE_HOME"]) / "pdserve.yaml"
    config.write_text(
        "gateway: {host: 127.0.0.1}\nengine: {block_size: 16, num_blocks: 256, max_num_batched_tokens: 256}\n"
    )
    arguments = (
        "--model",
        "tiny",
        "--set",
        "model.dtype=float32",
        "--prefill",
        "2",
        "--decode",
        "2",
        "--oversubscribe",
    )
    up = cli.run("up", "-c", str(config), *arguments, "--port", str(port), "--detach")
    assert up.returncode == 0, up.stderr
    state_file = Path(cli.env["XDG_STATE_HOME"]) / "pdserve" / f"{port}.json"
    state = ServiceState.load(state_file)
    supervisor = state.process()
    assert supervisor is not None
    yield RunningService(f"127.0.0.1:{port}", port, supervisor, cli, state_file)
    if supervisor.is_running():
        cli.run("down", "--target", f"127.0.0.1:{port}")
    shutil.rmtree(state_file.parent, ignore_errors=True)
