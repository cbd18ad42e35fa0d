"""Several hosts on one machine, for tests: each is a set of namespaces (network, processes, mounts, IPC, name, and if
asked for time) with an sshd, a home folder, /tmp and /dev/shm of its own, and all of them are on one bridge.

    with Hosts(["head", "worker-1"]) as hosts:
        hosts["head"].ssh("hostname").stdout      # "head\\n"
        hosts.rate(100)                           # every cable is shaped to 100 Mbit/s
        hosts["worker-1"].partition()             # nothing passes any more, and nobody is told
        hosts["worker-1"].heal()
        hosts["worker-1"].kill()                  # its power fails
        hosts["worker-1"].boot()                  # and comes back; its home is as it was

Needs root and what `missing` looks for. Root's real home is never written. The hosts end with the process that made
them, however that ends; a bridge and files that it could then not remove are removed by the next `Hosts`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.cluster.host import OUTSIDE, Host, outside

TOOLS = ("ip", "tc", "ssh", "ssh-keygen", "sshd", "rsync", "mount", "unshare", "nsenter", "taskset", "flock", "uptime")
STATES = Path("/var/tmp")
PREFIX = "pdh"
"""Begins the name of each bridge and state folder; the id of the process they belong to follows, in hexadecimal."""


def missing() -> str:
    """What these hosts need and this machine lacks, in words; empty: nothing."""
    if os.geteuid() != 0:
        return "hosts in namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=OUTSIDE["PATH"]) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (see scripts/cluster_test_tools.sh)"
    for probe in (
        ["unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
        ["unshare", "--net", "ip", "link", "add", "bridge0", "type", "bridge"],
        ["unshare", "--net", "ip", "link", "add", "end0", "type", "veth", "peer", "name", "end1"],
    ):
        tried = subprocess.run(probe, env=OUTSIDE, capture_output=True, text=True, timeout=20, check=False)
        if tried.returncode:
            return f"this machine makes no namespaces or links: {' '.join(probe)}: {tried.stderr.strip()}"
    return ""


class Hosts:
    """Hosts of these ``names``; ``clock_ahead_s`` by name, for those whose monotonic clock is not this machine's. Those
    in ``single_core`` have one core each, taking turns: or all engines would be on this machine's first."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        clock_ahead_s: Mapping[str, int] | None = None,
        single_core: Sequence[str] = (),
    ) -> None:
        if problem := missing():
            raise RuntimeError(problem)
        sweep()
        self.state = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid():x}-", dir=STATES))
        self.state.chmod(0o755)
        network = _free_network()
        self.gateway = f"{network}.1"
        """This machine's own address on the bridge."""
        self.kv_network = f"{network.replace('10.88.', '10.99.')}.0/24"
        """Where each of them has a second address, `Host.kv_address`."""
        self.bridge = f"{PREFIX}{os.getpid():x}x{network.split('.')[2]}"
        self._hosts: dict[str, Host] = {}
        ahead, cores = clock_ahead_s or {}, sorted(os.sched_getaffinity(0))
        try:
            outside("ip", "link", "add", self.bridge, "type", "bridge")
            outside("ip", "addr", "add", f"{self.gateway}/24", "dev", self.bridge)
            outside("ip", "link", "set", self.bridge, "up")
            outside("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", PREFIX, "-f", str(self.key))
            for index, name in enumerate(names):
                address = f"{network}.{11 + index}"
                core = cores[single_core.index(name) % len(cores)] if name in single_core else -1
                self._hosts[name] = Host(name, address, self.gateway, self.bridge, self.state, ahead.get(name, 0), core)
            known = [f"{host.address} {host.name}" for host in self]
            (self.state / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
            (self.state / "resolv.conf").write_text("")  # other names are unknown, at once
            with ThreadPoolExecutor() as pool:
                list(pool.map(Host.boot, self))
        except BaseException:
            self.close()
            raise

    @property
    def key(self) -> Path:
        """The private key that every sshd lets in."""
        return self.state / "id"

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def rate(self, mbit: float | None) -> None:
        """Shape every host's cable, in both directions; None: as fast as it goes."""
        for host in self:
            host.rate(mbit)

    def restore(self) -> None:
        """Undo what was done to the network: every cable is whole and unshaped, every port open. Hosts that were killed
        stay so."""
        for host in self:
            if host.running:
                host.heal()
                host.rate(None)
                host.open_ports()

    def close(self) -> None:
        """End every process of every host by id, and remove links, namespaces and files."""
        try:
            for host in self:
                host.kill()
        finally:
            _remove(self.bridge, self.state)


def sweep() -> None:
    """Remove what processes that are gone have left: their hosts ended with them, bridges and files stayed."""
    for path in STATES.glob(f"{PREFIX}*-*"):
        owner = re.fullmatch(rf"{PREFIX}([0-9a-f]+)-\w+", path.name)
        if owner and not psutil.pid_exists(int(owner[1], 16)):
            shutil.rmtree(path, ignore_errors=True)
    for link in json.loads(outside("ip", "-json", "link", "show", "type", "bridge") or "[]"):
        owner = re.fullmatch(rf"{PREFIX}([0-9a-f]+)x\d+", link.get("ifname", ""))
        if owner and not psutil.pid_exists(int(owner[1], 16)):
            outside("ip", "link", "del", link["ifname"])


def _remove(bridge: str, state: Path) -> None:
    subprocess.run(["ip", "link", "del", bridge], env=OUTSIDE, capture_output=True, timeout=20, check=False)
    shutil.rmtree(state, ignore_errors=True)


def _free_network() -> str:
    """The first three numbers of a private network (/24) that this machine has no address in."""
    taken = outside("ip", "-4", "addr", "show") + outside("ip", "-4", "route", "show")
    start = os.getpid() % 256
    for third in (*range(start, 256), *range(start)):
        if f" 10.88.{third}." not in taken:
            return f"10.88.{third}"
    raise RuntimeError("no free network below 10.88.0.0/16")
