"""What an examination found, whole: nodes, pairs, findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ops.doctor.endpoints import Endpoints
from ops.doctor.finding import Finding, Level
from ops.doctor.handoff_prediction import HandoffPlan, LinkRate, predict
from ops.doctor.meeting import Meeting
from ops.doctor.memory_need import MemoryNeed
from ops.doctor.node_report import NodeReport
from ops.doctor.ping import ClockReading
from ops.doctor.seats import Seat
from ops.launch.plan import Node
from pdserve.core.kv_layout import KVLayout

PROMPTS = (512, 2048)
"""Tokens of the prompts that a hand-off's time is predicted for."""


@dataclass(frozen=True, slots=True)
class ExaminedNode:
    """``seats`` are the workers it would get, ``endpoints`` where their probes listened. ``report`` is None if no probe
    came up there, ``clock`` is None if none could be pinged."""

    node: Node
    seats: tuple[Seat, ...]
    report: NodeReport | None
    clock: ClockReading | None
    endpoints: tuple[Endpoints, ...]

    @property
    def name(self) -> str:
        """What findings call it."""
        return self.node.ip

    def to_dict(self) -> dict[str, Any]:
        """Plain values, times in milliseconds."""
        report = {} if self.report is None else self.report.to_wire()
        interfaces = {each.interface for each in self.endpoints if each.interface is not None}
        return {
            "node": self.name,
            "node_id": self.node.node_id,
            "workers": [seat.worker_id for seat in self.seats],
            **report,
            "interfaces": [asdict(each) for each in sorted(interfaces, key=lambda each: each.address)],
            "clock_offset_ms": None if self.clock is None else self.clock.offset_s * 1e3,
            "clock_error_ms": None if self.clock is None else self.clock.error_s * 1e3,
            "wall_skew_ms": None if self.clock is None else self.clock.wall_s * 1e3,
        }


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a prompt of ``tokens``: bytes, and milliseconds on the wire and exposed with ``transfer.overlap: none``."""

    tokens: int
    num_bytes: int
    wire_ms: float
    exposed_none_ms: float


@dataclass(frozen=True, slots=True)
class ExaminedPair:
    """``measured``: `meeting` has figures of payloads, not of one round trip alone. ``hidden_tokens_per_s`` is the
    prefill rate up to which the link keeps up (None: not measured)."""

    prefill: Seat
    decode: Seat
    meeting: Meeting
    measured: bool
    predictions: tuple[Prediction, ...]
    hidden_tokens_per_s: float | None

    @property
    def name(self) -> str:
        """What findings call it."""
        return f"{self.prefill.worker_id} → {self.decode.worker_id}"

    @property
    def across(self) -> bool:
        """Whether it lies on two nodes."""
        return self.prefill.node.node_id != self.decode.node.node_id

    @property
    def gbs(self) -> float:
        """10^9 bytes per second; 0: not measured."""
        return self.meeting.figures.gbs if self.measured and self.meeting.figures is not None else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, times in milliseconds."""
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
            "measured": self.measured,
            "gbs": self.gbs or None,
            "best_gbs": figures.best_gbs if figures is not None and self.measured else None,
            "round_trip_ms": None if figures is None else figures.round_trip_s * 1e3,
            "median_round_trip_ms": None if figures is None else figures.median_round_trip_s * 1e3,
            "predictions": [asdict(each) for each in self.predictions],
            "hidden_tokens_per_s": self.hidden_tokens_per_s,
        }


def predictions(layout: KVLayout, longest: int, link: LinkRate) -> tuple[Prediction, ...]:
    """For `PROMPTS`, as far as the engine takes them."""
    found = []
    for tokens in sorted({min(each, longest) for each in PROMPTS}):
        # Where everything is sent at the end, neither chunks nor the prefill's time matter.
        plan = HandoffPlan(layout, tokens, tokens, "none", 0)
        predicted = predict(plan.parts(), link, 0.0)
        found.append(Prediction(tokens, predicted.num_bytes, predicted.wire_s * 1e3, predicted.exposed_s * 1e3))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Report:
    """``services`` are the ports of services that ran meanwhile. ``need`` is one worker's (None: the model is
    unreadable)."""

    model: str
    device: str
    address: str
    transport: str
    services: tuple[int, ...]
    need: MemoryNeed | None
    nodes: tuple[ExaminedNode, ...]
    pairs: tuple[ExaminedPair, ...]
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether a service would not start, or not serve."""
        return any(finding.level is Level.FAIL for finding in self.findings)

    def count(self, level: Level) -> int:
        """How many findings are of a level."""
        return sum(finding.level is level for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "ok": not self.failed,
            "model": self.model,
            "device": self.device,
            "address": self.address,
            "transport": self.transport,
            "services": list(self.services),
            "need_bytes": None if self.need is None else {**asdict(self.need), "total_bytes": self.need.total_bytes},
            "nodes": [node.to_dict() for node in self.nodes],
            "pairs": [pair.to_dict() for pair in self.pairs],
            "findings": [{**asdict(finding), "level": str(finding.level)} for finding in self.findings],
        }
