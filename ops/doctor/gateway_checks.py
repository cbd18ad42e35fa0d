"""What the gateway's host has to offer: its two ports, and that workers and gateway reach each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

from engine.model.folder import tokenizer_note
from engine.model.source import resolve_model
from gateway.tokenizer import load_tokenizer
from ops.doctor.dial import REMEDIES, Dial, dial
from ops.doctor.finding import Finding, fail, ok, warn
from ops.doctor.listeners import listener_on
from ops.doctor.ping import SAME, PingServer, read_clock
from ops.doctor.site import HANGS, Site
from ops.launch.ports import free_port
from pdserve.core.clock import clock_id
from pdserve.core.config import GatewayConfig
from pdserve.core.errors import LaunchError, ModelError

_GATEWAY = "the gateway"
_ANSWER_S = 5.0


def check_gateway_port(gateway: GatewayConfig, services: Sequence[int]) -> Iterator[Finding]:
    """The public one."""
    try:
        free_port(gateway.host, gateway.port)
    except LaunchError as error:
        if gateway.port in services:
            yield ok("port", _GATEWAY, f"the service on port {gateway.port} runs; a second one needs another port")
        else:
            remedy = "end what holds it, or choose another with --port (gateway.port)"
            yield fail("port", _GATEWAY, f"{error}{_held(gateway.port)}", remedy)


def check_tokenizer(model: str) -> Iterator[Finding]:
    """The gateway turns text into tokens, if it can read the folder's tokenizer.json."""
    try:
        folder = resolve_model(model).folder
    except ModelError:
        return  # which is a finding of the nodes
    try:
        if note := tokenizer_note(folder):
            yield warn("tokenizer", _GATEWAY, note, "convert the tokenizer, or have clients send token ids")
        else:
            load_tokenizer(folder)
    except ModelError as error:
        yield fail("tokenizer", _GATEWAY, str(error), "download the file again")


def check_registry(
    host: str, port: int, sites: Sequence[Site], services: Sequence[int], timeout_s: float, pool: Executor
) -> Iterator[Finding]:
    """Workers report to ``host`` and ``port`` (0: any): a listener stands there while every node dials it."""
    try:
        server = PingServer(host, port)
    except OSError as error:
        what = f"cannot listen on {host}:{port} (registry): {error.strerror}{_held(port)}"
        if not services:  # else it is the service's own
            yield fail("port", _GATEWAY, what, "end what holds it, or move pdserve's ports with cluster.port_base")
        return
    address = f"{f'[{host}]' if ':' in host else host}:{server.port}"

    answers: dict[str, Dial] = {}

    def reach(site: Site) -> None:
        arguments = {"address": address, "timeout_s": timeout_s}
        with site.noting(site.node.ip, HANGS):
            answers[site.node.node_id] = Dial(site.any_probe.call("dial", arguments, timeout_s + _ANSWER_S))

    with contextlib.closing(server):
        list(pool.map(reach, [site for site in sites if site.report is not None]))
    for site in sites:
        found = answers.get(site.node.node_id, Dial.OPEN)
        if found is not Dial.OPEN:
            what = f"cannot reach the gateway's registry at {address}: {found}"
            yield fail("control", site.node.ip, what, REMEDIES[found])


def check_control(sites: Sequence[Site], timeout_s: float, pool: Executor) -> Iterator[Finding]:
    """The gateway reaches every worker's control port. Over those that it reaches, one for each node, clocks are
    compared: one after the other, since what else runs in this process would be in their error."""
    ends = [(site, each) for site in sites for each in site.endpoints.values() if each.control]
    dialled = pool.map(lambda end: dial(end[1].control, timeout_s), ends)
    open_by_node: dict[str, str] = {}
    for (site, each), found in zip(ends, dialled, strict=True):
        if found is Dial.OPEN:
            open_by_node.setdefault(site.node.node_id, each.control)
        else:
            what = f"the gateway cannot reach it at {each.control} (control): {found}"
            yield fail("control", f"{each.worker_id} on {site.node.ip}", what, REMEDIES[found])
    for site in sites:
        address = open_by_node.get(site.node.node_id)
        if address is None:
            continue
        if site.report is not None and site.report.clock_id and site.report.clock_id == clock_id():
            site.clock = SAME
            continue
        with contextlib.suppress(OSError):  # it has just gone: then the clock stays unknown
            site.clock = read_clock(address, timeout_s)


def _held(port: int) -> str:
    holder = listener_on(port)
    return f"; {holder} listens there" if holder else ""
