"""Two hosts on this machine, made of network namespaces, and a service whose prefill and decode workers run on them.

    this machine: gateway, client     bridge, 10.89.N.1
          │ control, not shaped            │
    prefill host, 10.89.N.11   ══ cable for KV, 10.90.N.0/24, shaped by tc ══   decode host, 10.89.N.12

Needs root and the tools that `missing` looks for. The hosts have this machine's files, and share its cores by halves.
Everything has the id of this process in its name and is removed by `NamespaceDeployment.stop`. What a process that was
killed has left is removed when the next one makes hosts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import psutil

from experiments.child_process import ChildProcess, program
from experiments.deployment import Deployment, Service
from ops.launch.ports import free_ports
from ops.launch.state import target_here
from pdserve.client.sync_client import Client
from pdserve.client.target import Target
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest, LaunchError
from pdserve.core.worker import Role
from pdserve.version import VERSION
from runtime.secret import ServiceSecret
from worker.spec import WorkerSpec

PREFIX = "pdx"
"""Begins the name of each namespace and bridge; the id of the process they belong to follows, in hexadecimal."""
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "taskset": "util-linux"}
"""The tools that hosts need, and the Debian packages that have them."""

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
_CABLE = "kv0"
MTU = 9000
"""Of the cable. The kernel does its work for every frame on the sender's core, where the prefill runs: with frames of
1500 bytes, a shaped link slows the prefill down by a quarter."""
PAYLOAD_SHARE = (MTU - 52) / (MTU + 14)
"""Of the bytes that tc counts in a full Ethernet frame, those that are payload of TCP: without the headers of Ethernet
(14), IP (20), and TCP with its timestamps (32)."""

_BURST_BYTES, _BURST_S = 2 * (MTU + 14), 1e-3  # as little as the kernel allows: a prediction knows no bursts


def tool(*command: str, timeout_s: float = 20.0) -> str:
    """Run a command of this machine; returns what it printed. LaunchError if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, "PATH": _PATH}
    )
    if done.returncode:
        raise LaunchError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ip(command: str) -> str:
    """`tool` for a command of ip; no argument has a space."""
    return tool("ip", *command.split())


def shape(device: str, gbps: float | None, *, inside: Sequence[str] = ()) -> None:
    """Let ``gbps`` (10^9 bits per second) out of a network device, or (None) all there is. ``inside`` begins a command
    that runs where the device is."""
    if gbps is None:
        if "tbf" in tool(*inside, "tc", "qdisc", "show", "dev", device):
            tool(*inside, "tc", "qdisc", "del", "dev", device, "root")
        return
    burst = max(_BURST_BYTES, round(gbps * 1e9 / 8 * _BURST_S))
    bucket = ("tbf", "rate", f"{round(gbps * 1e9)}bit", "burst", str(burst), "latency", "50ms")
    tool(*inside, "tc", "qdisc", "replace", "dev", device, "root", *bucket)


def missing() -> str:
    """What hosts made of namespaces need and this machine lacks, in words; empty: nothing."""
    if os.geteuid() != 0:
        return "hosts made of namespaces need root (sudo)"
    absent = [name for name in PACKAGES if shutil.which(name, path=_PATH) is None]
    if absent:
        packages = " ".join(sorted({PACKAGES[name] for name in absent}))
        return f"not installed: {', '.join(absent)} (apt-get install {packages})"
    probe = f"{PREFIX}{os.getpid():x}t"
    try:
        ip(f"netns add {probe}")
        try:
            ip(f"-n {probe} link add end0 type veth peer name end1")
            ip(f"-n {probe} link add bridge0 type bridge")
            shape("end0", 1.0, inside=("ip", "netns", "exec", probe))
        finally:
            ip(f"netns del {probe}")
    except LaunchError as error:
        return f"this machine makes no namespaces, or no shaped links between them: {error}"
    return ""


def sweep() -> None:
    """Remove the namespaces and devices of processes that are gone."""
    devices, spaces = (json.loads(ip(f"-json {command}") or "[]") for command in ("link show", "netns list"))
    names = [("link", each.get("ifname", "")) for each in devices]
    names += [("netns", each.get("name", "")) for each in spaces]
    for kind, name in names:
        owner = re.fullmatch(rf"{PREFIX}([0-9a-f]+)[BPDt]0?", name)
        if owner and not psutil.pid_exists(int(owner[1], 16)):
            ip(f"{kind} del {name}")


class TwoHosts:
    """The two hosts, their bridge, and the cable between them. LaunchError if they cannot be made."""

    def __init__(self) -> None:
        sweep()
        own = f"{PREFIX}{os.getpid():x}"
        number = _free_number()
        self.gateway = f"10.89.{number}.1"
        """This machine's address for the workers."""
        self.kv_network = f"10.90.{number}.0/24"
        """The network of the cable."""
        self.addresses = {Role.PREFILL: f"10.89.{number}.11", Role.DECODE: f"10.89.{number}.12"}
        self._names = {Role.PREFILL: f"{own}P", Role.DECODE: f"{own}D"}  # no hexadecimal digits
        self._bridge = f"{own}B"
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        self._cores = {Role.PREFILL: cores[:half] or cores, Role.DECODE: cores[half:]}
        try:
            ip(f"link add {self._bridge} type bridge")
            ip(f"addr add {self.gateway}/24 dev {self._bridge}")
            ip(f"link set {self._bridge} up")
            for role, name in self._names.items():
                ip(f"netns add {name}")
                ip(f"link add {name}0 type veth peer name eth0 netns {name}")
                ip(f"link set {name}0 master {self._bridge} up")
                ip(f"-n {name} addr add {self.addresses[role]}/24 dev eth0")
                ip(f"-n {name} link set lo up")
                ip(f"-n {name} link set eth0 up")
            prefill, decode = self._names.values()
            ip(f"-n {prefill} link add {_CABLE} mtu {MTU} type veth peer name {_CABLE} mtu {MTU} netns {decode}")
            for last, name in enumerate((prefill, decode), 1):
                ip(f"-n {name} addr add 10.90.{number}.{last}/24 dev {_CABLE}")
                ip(f"-n {name} link set {_CABLE} up")
        except BaseException:
            self.close()
            raise

    def rate(self, gbps: float | None) -> None:
        """Let ``gbps`` (10^9 bits per second) through the cable in each direction, or (None) all there is."""
        for name in self._names.values():
            shape(_CABLE, gbps, inside=("ip", "netns", "exec", name))

    def command(self, role: Role) -> list[str]:
        """Begins a command that runs on the host of ``role``, on its cores."""
        cores = ",".join(map(str, self._cores[role]))
        return ["ip", "netns", "exec", self._names[role], "taskset", "--cpu-list", cores]

    def close(self) -> None:
        """Remove what this object made. May be called twice. The hosts' processes must have ended."""
        names = self._names.values()
        ports = [f"link del {name}0" for name in names]  # else the kernel would remove them later
        for command in (*ports, *(f"netns del {name}" for name in names), f"link del {self._bridge}"):
            with contextlib.suppress(LaunchError):  # it was not made, or is gone
                ip(command)


class NamespaceDeployment(Deployment):
    """Services of one prefill and one decode worker on `TwoHosts`, without Ray: the gateway on this machine, each
    worker on its host. InvalidRequest if this machine cannot have such hosts."""

    def __init__(self, report: Callable[[str], None] = lambda stage: None, **service: Unpack[Service]) -> None:
        if service.get("target") is not None:
            raise InvalidRequest("--hosts: namespaces starts services itself, and --target names a running one")
        if problem := missing():
            raise InvalidRequest(f"--hosts namespaces: {problem}")
        super().__init__(report=report, **service)
        self._hosts: TwoHosts | None = None
        self._processes = contextlib.ExitStack()
        self._secret = ServiceSecret.new()

    def rate(self, gbps: float | None) -> None:
        """Shape the cable while the service runs."""
        assert self._hosts is not None, "a service was provided"
        self._hosts.rate(gbps)

    def stop(self) -> None:
        """End the service, and remove the hosts."""
        super().stop()
        hosts, self._hosts = self._hosts, None
        if hosts is not None:
            hosts.close()

    def _start(self, settings: Mapping[str, Any]) -> Target:
        hosts = self._hosts = self._hosts or TwoHosts()
        hosts.rate(None)
        port, registry = free_ports("127.0.0.1"), f"{hosts.gateway}:{free_ports(hosts.gateway)}"
        config = PdserveConfig.load(
            self._config,
            {
                **settings,
                "gateway.host": "127.0.0.1",
                "gateway.port": port,
                "cluster.prefill": 1,
                "cluster.decode": 1,
                "cluster.device": "cpu",
                "transfer.interface": hosts.kv_network,
            },
        )
        commands = {"gateway": program("gateway", config.model_dump_json(), registry)}
        for role, address in hosts.addresses.items():
            spec = WorkerSpec(
                worker_id=f"{role}-0",
                role=role,
                host=address,
                node=address,
                device="cpu",
                registry_addresses=(registry,),
                version=VERSION,
                config=config,
            )
            commands[spec.worker_id] = hosts.command(role) + program("ops.launch.worker", json.dumps(spec.to_wire()))
        environment = {"PATH": _PATH, **self._secret.environment()}
        processes = [
            self._processes.enter_context(ChildProcess(name, command, environment, talks=False))
            for name, command in commands.items()
        ]
        target = self.reached(target_here(config.gateway, port))
        limit_s = config.cluster.start_limit_s("cpu")
        deadline_s = time.monotonic() + limit_s
        with Client(target) as client:
            while not (client.ready(1.0) and any(worker.links for worker in client.status().workers)):
                for name, process in zip(commands, processes, strict=True):
                    if process.status is not None:
                        raise LaunchError(f"{name} ended while starting{process.log_tail(1)}")
                if time.monotonic() > deadline_s:
                    raise LaunchError(
                        "the service on hosts made of namespaces was not ready within "
                        f"{config.cluster.start_limit_s('cpu'):g} s"
                    )
                time.sleep(0.05)
        return target

    def _end(self) -> None:
        """End gateway and workers with all their children, by id."""
        self._processes.close()


def _free_number() -> int:
    """The third number of the networks 10.89.N.0/24 and 10.90.N.0/24, in which this machine has no address."""
    taken = ip("-4 addr show") + ip("-4 route show")
    for step in range(256):
        number: int = (os.getpid() + step) % 256
        if f" 10.89.{number}." not in taken:
            return number
    raise LaunchError("no free network below 10.89.0.0/16 for the hosts")
