"""A Ray cluster that `ray up` made on `hosts.Hosts` from the project's own cluster.yaml, as a user would at a desk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

import yaml

from tests.cluster.cluster_file import ROOT, filled_in, with_options_by_host
from tests.cluster.environment import install_environment
from tests.cluster.host import outside
from tests.cluster.hosts import Hosts

UP_TIMEOUT_S = 240.0
_RAY = "cd ~/pdserve && exec .venv/bin/ray"


class RayCluster:
    """The hosts "desk", "head" and any others, which are workers. ``options`` by host: of its `ray start`."""

    def __init__(self, hosts: Hosts, options: Mapping[str, str]) -> None:
        self.hosts = hosts
        self.desk = hosts["desk"]
        """Where the project's folder, the key and `ray up` are."""
        self.head = hosts["head"]
        self.workers = tuple(host for host in hosts if host not in (self.desk, self.head))
        for host in hosts:
            install_environment(host)
            (host.home / "ray_options").write_text(options.get(host.name, ""))
        config = with_options_by_host(filled_in(self.head.address, [host.address for host in self.workers], "root"))
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

    def _furnish_desk(self) -> None:
        excluded = [argument for pattern in self._exclude for argument in ("--exclude", pattern)]
        outside("rsync", "-a", *excluded, f"{ROOT}/", f"{self.desk.home / 'pdserve'}/", timeout_s=60)
        keys = self.desk.home / ".ssh"
        keys.mkdir(mode=0o700)
        shutil.copy(self.hosts.key, keys / "id_ed25519")
        self.desk.run("cd ~/pdserve && .venv/bin/ray get-auth-token --generate")
