"""A Ray cluster of several nodes on this host, brought up by `ray start` and ended by process id."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.local_cluster import ROOT, free_port

START_S = 180.0
HEALTH = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000"}
"""A head notices a dead node within about 5 s; Ray's default is 15 s and more."""


@dataclass(frozen=True)
class RayNode:
    """A node that runs. ``process`` is its `ray start --block`."""

    address: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it and all it started at once, as a power failure would: nobody is told."""
        family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)
        psutil.wait_procs(family, timeout=5)


@contextlib.contextmanager
def ray_head(home: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[RayNode]:
    """A head node with a token of its own below ``home``, 2 CPUs unless ``options`` say otherwise. It can be asked, but
    may have no node yet."""
    port = free_port()
    options = (f"--port={port}", "--head", "--include-dashboard=false", *(options or ("--num-cpus=2",)))
    with _ray_node(home, f"127.0.0.1:{port}", *options, env=env) as node:
        deadline_s = time.monotonic() + START_S
        while not _listens(port):
            assert node.process.poll() is None, "Ray's head ended while starting"
            assert time.monotonic() < deadline_s, f"Ray's head does not listen after {START_S} s"
            time.sleep(0.1)
        yield node


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextlib.contextmanager
def ray_node(home: Path, address: str, *options: str, env: Mapping[str, str] | None = None) -> Iterator[RayNode]:
    """One more node of the cluster at ``address``; its workers have the variables ``env`` besides."""
    with _ray_node(home, address, f"--address={address}", "--num-cpus=1", *options, env=env) as node:
        yield node


@contextlib.contextmanager
def _ray_node(home: Path, address: str, *options: str, env: Mapping[str, str] | None = None) -> Iterator[RayNode]:
    with tempfile.TemporaryDirectory(prefix="pdserve-node-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        # `ray stop` would end others' Ray, too: everything here ends by its id.
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *options]
        if "--head" in options:
            command.append(f"--temp-dir={folder}")
        process = subprocess.Popen(
            [*command, "--object-store-memory=100000000"],
            env={"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **HEALTH, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield RayNode(address, process)
        finally:
            if process.poll() is None:
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                process.terminate()
                _, alive = psutil.wait_procs(family, timeout=20)
                for left in alive:
                    left.kill()
                psutil.wait_procs(alive, timeout=5)
                process.wait(5)
