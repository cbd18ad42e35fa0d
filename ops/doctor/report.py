"""What the doctor finds: the answers of its probes, the examined nodes and pairs, and its findings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import psutil

from checkpoints.source import ModelSource
from kv_transfer.handshake import LinkFigures
from ops.doctor.handoff_prediction import HandoffPrediction
from ops.doctor.network import ClockReading, Obstacle
from ops.doctor.node_report import NodeReport
from ops.launch.plan import Bundle, Node
from ops.launch.state import listeners
from ops.model_memory import ServedModel
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from pdserve.core.handoff import KVEndpoint
from pdserve.core.worker import Role
from worker.addresses import Interface
from worker.spec import WorkerSpec

if TYPE_CHECKING:
    from ops.doctor.probes import ProbeHandle

_COMMAND_CHARS = 80
_NEED = ("weight_bytes", "pool_bytes", "activation_bytes", "total_bytes")


Level = Literal["ok", "warn", "fail"]
"""fail: a service would not start or not serve. warn: it would, but worse than it could."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    check: str  # a name from the table in docs/doctor.md
    where: str  # a node, worker, pair, or the service
    what: str
    remedy: str = ""  # only a finding of level ok has none


def ok(check: str, where: str, what: str) -> Finding:
    """A remark that needs no action."""
    return Finding("ok", check, where, what)


def warn(check: str, where: str, what: str, remedy: str) -> Finding:
    """A problem that a service can run with."""
    return Finding("warn", check, where, what, remedy)


def fail(check: str, where: str, what: str, remedy: str) -> Finding:
    """A problem that keeps a service from running."""
    return Finding("fail", check, where, what, remedy)


def port_taken(where: str, what: str, port: int) -> Finding:
    """The finding that ``port`` of this host cannot be listened on. Names the process that does, if known."""
    with contextlib.suppress(psutil.Error):
        for process in listeners(port) if port else ():
            command = " ".join(" ".join(process.cmdline()).split())[:_COMMAND_CHARS]
            what = f"{what}; process {process.pid} ({command}) listens there"
            break
    return fail("port", where, what, "end the process that holds it, or move pdserve's ports with cluster.port_base")


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one worker."""

    worker_id: str
    role: Role
    node: Node
    index_on_node: int  # among the workers of that node
    port: int  # its first one; 0: chosen by the system
    bundle: Bundle  # the resources that it asks Ray for

    def spec(self, config: PdserveConfig, device: str, host: str) -> WorkerSpec:
        """The worker's specification, listening on ``host``."""
        return WorkerSpec(
            worker_id=self.worker_id,
            role=self.role,
            host=host,
            node=self.node.ip,
            device=device,
            registry_addresses=(),
            version="",
            port=self.port,
            device_share=min(1.0, self.bundle.get("GPU", 1.0)),
            config=config,
        )


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a probe listens in place of a worker."""

    worker_id: str
    control: str  # ``host:port`` of its ping server; empty if it has none
    interface: Interface | None  # the resolved ``transfer.interface``
    kv: tuple[KVEndpoint, ...]  # of the transports; empty if they could not be opened
    findings: tuple[Finding, ...]  # why it could not listen as the worker would


@dataclass(frozen=True, slots=True)
class Meeting:
    """Result of connecting a prefill worker's probe to a decode worker's."""

    transport: str = ""
    address: str = ""  # where the decode worker's probe listens
    reason: str = ""
    figures: LinkFigures | None = None  # None if they could not connect
    obstacle: Obstacle = Obstacle.NONE
    what: str = ""  # why they could not


PROBE_HANGS = "the node, or a process on it, hangs: see its load and Ray's logs"
"""The remedy for a probe that does not answer."""


@dataclass(slots=True)
class ExaminedNode:
    """A node, filled in while it is examined. ``probes`` and ``endpoints`` are by worker id."""

    node: Node
    seats: tuple[Seat, ...]  # the workers that it would get
    report: NodeReport | None = None  # None if no probe starts
    clock: ClockReading | None = None  # None if no probe can be pinged
    endpoints: dict[str, Endpoints] = field(default_factory=dict)
    probes: dict[str, ProbeHandle] = field(default_factory=dict)  # one without a worker, where no worker would be
    findings: list[Finding] = field(default_factory=list)  # about its probes

    @property
    def name(self) -> str:
        """The node's name in findings."""
        return self.node.ip

    @property
    def any_probe(self) -> ProbeHandle:
        """The first of its probes."""
        return next(iter(self.probes.values()))

    @contextlib.contextmanager
    def noting(self, where: str, remedy: str = PROBE_HANGS) -> Iterator[None]:
        """Turn errors of a probe into findings."""
        try:
            yield
        except PdserveError as error:
            self.findings.append(fail("probe", where, str(error), remedy))

    @property
    def interfaces(self) -> list[Interface]:
        """The interfaces that KV travels over, each once, by address."""
        found = {each.interface for each in self.endpoints.values() if each.interface is not None}
        return sorted(found, key=lambda each: each.address)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; times are in milliseconds."""
        report = {}
        if self.report is not None:
            report = {**msgspec.to_builtins(self.report), "cores": len(self.report.allowed_cores)}
        return {
            "node": self.name,
            "node_id": self.node.node_id,
            "workers": [seat.worker_id for seat in self.seats],
            **report,
            "interfaces": [asdict(each) for each in self.interfaces],
            "clock_offset_ms": None if self.clock is None else self.clock.offset_s * 1e3,
            "clock_error_ms": None if self.clock is None else self.clock.error_s * 1e3,
            "wall_skew_ms": None if self.clock is None else self.clock.wall_s * 1e3,
        }


@dataclass(frozen=True, slots=True)
class ExaminedPair:
    """A prefill and a decode worker."""

    prefill: Seat
    decode: Seat
    meeting: Meeting
    predictions: Mapping[int, HandoffPrediction] = field(
        default_factory=dict
    )  # without overlap, by tokens of the prompt
    # The prefill rate up to which the link keeps up (None: the link was not measured, or the model is unknown).
    hidden_tokens_per_s: float | None = None

    @property
    def name(self) -> str:
        """The pair's name in findings."""
        return f"{self.prefill.worker_id} → {self.decode.worker_id}"

    @property
    def across(self) -> bool:
        """Whether the two workers are on different nodes."""
        return self.prefill.node.node_id != self.decode.node.node_id

    @property
    def gbs(self) -> float:
        """Measured rate in 10^9 bytes per second; 0 if no payloads were sent."""
        return 0.0 if self.meeting.figures is None else self.meeting.figures.gbs

    def to_dict(self) -> dict[str, Any]:
        """Plain values; times are in milliseconds."""
        meeting, figures = self.meeting, self.meeting.figures
        return {
            "prefill": self.prefill.worker_id,
            "prefill_node": self.prefill.node.ip,
            "decode": self.decode.worker_id,
            "decode_node": self.decode.node.ip,
            "transport": meeting.transport,
            "address": meeting.address,
            "reason": meeting.reason,
            "reachable": figures is not None,
            "obstacle": "" if figures is not None else str(meeting.obstacle),
            "what": meeting.what,
            "measured": self.gbs > 0,
            "gbs": self.gbs or None,
            "ceiling_gbs": figures.ceiling_gbs if figures is not None and self.gbs else None,
            "round_trip_ms": None if figures is None else figures.round_trip_s * 1e3,
            "median_round_trip_ms": None if figures is None else figures.median_round_trip_s * 1e3,
            "predictions": [
                {
                    "tokens": tokens,
                    "num_bytes": each.num_bytes,
                    "wire_ms": each.wire_s * 1e3,
                    "exposed_none_ms": each.exposed_s * 1e3,
                }
                for tokens, each in self.predictions.items()
            ],
            "hidden_tokens_per_s": self.hidden_tokens_per_s,
        }


@dataclass(slots=True)
class DoctorReport:
    """The examination of the hosts that a service of ``config`` would run on, filled in as it goes on. It stays empty
    if Ray cannot be joined."""

    config: PdserveConfig  # with the model's path and dtype, once they are known
    device: str
    services: Sequence[int] = ()  # ports of services that were running
    own_port: int = 0  # the public port of the examined service, if it is running
    gateway_node: str = ""  # the id of the gateway's node
    here: NodeReport | None = None  # see `gateway_host`
    source: ModelSource | None = None  # None if the model cannot be read; so with ``need``
    need: ServedModel | None = None  # with the memory of one worker
    nodes: list[ExaminedNode] = field(default_factory=list)
    pairs: list[ExaminedPair] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def gateway_host(self) -> NodeReport:
        """The report of the host that the gateway would run on."""
        assert self.here is not None, "read before the checks"
        return self.here

    @property
    def failed(self) -> bool:
        """Whether a service would not start or not serve."""
        return any(finding.level == "fail" for finding in self.findings)

    def set_model(self, **changes: str) -> None:
        """Note what was found out of the model."""
        model = self.config.model.model_copy(update=changes)
        self.config = self.config.model_copy(update={"model": model})

    def to_dict(self) -> dict[str, Any]:
        """The output of `--json`."""
        need = self.need
        return {
            "ok": not self.failed,
            "model": self.config.model.path,
            "device": self.device,
            "address": self.config.cluster.address,
            "transport": self.config.transfer.transport,
            "services": list(self.services),
            "need_bytes": None if need is None else {name: getattr(need, name) for name in _NEED},
            "nodes": [node.to_dict() for node in self.nodes],
            "pairs": [pair.to_dict() for pair in self.pairs],
            "findings": [asdict(finding) for finding in self.findings],
        }
