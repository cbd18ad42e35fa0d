"""Drives an examination: probes where the workers would be, what they say, whom they reach and how fast. Every wait is
bounded; a node that does not answer is a finding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from core.clock import clock_id
from core.config import PdserveConfig
from core.errors import LaunchError, ModelError, PdserveError
from core.handoff_prediction import LinkRate, hidden_tokens_per_s
from core.kv_layout import KVLayout
from core.worker import Role
from engine.model_source import ModelSource, resolve_model
from pdserve.doctor.dial import REMEDIES, Dial
from pdserve.doctor.endpoints import Endpoints
from pdserve.doctor.finding import Finding, fail, ok, warn
from pdserve.doctor.listeners import listener_on
from pdserve.doctor.meeting import Meeting, Obstacle
from pdserve.doctor.memory_need import MemoryNeed, layout_of, longest_prompt, need_of
from pdserve.doctor.node_checks import (
    check_clocks,
    check_devices,
    check_endpoints,
    check_memory,
    check_models,
    check_versions,
)
from pdserve.doctor.node_report import NodeReport, report_versions
from pdserve.doctor.pair_checks import check_reach, check_speed
from pdserve.doctor.ping import SAME, ClockReading, PingServer, read_clock
from pdserve.doctor.probe_host import ProbeHandle, ProbeHost
from pdserve.doctor.report import ExaminedNode, ExaminedPair, Report, predictions
from pdserve.doctor.seats import Seat, seats_of
from pdserve.launch.plan import Node
from pdserve.launch.ports import free_port, port_base
from pdserve.launch.slots import resolve_device

MOST_MEASURED = 64
"""Pairs beyond these are only tried for reachability: each costs a second."""
_AT_ONCE = 16
_MEASURE_S = 0.5
_REPORT_S = 120.0  # a process or actor starts, and imports torch
_OPEN_S = 60.0
_CLOSE_S = 20.0
_DIAL_S = 5.0
_SERVICE, _GATEWAY = "the service", "the gateway"
T = TypeVar("T")
U = TypeVar("U")
Progress = Callable[[str], None]


@dataclass(slots=True)
class _Site:
    """A node while it is examined: its probes by worker (one named after nobody, if it gets no worker)."""

    node: Node
    seats: tuple[Seat, ...]
    probes: dict[str, ProbeHandle] = field(default_factory=dict)
    report: NodeReport | None = None
    endpoints: dict[str, Endpoints] = field(default_factory=dict)
    clock: ClockReading | None = None


class Examination:
    """One run of the doctor over the nodes of ``host``. `run` once."""

    def __init__(self, config: PdserveConfig, host: ProbeHost, progress: Progress = lambda stage: None) -> None:
        self._config, self._host, self._say = config, host, progress
        self._findings: list[Finding] = []
        self._device = "cpu"
        self._services: tuple[int, ...] = ()
        self._sites: dict[str, _Site] = {}
        self._timeout_s = min(config.transfer.connect_timeout_s, _DIAL_S)

    def run(self) -> Report:
        """Examine everything; nothing that was started for it is left then."""
        with contextlib.ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE, "doctor"))
            stack.callback(self._close_probes)
            return self._examine()

    def _examine(self) -> Report:
        config = self._config
        self._say("asking for nodes")
        nodes = list(self._host.nodes())
        self._services = tuple(self._host.services())
        base = port_base(config.cluster)
        seats = self._seats(nodes)
        here = report_versions(config.model.path)
        self._say(f"starting probes for {len(seats)} workers on {len(self._sites)} nodes")
        self._each(self._start_probes, self._sites.values())
        self._say("opening what workers would open")
        self._each(self._open, self._sites.values())
        self._check_gateway_port()
        self._say("comparing clocks")
        self._each(self._read_clock, self._sites.values())
        self._check_registry(base)
        source, layout, need = self._model()
        pairs = self._pairs(seats, source, layout)
        examined = tuple(
            ExaminedNode(site.node, site.seats, site.report, site.clock, tuple(site.endpoints.values()))
            for site in self._sites.values()
        )
        interfaces = {
            each.worker_id: each.interface for node in examined for each in node.endpoints if each.interface is not None
        }
        self._findings += check_versions(here, examined)
        self._findings += check_models(here, self._host.node_id, examined, config.model.path)
        self._findings += check_devices(examined, self._device)
        self._findings += check_endpoints(examined, self._device, self._services)
        if need is not None:
            self._findings += check_memory(examined, need, self._device, self._services)
        self._findings += check_clocks(examined, here)
        self._findings += check_reach(pairs)
        self._findings += check_speed(pairs, interfaces)
        return Report(
            model=config.model.path,
            device=self._device,
            address=config.cluster.address,
            transport=config.transfer.transport,
            services=self._services,
            need=need,
            nodes=examined,
            pairs=tuple(pairs),
            findings=tuple(self._findings),
        )

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _seats(self, nodes: list[Node]) -> tuple[Seat, ...]:
        """The workers' seats, and a site for each node that has one; without a plan, one for every node."""
        seats: tuple[Seat, ...] = ()
        cluster = self._config.cluster
        try:
            self._device = resolve_device(cluster, nodes)
            # What a running service holds is no obstacle: it is examined as if it were not there.
            seats, left_over = seats_of(self._config, self._device, nodes, idle=bool(self._services))
        except LaunchError as error:
            remedy = "change the options that it names; `ray status` shows what nodes have and what is used"
            self._findings.append(fail("slots", _SERVICE, str(error), remedy))
        else:
            self._tell_left_over(left_over)
        for node in nodes:
            mine = tuple(seat for seat in seats if seat.node.node_id == node.node_id)
            if mine or not seats:
                self._sites[node.node_id] = _Site(node, mine)
        return seats

    def _tell_left_over(self, names: Sequence[str]) -> None:
        if not names:
            return
        what = f"no node has room for {', '.join(names)} now"
        if self._config.cluster.autoscale:
            remedy = "Ray is asked for a node, if it has an autoscaler; examine again when that has come"
            self._findings.append(warn("slots", _SERVICE, f"{what}: they would wait for one", remedy))
        else:
            remedy = "free what is used (`ray status`), add nodes, or ask for fewer workers"
            self._findings.append(fail("slots", _SERVICE, what, remedy))

    def _start_probes(self, site: _Site) -> None:
        """The first probe also tells of the node."""
        for name in [seat.worker_id for seat in site.seats] or ["nobody"]:
            site.probes[name] = self._host.probe(site.node, f"the probe of {name}")
        first = next(iter(site.probes.values()))
        with self._finding(
            "probe", site.node.ip, "see that node's Ray logs; pdserve has to be installed there as here"
        ):
            site.report = NodeReport.from_wire(first.call("report", {"model": self._config.model.path}, _REPORT_S))

    def _open(self, site: _Site) -> None:
        if site.report is None:
            return
        host = self._host.host if self._host.local else site.node.ip
        for seat in site.seats:
            spec = seat.spec(self._config, self._device, host)
            device = self._device
            if device == "cuda":
                device = f"cuda:{seat.slot % max(1, len(site.report.devices))}"
            remedy = "the node, or what runs there, hangs: see its load and Ray's logs"
            with self._finding("probe", f"{seat.worker_id} on {site.node.ip}", remedy):
                answer = site.probes[seat.worker_id].call("open", {"spec": spec.to_wire(), "device": device}, _OPEN_S)
                site.endpoints[seat.worker_id] = Endpoints.from_wire(answer)

    def _read_clock(self, site: _Site) -> None:
        """By way of the ports on which the gateway would reach the workers."""
        for worker_id, endpoints in site.endpoints.items():
            if not endpoints.control:
                continue
            try:
                reading = read_clock(endpoints.control, self._timeout_s)
            except OSError as error:
                found = Dial.of(error)
                what = f"the gateway cannot reach it at {endpoints.control} (control): {found}"
                self._findings.append(fail("control", f"{worker_id} on {site.node.ip}", what, REMEDIES[found]))
                continue
            if site.report is not None and site.report.clock_id and site.report.clock_id == clock_id():
                reading = SAME
            if site.clock is None or reading.error_s < site.clock.error_s:
                site.clock = reading

    # --- the gateway's ports -----------------------------------------------------------------------------------------

    def _check_gateway_port(self) -> None:
        gateway = self._config.gateway
        try:
            free_port(gateway.host, gateway.port)
        except LaunchError as error:
            if gateway.port in self._services:
                what = f"the service on port {gateway.port} runs; a second one needs another port"
                self._findings.append(ok("port", _GATEWAY, what))
                return
            remedy = "end what holds it, or choose another with --port (gateway.port)"
            self._findings.append(fail("port", _GATEWAY, f"{error}{_held(gateway.port)}", remedy))

    def _check_registry(self, base: int) -> None:
        """Workers report to the gateway's host: a listener stands there for the registry."""
        try:
            server = PingServer(self._host.host, base)
        except OSError as error:
            what = f"cannot listen on {self._host.host}:{base} (registry): {error.strerror}"
            what += _held(base)
            if self._services:
                self._findings.append(ok("port", _GATEWAY, f"{what}: a service runs already"))
            else:
                remedy = "end what holds it, or move pdserve's ports with cluster.port_base"
                self._findings.append(fail("port", _GATEWAY, what, remedy))
            return
        with contextlib.closing(server):
            host = f"[{self._host.host}]" if ":" in self._host.host else self._host.host
            self._each(lambda site: self._dial_registry(site, f"{host}:{server.port}"), self._sites.values())

    def _dial_registry(self, site: _Site, address: str) -> None:
        if site.report is None:
            return
        with self._finding("probe", site.node.ip, "the node, or what runs there, hangs"):
            probe = next(iter(site.probes.values()))
            found = Dial(
                probe.call("dial", {"address": address, "timeout_s": self._timeout_s}, self._timeout_s + _DIAL_S)
            )
            if found is not Dial.OPEN:
                what = f"cannot reach the gateway's registry at {address}: {found}"
                self._findings.append(fail("control", site.node.ip, what, REMEDIES[found]))

    # --- pairs -------------------------------------------------------------------------------------------------------

    def _model(self) -> tuple[ModelSource | None, KVLayout | None, MemoryNeed | None]:
        """As the gateway's host has it; an unreadable one is a finding already."""
        try:
            source = resolve_model(self._config.model.path)
            layout = layout_of(source, self._config)
        except ModelError:
            return None, None, None
        return source, layout, need_of(source, self._config, layout, self._device)

    def _pairs(self, seats: Sequence[Seat], source: ModelSource | None, layout: KVLayout | None) -> list[ExaminedPair]:
        prefills = [seat for seat in seats if seat.role is Role.PREFILL]
        decodes = [seat for seat in seats if seat.role is Role.DECODE]
        pairs = [(prefill, decode) for prefill in prefills for decode in decodes]
        self._say(f"trying {len(pairs)} pairs")
        meetings = self._each(lambda pair: self._meet(*pair, 0.0), pairs)
        measured = 0
        examined: list[ExaminedPair] = []
        for (prefill, decode), tried in zip(pairs, meetings, strict=True):
            meeting, measure = tried, tried.figures is not None and measured < MOST_MEASURED
            if measure:
                measured += 1
                self._say(f"measuring {prefill.worker_id} → {decode.worker_id} ({measured})")
                meeting = self._meet(prefill, decode, _MEASURE_S)
            examined.append(self._examined(prefill, decode, meeting, measure, source, layout))
        left = sum(pair.meeting.figures is not None and not pair.measured for pair in examined)
        if left:
            what = f"{left} of {len(pairs)} pairs were tried, and not measured: {MOST_MEASURED} are at most"
            self._findings.append(ok("link", _SERVICE, what))
        return examined

    def _meet(self, prefill: Seat, decode: Seat, for_s: float) -> Meeting:
        ends = self._endpoints(decode)
        for seat, found in ((prefill, self._endpoints(prefill)), (decode, ends)):
            if found is None or not found.kv:
                return Meeting(obstacle=Obstacle.NOT_TRIED, what=f"{seat.worker_id} has no KV end")
        assert ends is not None
        probe = self._sites[prefill.node.node_id].probes[prefill.worker_id]
        try:
            arguments = {
                "worker_id": decode.worker_id,
                "endpoints": [asdict(each) for each in ends.kv],
                "for_s": for_s,
                "timeout_s": self._timeout_s,
            }
            answer = probe.call("meet", arguments, 4 * self._timeout_s + _OPEN_S)
        except PdserveError as error:
            return Meeting(obstacle=Obstacle.TIMED_OUT, what=str(error))
        return Meeting.from_wire(answer)

    def _examined(
        self,
        prefill: Seat,
        decode: Seat,
        meeting: Meeting,
        measured: bool,
        source: ModelSource | None,
        layout: KVLayout | None,
    ) -> ExaminedPair:
        figures, engine, transfer = meeting.figures, self._config.engine, self._config.transfer
        if not measured or figures is None or not figures.gbs or source is None or layout is None:
            return ExaminedPair(prefill, decode, meeting, measured and figures is not None, (), None)
        link = LinkRate(figures.gbs, figures.round_trip_s, transfer.max_inflight_bytes)
        longest = longest_prompt(source, self._config, layout, self._device)
        found = predictions(layout, longest, link, engine.max_num_batched_tokens, transfer.layer_groups)
        return ExaminedPair(prefill, decode, meeting, True, found, hidden_tokens_per_s(layout, link))

    def _endpoints(self, seat: Seat) -> Endpoints | None:
        return self._sites[seat.node.node_id].endpoints.get(seat.worker_id)

    # --- help --------------------------------------------------------------------------------------------------------

    def _each(self, work: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """Several at a time, in order."""
        return list(self._pool.map(work, items))

    @contextlib.contextmanager
    def _finding(self, check: str, where: str, remedy: str) -> Iterator[None]:
        """An error within is a finding."""
        try:
            yield
        except PdserveError as error:
            self._findings.append(fail(check, where, str(error), remedy))

    def _close_probes(self) -> None:
        self._say("closing")
        probes = [probe for site in self._sites.values() for probe in site.probes.values()]
        self._each(lambda probe: probe.close(), probes)


def _held(port: int) -> str:
    holder = listener_on(port)
    return f"; {holder} listens there" if holder else ""
