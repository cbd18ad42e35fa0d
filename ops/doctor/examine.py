"""Drives an examination: probes where the workers would be, what they say, whom they reach and how fast. Every wait is
bounded; a node that does not answer is a finding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.model.dtypes import NativeDtypes, choose_dtype
from engine.model.source import resolve_model
from ops.doctor.endpoints import Endpoints
from ops.doctor.finding import Finding, fail, ok, warn
from ops.doctor.gateway_checks import (
    check_control,
    check_gateway_port,
    check_registry,
    check_tokenizer,
)
from ops.doctor.memory_need import MemoryNeed, layout_of, longest_prompt, need_of
from ops.doctor.node_checks import (
    check_clocks,
    check_cores,
    check_devices,
    check_dtype,
    check_endpoints,
    check_memory,
    check_models,
    check_versions,
)
from ops.doctor.node_report import NodeReport, report_versions
from ops.doctor.pair_checks import check_reach, check_speed
from ops.doctor.pairs import MOST_MEASURED, Pairs, ServedModel
from ops.doctor.probe_host import ProbeHost
from ops.doctor.report import ExaminedNode, ExaminedPair, Report
from ops.doctor.seats import Seat, seats_of
from ops.doctor.site import HANGS, Site
from ops.launch.plan import Node
from ops.launch.ports import port_base
from ops.launch.slots import resolve_device
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError, ModelError

_AT_ONCE = 16
_REPORT_S = 120.0  # a process or actor starts, and imports torch
_OPEN_S = 180.0
_DIAL_S = 5.0
_SERVICE = "the service"
_NO_PROBE = "pdserve, and ~/.ray/auth_token if there is one, have to be there as here; see that node's Ray logs"
Progress = Callable[[str], None]


class Examination:
    """One run of the doctor over the nodes of ``host``. `run` once."""

    def __init__(self, config: PdserveConfig, host: ProbeHost, progress: Progress = lambda stage: None) -> None:
        self._config, self._host, self._say = config, host, progress
        self._findings: list[Finding] = []
        self._device = "cpu"
        self._own: tuple[int, ...] = ()  # the port of the very service that is examined, if it runs already
        self._sites: dict[str, Site] = {}
        self._timeout_s = min(config.transfer.connect_timeout_s, _DIAL_S)

    def run(self) -> Report:
        """Examine everything; nothing that was started for it is left then."""
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE, "doctor"))
            stack.callback(self._close_probes, pool)
            return self._examine(pool)

    def _examine(self, pool: ThreadPoolExecutor) -> Report:
        self._say("asking for nodes")
        nodes = list(self._host.nodes())
        running = tuple(self._host.services())
        # Another service is in the way of this one, as anything else that runs there.
        self._own = tuple(port for port in running if port == self._config.gateway.port)
        seats = self._seat(nodes)
        sites = [*self._sites.values()]
        self._say(f"starting probes for {len(seats)} workers on {len(sites)} nodes")
        list(pool.map(self._start_probes, sites))
        self._decide_dtype(sites)
        self._say("opening what workers would open")
        list(pool.map(self._open, sites))
        self._say("reaching workers, comparing clocks")
        config = self._config
        self._findings += check_gateway_port(config.gateway, self._own)
        self._findings += check_tokenizer(config.model.path)
        self._findings += check_control(sites, self._timeout_s, pool)
        base = port_base(config.cluster)
        self._findings += check_registry(self._host.host, base, sites, self._own, self._timeout_s, pool)
        model, need = self._model()
        pairs = [*Pairs(config, self._sites, config.transfer.connect_timeout_s, model).examine(seats, pool, self._say)]
        examined = [site.examined() for site in sites]
        self._check_nodes(examined, need)
        self._check_pairs(pairs, examined)
        return Report(
            model=config.model.path,
            device=self._device,
            address=config.cluster.address,
            transport=config.transfer.transport,
            services=running,
            need=need,
            nodes=tuple(examined),
            pairs=tuple(pairs),
            findings=tuple([*(each for site in sites for each in site.findings), *self._findings]),
        )

    # --- where -------------------------------------------------------------------------------------------------------

    def _seat(self, nodes: list[Node]) -> tuple[Seat, ...]:
        """The workers' seats, and a site for each node that has one; without a plan, one for every node."""
        seats: tuple[Seat, ...] = ()
        cluster = self._config.cluster
        if not self._host.local and len(nodes) < (cluster.nodes or 0):
            what = f"cluster.nodes: {cluster.nodes} are wanted, and Ray has {len(nodes)}: `up` would wait for them"
            remedy = "start Ray on the others (`ray status` shows who is there), and examine again"
            self._findings.append(warn("slots", _SERVICE, what, remedy))
        try:
            self._device = resolve_device(cluster, nodes)
        except LaunchError as error:
            remedy = (
                "see `nvidia-smi` and torch's build (a CPU one sees no GPU) there; start Ray again; or --device cpu"
            )
            self._findings.append(fail("device", _SERVICE, str(error), remedy))
            self._sites = {node.node_id: Site(node, ()) for node in nodes}
            return ()
        try:
            # What the service itself holds, if it runs, is no obstacle.
            seats, left_over = seats_of(self._config, self._device, nodes, idle=bool(self._own))
        except LaunchError as error:
            remedy = "change the options that it names; `ray status` shows what nodes have and what is used"
            self._findings.append(fail("slots", _SERVICE, str(error), remedy))
        else:
            self._tell_left_over(left_over)
        for node in nodes:
            mine = tuple(seat for seat in seats if seat.node.node_id == node.node_id)
            if mine or not seats:
                self._sites[node.node_id] = Site(node, mine)
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

    # --- probes ------------------------------------------------------------------------------------------------------

    def _start_probes(self, site: Site) -> None:
        """The first one also tells of the node."""
        for name in [seat.worker_id for seat in site.seats] or ["nobody"]:
            site.probes[name] = self._host.probe(site.node, f"the probe of {name}")
        with site.noting(site.node.ip, _NO_PROBE):
            answer = site.any_probe.call("report", {"model": self._config.model.path}, _REPORT_S)
            site.report = NodeReport.from_wire(answer)

    def _decide_dtype(self, sites: Sequence[Site]) -> None:
        """As `up` would: one for all workers."""
        try:
            checkpoint = resolve_model(self._config.model.path).shape.dtype
        except ModelError:  # which is a finding of the nodes
            return
        places: dict[str, list[NativeDtypes]] = {}
        for site in sites:
            if site.report is not None and site.seats:
                places.setdefault(site.node.ip, []).extend(site.report.native.get(self._device, ()))
        asked = self._config.model.dtype
        choice = choose_dtype(asked, checkpoint, places)
        self._findings += check_dtype(asked, choice)
        model = self._config.model.model_copy(update={"dtype": choice.dtype})
        self._config = self._config.model_copy(update={"model": model})

    def _open(self, site: Site) -> None:
        if site.report is None:
            return
        host = self._host.host if self._host.local else site.node.ip
        for seat in site.seats:
            device = self._device
            if device == "cuda":
                device = f"cuda:{seat.slot % max(1, len(site.report.devices))}"
            arguments = {"spec": seat.spec(self._config, self._device, host).to_wire(), "device": device}
            with site.noting(f"{seat.worker_id} on {site.node.ip}", HANGS):
                answer = site.probes[seat.worker_id].call("open", arguments, _OPEN_S)
                site.endpoints[seat.worker_id] = Endpoints.from_wire(answer)

    def _close_probes(self, pool: ThreadPoolExecutor) -> None:
        self._say("closing")
        list(pool.map(lambda probe: probe.close(), [p for site in self._sites.values() for p in site.probes.values()]))

    # --- what came of it ---------------------------------------------------------------------------------------------

    def _model(self) -> tuple[ServedModel | None, MemoryNeed | None]:
        """As the gateway's host has it; an unreadable one is a finding of the nodes."""
        try:
            source = resolve_model(self._config.model.path)
            layout = layout_of(source, self._config)
        except ModelError:
            return None, None
        longest = longest_prompt(source, self._config, layout, self._device)
        return ServedModel(layout, longest), need_of(source, self._config, layout, self._device)

    def _check_nodes(self, nodes: Sequence[ExaminedNode], need: MemoryNeed | None) -> None:
        here = report_versions(self._config.model.path)
        self._findings += check_versions(here, nodes)
        self._findings += check_models(here, self._host.node_id, nodes, self._config.model.path)
        self._findings += check_devices(nodes, self._device)
        cluster = self._config.cluster
        self._findings += check_cores(
            nodes, self._device, cluster.cores_per_worker, self._own, oversubscribed=cluster.oversubscribe
        )
        self._findings += check_endpoints(nodes, self._device, self._own)
        if need is not None:
            self._findings += check_memory(nodes, need, self._device, self._own)
        self._findings += check_clocks(nodes, here)

    def _check_pairs(self, pairs: Sequence[ExaminedPair], nodes: Sequence[ExaminedNode]) -> None:
        interfaces = {
            each.worker_id: each.interface for node in nodes for each in node.endpoints if each.interface is not None
        }
        self._findings += check_reach(pairs)
        self._findings += check_speed(pairs, interfaces)
        left = sum(pair.meeting.figures is not None and not pair.measured for pair in pairs)
        if left:
            what = f"{left} of {len(pairs)} pairs were tried and not measured: at most {MOST_MEASURED} are"
            self._findings.append(ok("link", _SERVICE, what))
