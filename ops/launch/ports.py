"""The ports of a service, which are predictable so that firewalls can be configured."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from ops.launch.state import ServiceState, listeners
from pdserve.core.address import join_address
from pdserve.core.config import ClusterConfig
from pdserve.core.errors import LaunchError

DEFAULT_BASE = 20_000
"""Port: registry, dialled by workers: `cluster.port_base`.

The default of a service that joins a Ray; one that starts its own Ray uses free ports."""

PORTS_PER_WORKER = 4
"""One for control, and one for each KV transport that uses a port."""


def port_base(config: ClusterConfig) -> int:
    """The port of the first gateway's registry, from which all others are counted; 0 if the system chooses all
    ports."""
    if config.port_base is not None:
        return config.port_base
    return 0 if config.address == "local" else DEFAULT_BASE


def first_port(base: int, ordinal: int, gateways: int = 1) -> int:
    """The first port of worker number ``ordinal``, whichever node it is on: behind the registries of all ``gateways``
    and the ports of the workers before it. LaunchError if its ports would exceed 65535."""
    first = base + gateways + PORTS_PER_WORKER * ordinal if base else 0
    if first + PORTS_PER_WORKER > 65_536:
        raise LaunchError(f"cluster.port_base: {base} leaves no ports for worker number {ordinal}; choose a lower base")
    return first


_PROPOSALS = 20
"""How many ports are tried until one and those after it are free."""

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PROPOSED = 24_000  # above those of services that count their ports from `DEFAULT_BASE`
_LEAST_PROPOSED = 1000  # with fewer ports to choose from, services that start at once would often choose the same

_HINTS = {
    "gateway.port": " with --port",
    "gateway.http_port": " with --set gateway.http_port=PORT, or none with --set gateway.http_port=0",
}


def _free_port(host: str, family: socket.AddressFamily, address: str, scope: Sequence[int], port: int, key: str) -> int:
    """``port`` of ``host``'s ``address`` (with ``scope``, of IPv6) if it is free, or for 0 one that the system
    chooses."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port, *scope))
            probe.listen(1)
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as error:
        hint = f"choose another{_HINTS.get(key, '')}"
        owner = ""
        if error.errno == errno.EADDRINUSE:
            if (service := ServiceState.using(port)) is not None:
                raise service.in_the_way(key, port, hint) from None
            owner = f" by {_users_of(port)}"
        where = join_address(host, port)
        raise LaunchError(f"{key}: cannot listen on {where}: {error.strerror}{owner}; {hint}") from None


def _users_of(port: int) -> str:
    """Who has a port that is taken, as far as this user may know."""
    names: dict[str, None] = {}
    for process in listeners(port):
        with contextlib.suppress(psutil.Error):  # it has ended
            names[f"{process.name()} (process {process.pid})"] = None
    return ", ".join(names) or "another connection, or a process that this user may not see"


def _proposed() -> int:
    """A random port below those that the system gives to outgoing connections; 0 if there are few of them."""
    try:
        end = int(_OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    count = end - _FIRST_PROPOSED
    return _FIRST_PROPOSED + secrets.randbelow(count) if count >= _LEAST_PROPOSED else 0


def free_ports(host: str, port: int = 0, count: int = 1, key: str = "gateway.port") -> int:
    """The first of ``count`` ports in a row that are free: ``port``, or for 0 one that no outgoing connection can take
    until it is used. ``host`` is a name or an address (IPv4 or IPv6). LaunchError, which names the configuration's
    ``key`` and whose the port is, if one is taken."""
    try:
        family, _, _, _, (address, _, *scope) = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise LaunchError(f"gateway.host: cannot listen on {host}: {error.strerror}; choose another") from None
    free = partial(_free_port, host, family, str(address), scope)
    for proposal in range(_PROPOSALS, 0, -1):
        try:
            first = free(port or _proposed(), key)
            for number in range(1, count):
                free(first + number, key)
        except (LaunchError, OverflowError):
            if port or proposal == 1:
                raise
        else:
            return first
    raise AssertionError("the last proposal raises")
