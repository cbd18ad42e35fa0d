"""Checks of the gateway's host: its two ports, its tokenizer, and connections between gateway and workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from checkpoints.folder import tokenizer_note
from gateway.security import security_of
from gateway.tokenizer import load_tokenizer
from ops.doctor.finding import Finding, fail, ok, warn
from ops.doctor.network import REMEDIES, SAME, Obstacle, PingServer, dial, port_taken, read_clock
from ops.doctor.report import ExaminedNode
from ops.launch.ports import free_ports
from pdserve.core.clock import MonotonicClock, clock_id
from pdserve.core.config import GatewayConfig, PdserveConfig
from pdserve.core.errors import ConfigError, LaunchError, ModelError
from runtime.plane_tls import plane_tls

_GATEWAY = "the gateway"
_ANSWER_S = 5.0


def check_gateway_port(gateway: GatewayConfig, own_port: int) -> Iterator[Finding]:
    """The public ports have to be free, unless the examined service itself, on ``own_port``, runs (0: it does not)."""
    if gateway.port == own_port and own_port:
        yield ok("port", _GATEWAY, f"the service on port {gateway.port} runs; a second one needs other ports")
        return
    ports = {"gateway.port": gateway.port, "gateway.http_port": gateway.served_http_port}
    for key, port in ports.items():
        option = f"--{key.removeprefix('gateway.').replace('_', '-')}"
        try:
            if port:
                free_ports(gateway.host, port, gateway.replicas, key)
        except LaunchError as error:
            remedy = f"end the process that holds it, or choose another with {option} ({key})"
            yield port_taken(_GATEWAY, str(error), port, remedy)


def check_access(config: PdserveConfig) -> Iterator[Finding]:
    """The files for TLS and tokens have to be there, and others must not reach the service unprotected."""
    checks = partial(security_of, config.gateway, MonotonicClock()), partial(plane_tls, config.cluster)
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield fail("access", _GATEWAY, str(error), "see docs/security.md")


def check_tokenizer(folder: Path | None) -> Iterator[Finding]:
    """The gateway needs the ``tokenizer.json`` of the model's folder to accept text."""
    try:
        if note := tokenizer_note(folder):
            yield warn("tokenizer", _GATEWAY, note, "convert the tokenizer, or have clients send token ids")
        else:
            load_tokenizer(folder)
    except ModelError as error:
        yield fail("tokenizer", _GATEWAY, str(error), "download the file again")


def check_registry(
    host: str, port: int, nodes: Sequence[ExaminedNode], own_port: int, timeout_s: float, pool: Executor
) -> Iterator[Finding]:
    """Every node has to reach the workers' registry at ``host`` and ``port`` (0: any): all of them dial a listener."""
    try:
        server = PingServer(host, port)
    except OSError as error:
        if not own_port:  # else the examined service listens there
            yield port_taken(_GATEWAY, f"cannot listen on {host}:{port} (registry): {error.strerror}", port)
        return
    answers: dict[str, Obstacle] = {}

    def reach(node: ExaminedNode) -> None:
        arguments = {"address": server.address, "timeout_s": timeout_s}
        with node.noting(node.name):
            answers[node.node.node_id] = node.any_probe.call("dial", arguments, timeout_s + _ANSWER_S, Obstacle)

    with contextlib.closing(server):
        list(pool.map(reach, [node for node in nodes if node.report is not None]))
        address = server.address
    for node in nodes:
        found = answers.get(node.node.node_id, Obstacle.NONE)
        if found is not Obstacle.NONE:
            what = f"cannot reach the gateway's registry at {address}: {found}"
            yield fail("control", node.name, what, REMEDIES[found])


def check_control(nodes: Sequence[ExaminedNode], timeout_s: float, pool: Executor) -> Iterator[Finding]:
    """The gateway has to reach every worker's control port. Sets the nodes' clocks, which are compared one after the
    other, because concurrent work in this process would increase the error."""
    ends = [(node, each) for node in nodes for each in node.endpoints.values() if each.control]
    dialled = pool.map(lambda end: dial(end[1].control, timeout_s), ends)
    open_by_node: dict[str, str] = {}
    for (node, each), found in zip(ends, dialled, strict=True):
        if found is Obstacle.NONE:
            open_by_node.setdefault(node.node.node_id, each.control)
        else:
            what = f"the gateway cannot reach it at {each.control} (control): {found}"
            yield fail("control", f"{each.worker_id} on {node.name}", what, REMEDIES[found])
    for node in nodes:
        address = open_by_node.get(node.node.node_id)
        if address is None:
            continue
        if node.report is not None and node.report.clock_id and node.report.clock_id == clock_id():
            node.clock = SAME
            continue
        with contextlib.suppress(OSError):  # the clock stays unknown
            node.clock = read_clock(address, timeout_s)
