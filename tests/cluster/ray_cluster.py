"""A Ray cluster that `ray up` made on `hosts.Hosts` from the project's own cluster.yaml, as a user would at a desk."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import yaml

from pdserve import Client
from pdserve.core.errors import PdserveError
from tests.cluster.cluster_file import ROOT, filled_in
from tests.cluster.environment import install_environment
from tests.cluster.host import outside
from tests.cluster.hosts import Hosts

UP_TIMEOUT_S = 240.0
PORT = 50051
WORKERS = 4
RECOVERY_S = 45.0
REACHABLE = "--host 0.0.0.0 --insecure"
"""Clients are outside the head, on a network that is this machine's own."""
SERVICE = (
    "--address auto --nodes 4 --prefill 2 --decode 2 --oversubscribe --placement spread --device cpu "
    f"--set model.dtype=float32 {REACHABLE}"
)
"""What `pdserve up` is told: these `WORKERS`, of the tiny model."""

_WAIT_JOINED = """
import time, ray
ray.init(address="auto", log_to_driver=False)
deadline_s = time.monotonic() + {timeout_s}
while sum(node["Alive"] for node in ray.nodes()) != {nodes}:
    assert time.monotonic() < deadline_s, ray.nodes()
    time.sleep(0.2)
"""
_RAY = "cd ~/pdserve && exec .venv/bin/ray"


class RayCluster:
    """The hosts "desk", "head" and any others, which are workers. ``options`` by host: its
    ``~/.ray/start_options``."""

    def __init__(self, hosts: Hosts, options: Mapping[str, str]) -> None:
        self.hosts = hosts
        self.desk = hosts["desk"]
        """Where the project's folder, the key and `ray up` are."""
        self.head = hosts["head"]
        self.workers = tuple(host for host in hosts if host not in (self.desk, self.head))
        for host in hosts:
            install_environment(host)
            (host.home / ".ray").mkdir()
            (host.home / ".ray" / "start_options").write_text(options.get(host.name, ""))
        config = filled_in(self.head.address, [host.address for host in self.workers], "root")
        self._exclude = config["rsync_exclude"]
        self._furnish_desk()
        config["auth"]["ssh_private_key"] = "~/.ssh/id_ed25519"
        (self.desk.home / "pdserve" / "cluster.yaml").write_text(yaml.safe_dump(config))

    def up(self) -> str:
        """`ray up`; returns what it printed. The workers join by and by: see `wait_joined`."""
        return self.desk.run(f"{_RAY} up -y cluster.yaml", timeout_s=UP_TIMEOUT_S).stdout

    def down(self) -> str:
        """`ray down`; returns what it printed."""
        return self.desk.run(f"{_RAY} down -y cluster.yaml", timeout_s=120).stdout

    def pdserve(
        self, arguments: str, *, timeout_s: float = 180, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """``pdserve ARGUMENTS`` on the head, over ssh."""
        return self.head.ssh(f"cd ~/pdserve && .venv/bin/pdserve {arguments}", timeout_s=timeout_s, check=check)

    @property
    def target(self) -> str:
        """The service's address, seen from this machine."""
        return f"{self.head.address}:{PORT}"

    def workers_inside(self) -> dict[str, dict[str, Any]]:
        """The workers by id, with addresses and processes, which are told on the head alone."""
        status = json.loads(self.pdserve("status --json").stdout)
        return {worker["worker_id"]: worker for worker in status["workers"]}

    def wait_joined(self, timeout_s: float = 120.0) -> None:
        """Return once every host is a node of the Ray on the head; AssertionError after ``timeout_s``."""
        wait = _WAIT_JOINED.format(nodes=1 + len(self.workers), timeout_s=timeout_s)
        self.head.ssh(
            f"cd ~/pdserve && RAY_AUTH_MODE=token .venv/bin/python -c {shlex.quote(wait)}", timeout_s=timeout_s + 30
        )

    def up_service(self) -> None:
        """`pdserve up` on the head; returns when the service takes requests."""
        (self.head.home / "service.yaml").write_text(
            f"router: {{forget_s: 2}}\ntransfer: {{interface: {self.hosts.kv_network}}}\n"
        )
        self.pdserve(f"up -c ~/service.yaml {SERVICE} --detach")

    def make_whole(self) -> None:
        """Undo what a test did to hosts and network: all are on and have joined, and all workers of the service take
        requests. The head must not have been killed.

        A worker's host that comes back is given its Ray again by the cluster's autoscaler, within a minute. A service
        that does not get over it by itself is started again: what one test found is not to fail the next."""
        assert self.head.running
        self.hosts.restore()
        for host in self.workers:
            if not host.running:
                host.boot()
        if not self._serves(0):
            self.wait_joined()
            if not self._serves(RECOVERY_S):
                self.pdserve("down", check=False)
                self.up_service()

    def _serves(self, timeout_s: float) -> bool:
        """Whether every worker is ready, at the latest after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        with Client(self.target) as client:
            while True:
                with contextlib.suppress(PdserveError):
                    status = client.status()
                    joined = all(any(p.name() == "raylet" for p in host.processes()) for host in self.workers)
                    if status.ready and [w.state for w in status.workers] == ["ready"] * WORKERS and joined:
                        return True
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(0.2)

    def _furnish_desk(self) -> None:
        excluded = [argument for pattern in self._exclude for argument in ("--exclude", pattern)]
        outside("rsync", "-a", *excluded, f"{ROOT}/", f"{self.desk.home / 'pdserve'}/", timeout_s=60)
        keys = self.desk.home / ".ssh"
        keys.mkdir(mode=0o700)
        shutil.copy(self.hosts.key, keys / "id_ed25519")
        self.desk.run("cd ~/pdserve && (umask 077; .venv/bin/ray get-auth-token --generate)")
