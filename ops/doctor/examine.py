"""`pdserve doctor` without its output: starts probes where the workers would run, and checks what they report.

Every wait is bounded; a node that does not answer is a finding.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from checkpoints.draft import resolve_draft
from checkpoints.source import ModelSource, resolve_model
from ops.doctor import checks
from ops.doctor.handoff_prediction import LinkRate, handoff_parts, hidden_tokens_per_s, predict
from ops.doctor.network import REMEDIES, Obstacle, dial
from ops.doctor.node_report import NodeReport, report_versions
from ops.doctor.probes import Site, local_site
from ops.doctor.report import DoctorReport, Endpoints, ExaminedNode, ExaminedPair, Meeting, Seat, fail, warn
from ops.doctor.servers import examine_servers
from ops.launch.discovery import prepare_environment
from ops.launch.plan import Node, plan, resolve_device, roles_of, worker_bundles
from ops.launch.ports import first_port, port_base
from ops.model_memory import ServedModel
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError, LaunchError, ModelError, PdserveError
from pdserve.core.worker import Role
from runtime.dtypes import NativeDtypes, choose_dtype
from runtime.secret import ServiceSecret

JOIN_S = 60.0
_AT_ONCE = 16
_REPORT_S = 120.0  # a process or actor starts and imports torch; then it reads the model's files
_READ_BYTES_PER_S = 100e6  # of a slow disk
_UNKNOWN_MODEL_BYTES = 10**11  # nodes may have a model whose files this host has not
_OPEN_S = 180.0
_DIAL_S = 5.0
_SERVICE = "the service"
_NO_PROBE = (
    "install pdserve there as on this host, and copy ~/.ray/auth_token if there is one; see that node's Ray logs"
)
_CANNOT_JOIN = (
    "~/.ray/auth_token has to be the same on every host, and accessible to its user alone (or RAY_AUTH_MODE=disabled "
    "on all), and the versions of python and ray those of the head; check with `ray status` on the head"
)
PROMPTS = (512, 2048)
"""Prompt lengths, in tokens, for which hand-off times are predicted."""
_MEASURE_S = 0.5
_MEET_S = 60.0  # beyond the probe's own timeouts
Progress = Callable[[str], None]


def diagnose(config: PdserveConfig, progress: Progress = lambda stage: None) -> DoctorReport:
    """Examine the hosts that ``config`` would run on. A Ray that cannot be joined is a finding, too."""
    address = config.cluster.address
    if config.cluster.servers:
        return examine_servers(config)
    if address == "local":
        return Examination(config, local_site(config.cluster.device), progress).run()
    progress(f"joining Ray at {address}")
    if re.fullmatch(r"\S+:\d+", address) and (found := dial(address, _DIAL_S)) is not Obstacle.NONE:
        # Ray itself would retry for minutes and report less.
        remedy = "start Ray there (`ray start --head`), or name the address that `ray status` works with"
        if found is not Obstacle.REFUSED:
            remedy = REMEDIES[found]
        return _not_joined(config, f"there is no Ray at {address}: {found}", remedy)
    with contextlib.ExitStack() as stack:
        try:
            prepare_environment(address)
            from ops.doctor.ray_host import ray_site  # imports Ray

            site = stack.enter_context(ray_site(address, JOIN_S))
        except LaunchError as error:
            return _not_joined(config, str(error), _CANNOT_JOIN)
        return Examination(config, site, progress).run()


def _not_joined(config: PdserveConfig, why: str, remedy: str) -> DoctorReport:
    finding = fail("join", config.cluster.address, " ".join(why.split()), remedy)
    return DoctorReport(config, config.cluster.device, findings=[finding])


def seats_of(
    config: PdserveConfig, device: str, nodes: Sequence[Node], *, idle: bool
) -> tuple[tuple[Seat, ...], tuple[str, ...]]:
    """A seat for each worker, and the names of the workers that no node has room for now. With ``idle`` the nodes count
    as empty. LaunchError if the workers would not fit even onto empty nodes."""
    cluster = config.cluster
    bundles, roles = worker_bundles(cluster, device, nodes, config.engine.slots), roles_of(cluster)
    if idle:
        nodes = [replace(node, available=node.resources) for node in nodes]
    seats: list[Seat] = []
    unplaced: list[str] = []
    placed: Counter[str] = Counter()
    for ordinal, (role, node) in enumerate(zip(roles, plan(roles, bundles, nodes, cluster.placement), strict=True)):
        name = f"{role}-{placed[role]}"
        placed[role] += 1
        if node is None:
            unplaced.append(name)
            continue
        port = first_port(port_base(cluster), ordinal, config.gateway.replicas)
        seats.append(Seat(name, role, node, placed[node.node_id], port, bundles[role]))
        placed[node.node_id] += 1
    if not seats and not cluster.autoscale:
        raise LaunchError(f"no node has room for any of {', '.join(unplaced)} now")
    return tuple(seats), tuple(unplaced)


class Examination:
    """One examination of the nodes of ``site``. Call `run` once."""

    def __init__(self, config: PdserveConfig, site: Site, progress: Progress = lambda stage: None) -> None:
        self._site, self._say = site, progress
        # Any service but the examined one is an obstacle.
        own_port = config.gateway.port if config.gateway.port in site.services else 0
        self._seen = DoctorReport(config, "cpu", site.services, own_port, site.node_id)
        self._secret = ServiceSecret.new()  # of the probes
        self._nodes: dict[str, ExaminedNode] = {}
        self._command = "" if config.has_own_engines else config.worker.program
        self._timeout_s = min(config.transfer.connect_timeout_s, _DIAL_S)

    def run(self) -> DoctorReport:
        """Examine all nodes, and end the probes."""
        with ThreadPoolExecutor(_AT_ONCE, "doctor") as pool:
            try:
                return self._examine(pool)
            finally:
                self._say("closing")
                probes = [probe for node in self._nodes.values() for probe in node.probes.values()]
                list(pool.map(lambda probe: probe.close(), probes))

    def _examine(self, pool: ThreadPoolExecutor) -> DoctorReport:
        seen = self._seen
        seats = self._seat(list(self._site.nodes))
        seen.nodes = [*self._nodes.values()]
        model_bytes, draft = _UNKNOWN_MODEL_BYTES, None
        with contextlib.suppress(ModelError, OSError):  # a finding of check_models
            seen.source = source = resolve_model(seen.config.model.path, self._say, served=seen.config.has_own_engines)
            seen.set_model(path=source.path)
            model_bytes = sum(path.stat().st_size for path in source.weight_files())
            draft = self._draft(source)
        self._say(f"starting probes for {len(seats)} workers on {len(seen.nodes)} nodes, which read the model's files")
        report_s = _REPORT_S + model_bytes / _READ_BYTES_PER_S
        list(pool.map(lambda node: self._start_probes(node, report_s), seen.nodes))
        if seen.source is not None:
            self._decide_dtype(seen.source)
            seen.need = ServedModel.of(seen.source, seen.config, seen.device, draft)
        self._say("opening the workers' ports and KV ends")
        list(pool.map(self._open, seen.nodes))
        self._say("connecting to workers, comparing clocks")
        for check in checks.AT_GATEWAY:
            seen.findings += check(seen)
        seen.findings += checks.check_control(seen, self._timeout_s, pool)
        seen.findings += checks.check_registry(seen, self._site.host, self._timeout_s, pool)
        if seen.config.moves_kv:
            seen.pairs = [*self._pairs(seats, pool)]
        self._say("reading the model's files here")
        seen.here = report_versions(seen.config.model.path, self._command, seen.config.engine.draft_model)
        for check in checks.CHECKS:
            seen.findings += check(seen)
        seen.findings[:0] = [each for node in seen.nodes for each in node.findings]
        return seen

    def _seat(self, nodes: list[Node]) -> tuple[Seat, ...]:
        """The workers' seats. Nodes with a seat are examined, or all of them if the workers cannot be placed."""
        seats: tuple[Seat, ...] = ()
        seen, cluster = self._seen, self._seen.config.cluster
        if not self._site.local and len(nodes) < (cluster.nodes or 0):
            what = f"cluster.nodes: {cluster.nodes} are wanted, and Ray has {len(nodes)}: `up` would wait for them"
            remedy = "start Ray on the others (`ray status` lists the present ones), and examine again"
            self._seen.findings.append(warn("slots", _SERVICE, what, remedy))
        check, remedy = (
            "device",
            "see `nvidia-smi` and torch's build (a CPU build sees no GPU) there; restart Ray; or --device cpu",
        )
        try:
            seen.device = resolve_device(cluster, nodes)
            check, remedy = (
                "slots",
                "change the options that it names; `ray status` shows what nodes have and what is used",
            )
            # The resources of the service itself, if it is running, count as free.
            seats, unplaced = seats_of(seen.config, seen.device, nodes, idle=bool(seen.own_port))
        except LaunchError as error:
            self._seen.findings.append(fail(check, _SERVICE, str(error), remedy))
        else:
            self._report_unplaced(unplaced)
        for node in nodes:
            mine = tuple(seat for seat in seats if seat.node.node_id == node.node_id)
            if mine or not seats:
                self._nodes[node.node_id] = ExaminedNode(node, mine)
        return seats

    def _report_unplaced(self, names: Sequence[str]) -> None:
        if not names:
            return
        what = f"no node has room for {', '.join(names)} now"
        if self._seen.config.cluster.autoscale:
            remedy = "Ray's autoscaler, if there is one, adds a node; examine again when it has joined"
            self._seen.findings.append(warn("slots", _SERVICE, f"{what}: they would wait for one", remedy))
        else:
            remedy = "free what is used (`ray status`), add nodes, or ask for fewer workers"
            self._seen.findings.append(fail("slots", _SERVICE, what, remedy))

    def _start_probes(self, node: ExaminedNode, report_s: float) -> None:
        """Start a probe per worker, and have the first one report on the node within ``report_s`` seconds."""
        for name in [seat.worker_id for seat in node.seats] or ["no worker"]:
            node.probes[name] = self._site.start(node.node, f"the probe of {name}")
        with node.noting(node.name, _NO_PROBE):
            config = self._seen.config
            arguments = {"model": config.model.path, "command": self._command, "draft": config.engine.draft_model}
            node.report = node.any_probe.call("report", arguments, report_s, NodeReport)

    def _draft(self, source: ModelSource) -> ModelSource | None:
        """The draft model, which guesses tokens of ``source``; None if there is none that can."""
        seen, path = self._seen, self._seen.config.engine.draft_model
        if not path:
            return None
        with contextlib.suppress(ConfigError):  # a finding of check_models
            draft = resolve_draft(path, source, self._say)
            engine = seen.config.engine.model_copy(update={"speculation": draft.path})
            seen.config = seen.config.model_copy(update={"engine": engine})
            return draft
        return None

    def _decide_dtype(self, source: ModelSource) -> None:
        """Choose one dtype for all workers, as `up` would."""
        places: dict[str, list[NativeDtypes]] = {}
        for node in self._seen.nodes:
            if node.report is not None and node.seats:
                places.setdefault(node.name, []).extend(node.report.native.get(self._seen.device, ()))
        asked = self._seen.config.model.dtype
        choice = choose_dtype(asked, source.shape.dtype, places)
        self._seen.findings += checks.check_dtype(asked, choice)
        self._seen.set_model(dtype=choice.dtype)

    def _open(self, node: ExaminedNode) -> None:
        if node.report is None:
            return
        host = self._site.host if self._site.local else node.node.ip
        for seat in node.seats:
            device = self._seen.device
            if device == "cuda":
                device = f"cuda:{seat.index_on_node % max(1, len(node.report.devices))}"
            spec = seat.spec(self._seen.config, self._seen.device, host).to_wire()
            model_hash = node.report.model_hash  # the files are read once on each node
            arguments = {"spec": spec, "device": device, "secret": self._secret.hex(), "model_hash": model_hash}
            with node.noting(f"{seat.worker_id} on {node.name}"):
                probe = node.probes[seat.worker_id]
                node.endpoints[seat.worker_id] = probe.call("open", arguments, _OPEN_S, Endpoints)

    def _pairs(self, seats: Sequence[Seat], pool: ThreadPoolExecutor) -> Iterator[ExaminedPair]:
        """Connect every prefill worker among ``seats`` to every decode worker, all at once, then measure the links one
        by one. Hand-offs are predicted only if the model is known."""
        transfer, model = self._seen.config.transfer, self._seen.need
        decodes = [seat for seat in seats if seat.role is Role.DECODE]
        pairs = [(prefill, decode) for prefill in seats if prefill.role is Role.PREFILL for decode in decodes]
        self._say(f"trying {len(pairs)} pairs")
        meetings = list(pool.map(lambda pair: self._meet(pair[0], pair[1], 0.0), pairs))
        to_measure = min(checks.MOST_MEASURED, sum(tried.figures is not None for tried in meetings))
        measured = 0
        for (prefill, decode), meeting in zip(pairs, meetings, strict=True):
            pair = ExaminedPair(prefill, decode, meeting)
            if meeting.figures is not None and measured < to_measure:
                measured += 1
                self._say(f"measuring {prefill.worker_id} → {decode.worker_id} ({measured} of {to_measure})")
                pair = replace(pair, meeting=self._meet(prefill, decode, _MEASURE_S))
            figures = pair.meeting.figures
            if figures is not None and figures.gbs and model is not None:
                link = LinkRate(figures.gbs, figures.round_trip_s, transfer.max_inflight_bytes)
                predictions = {
                    tokens: predict(handoff_parts(model.layout, tokens, tokens, "none", 0), link, 0.0)
                    for tokens in sorted(
                        {min(tokens, model.context, model.pool_tokens() or tokens) for tokens in PROMPTS}
                    )
                }
                hidden = hidden_tokens_per_s(model.layout, link)
                pair = replace(pair, predictions=predictions, hidden_tokens_per_s=hidden)
            yield pair

    def _meet(self, prefill: Seat, decode: Seat, for_s: float) -> Meeting:
        nodes = [self._nodes[seat.node.node_id] for seat in (prefill, decode)]
        for seat, node in zip((prefill, decode), nodes, strict=True):
            end = node.endpoints.get(seat.worker_id)
            if end is None or not end.kv:
                return Meeting(obstacle=Obstacle.NOT_TRIED, what=f"{seat.worker_id} has no KV end")
        assert end is not None
        timeout_s = self._seen.config.transfer.connect_timeout_s
        arguments = {"worker_id": decode.worker_id, "endpoints": end.kv, "for_s": for_s, "timeout_s": timeout_s}
        try:
            return nodes[0].probes[prefill.worker_id].call("meet", arguments, 4 * timeout_s + _MEET_S, Meeting)
        except PdserveError as error:
            return Meeting(obstacle=Obstacle.TIMED_OUT, what=str(error))
