"""`pdserve doctor` without its output: starts probes where the workers would run, and checks what they report.

Every wait is bounded; a node that does not answer is a finding.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from checkpoints.source import ModelSource, resolve_model
from ops.doctor import gateway_checks, node_checks
from ops.doctor.finding import Finding, fail, warn
from ops.doctor.local_host import LocalHost
from ops.doctor.network import REMEDIES, Obstacle, dial
from ops.doctor.node_report import NodeReport, report_versions
from ops.doctor.pairs import check_measured, check_reach, check_speed, examine_pairs
from ops.doctor.probe_api import Endpoints, ProbeHost
from ops.doctor.report import ExaminedNode, Report
from ops.doctor.seats import Seat, seats_of
from ops.launch.discovery import prepare_environment
from ops.launch.plan import Node, resolve_device
from ops.launch.ports import port_base
from ops.model_memory import ServedModel
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError, ModelError
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
Progress = Callable[[str], None]


def diagnose(config: PdserveConfig, progress: Progress = lambda stage: None) -> Report:
    """Examine the hosts that ``config`` would run on. A Ray that cannot be joined is a finding, too."""
    address = config.cluster.address
    if address == "local":
        return Examination(config, LocalHost(config.cluster.device), progress).run()
    progress(f"joining Ray at {address}")
    if re.fullmatch(r"\S+:\d+", address) and (found := dial(address, _DIAL_S)) is not Obstacle.NONE:
        # Ray itself would retry for minutes and report less.
        remedy = "start Ray there (`ray start --head`), or name the address that `ray status` works with"
        if found is not Obstacle.REFUSED:
            remedy = REMEDIES[found]
        return _not_joined(config, f"there is no Ray at {address}: {found}", remedy)
    try:
        prepare_environment(address)
        from ops.doctor.ray_host import RayHost  # imports Ray

        host = RayHost(address, JOIN_S)
    except LaunchError as error:
        return _not_joined(config, str(error), _CANNOT_JOIN)
    with contextlib.closing(host):
        return Examination(config, host, progress).run()


def _not_joined(config: PdserveConfig, why: str, remedy: str) -> Report:
    finding = fail("join", config.cluster.address, " ".join(why.split()), remedy)
    return Report(
        config.model.path, config.cluster.device, config.cluster.address, config.transfer.transport, findings=(finding,)
    )


class Examination:
    """One examination of the nodes of ``host``. Call `run` once."""

    def __init__(self, config: PdserveConfig, host: ProbeHost, progress: Progress = lambda stage: None) -> None:
        self._config, self._host, self._say = config, host, progress
        self._findings: list[Finding] = []
        self._secret = ServiceSecret.new()  # of the probes
        self._device = "cpu"
        self._own_port = 0  # the public port of the examined service if it is running
        self._nodes: dict[str, ExaminedNode] = {}
        self._timeout_s = min(config.transfer.connect_timeout_s, _DIAL_S)

    def run(self) -> Report:
        """Examine all nodes, and end the probes."""
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE, "doctor"))
            stack.callback(self._close_probes, pool)
            return self._examine(pool)

    def _examine(self, pool: ThreadPoolExecutor) -> Report:
        self._say("asking for nodes")
        ray_nodes = list(self._host.nodes())
        running = tuple(self._host.services())
        if self._config.gateway.port in running:  # any other service is an obstacle, like any other process
            self._own_port = self._config.gateway.port
        seats = self._seat(ray_nodes)
        nodes = [*self._nodes.values()]
        source, model_bytes = None, _UNKNOWN_MODEL_BYTES
        with contextlib.suppress(ModelError, OSError):  # a finding of check_models
            source = resolve_model(self._config.model.path, self._say)
            model_config = self._config.model.model_copy(update={"path": source.path})
            self._config = self._config.model_copy(update={"model": model_config})
            model_bytes = sum(path.stat().st_size for path in source.weight_files())
        self._say(f"starting probes for {len(seats)} workers on {len(nodes)} nodes, which read the model's files")
        report_s = _REPORT_S + model_bytes / _READ_BYTES_PER_S
        list(pool.map(lambda node: self._start_probes(node, report_s), nodes))
        if source is not None:
            self._decide_dtype(source, nodes)
        self._say("opening the workers' ports and KV ends")
        list(pool.map(self._open, nodes))
        self._say("connecting to workers, comparing clocks")
        self._check_gateway(source, nodes, pool)
        model = None if source is None else ServedModel.of(source, self._config, self._device)
        pairs = [*examine_pairs(seats, self._nodes, self._config.transfer, model, pool, self._say)]
        self._check_nodes(nodes, model)
        self._findings += check_reach(pairs)
        self._findings += check_speed(pairs, nodes)
        self._findings += check_measured(pairs)
        return Report(
            model=self._config.model.path,
            device=self._device,
            address=self._config.cluster.address,
            transport=self._config.transfer.transport,
            findings=tuple([*(each for node in nodes for each in node.findings), *self._findings]),
            services=running,
            need=None if model is None else model.need,
            nodes=tuple(nodes),
            pairs=tuple(pairs),
        )

    # --- placement ---------------------------------------------------------------------------------------------------

    def _seat(self, nodes: list[Node]) -> tuple[Seat, ...]:
        """The workers' seats. Nodes with a seat are examined, or all of them if the workers cannot be placed."""
        seats: tuple[Seat, ...] = ()
        cluster = self._config.cluster
        if not self._host.local and len(nodes) < (cluster.nodes or 0):
            what = f"cluster.nodes: {cluster.nodes} are wanted, and Ray has {len(nodes)}: `up` would wait for them"
            remedy = "start Ray on the others (`ray status` lists the present ones), and examine again"
            self._findings.append(warn("slots", _SERVICE, what, remedy))
        try:
            self._device = resolve_device(cluster, nodes)
        except LaunchError as error:
            remedy = "see `nvidia-smi` and torch's build (a CPU build sees no GPU) there; restart Ray; or --device cpu"
            self._findings.append(fail("device", _SERVICE, str(error), remedy))
            self._nodes = {node.node_id: ExaminedNode(node, ()) for node in nodes}
            return ()
        try:
            # The resources of the service itself, if it is running, count as free.
            seats, unplaced = seats_of(self._config, self._device, nodes, idle=bool(self._own_port))
        except LaunchError as error:
            remedy = "change the options that it names; `ray status` shows what nodes have and what is used"
            self._findings.append(fail("slots", _SERVICE, str(error), remedy))
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
        if self._config.cluster.autoscale:
            remedy = "Ray's autoscaler, if there is one, adds a node; examine again when it has joined"
            self._findings.append(warn("slots", _SERVICE, f"{what}: they would wait for one", remedy))
        else:
            remedy = "free what is used (`ray status`), add nodes, or ask for fewer workers"
            self._findings.append(fail("slots", _SERVICE, what, remedy))

    # --- probes ------------------------------------------------------------------------------------------------------

    def _start_probes(self, node: ExaminedNode, report_s: float) -> None:
        """Start a probe per worker, and have the first one report on the node within ``report_s`` seconds."""
        for name in [seat.worker_id for seat in node.seats] or ["no worker"]:
            node.probes[name] = self._host.probe(node.node, f"the probe of {name}")
        with node.noting(node.name, _NO_PROBE):
            node.report = node.any_probe.call("report", {"model": self._config.model.path}, report_s, NodeReport)

    def _decide_dtype(self, source: ModelSource, nodes: Sequence[ExaminedNode]) -> None:
        """Choose one dtype for all workers, as `up` would."""
        places: dict[str, list[NativeDtypes]] = {}
        for node in nodes:
            if node.report is not None and node.seats:
                places.setdefault(node.name, []).extend(node.report.native.get(self._device, ()))
        asked = self._config.model.dtype
        choice = choose_dtype(asked, source.shape.dtype, places)
        self._findings += node_checks.check_dtype(asked, choice)
        model = self._config.model.model_copy(update={"dtype": choice.dtype})
        self._config = self._config.model_copy(update={"model": model})

    def _open(self, node: ExaminedNode) -> None:
        if node.report is None:
            return
        host = self._host.host if self._host.local else node.node.ip
        for seat in node.seats:
            device = self._device
            if device == "cuda":
                device = f"cuda:{seat.index_on_node % max(1, len(node.report.devices))}"
            spec = seat.spec(self._config, self._device, host).to_wire()
            model_hash = node.report.model_hash  # the files are read once on each node
            arguments = {"spec": spec, "device": device, "secret": self._secret.hex(), "model_hash": model_hash}
            with node.noting(f"{seat.worker_id} on {node.name}"):
                probe = node.probes[seat.worker_id]
                node.endpoints[seat.worker_id] = probe.call("open", arguments, _OPEN_S, Endpoints)

    def _close_probes(self, pool: ThreadPoolExecutor) -> None:
        self._say("closing")
        list(pool.map(lambda probe: probe.close(), [p for node in self._nodes.values() for p in node.probes.values()]))

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_gateway(
        self, source: ModelSource | None, nodes: Sequence[ExaminedNode], pool: ThreadPoolExecutor
    ) -> None:
        config, own_port, timeout_s = self._config, self._own_port, self._timeout_s
        self._findings += gateway_checks.check_gateway_port(config.gateway, own_port)
        self._findings += gateway_checks.check_access(config)
        if source is not None:
            self._findings += gateway_checks.check_tokenizer(source.folder)
        self._findings += gateway_checks.check_control(nodes, timeout_s, pool)
        base = port_base(config.cluster)
        self._findings += gateway_checks.check_registry(self._host.host, base, nodes, own_port, timeout_s, pool)

    def _check_nodes(self, nodes: Sequence[ExaminedNode], model: ServedModel | None) -> None:
        cluster, path, device, own_port = self._config.cluster, self._config.model.path, self._device, self._own_port
        self._say("reading the model's files here")
        here = report_versions(path)
        self._findings += node_checks.check_versions(here, nodes)
        self._findings += node_checks.check_models(here, self._host.node_id, nodes, path)
        self._findings += node_checks.check_devices(nodes, device)
        self._findings += node_checks.check_mps(nodes, device, cluster.mps)
        self._findings += node_checks.check_cores(
            nodes, device, cluster.cores_per_worker, own_port, oversubscribed=cluster.oversubscribe
        )
        self._findings += node_checks.check_endpoints(nodes, device, own_port)
        if model is not None:
            self._findings += node_checks.check_memory(nodes, model.need, device, own_port)
        self._findings += node_checks.check_clocks(nodes, here)
