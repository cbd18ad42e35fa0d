"""A node while it is examined."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ops.doctor.endpoints import Endpoints
from ops.doctor.finding import Finding, fail
from ops.doctor.node_report import NodeReport
from ops.doctor.ping import ClockReading
from ops.doctor.probe_host import ProbeHandle
from ops.doctor.report import ExaminedNode
from ops.doctor.seats import Seat
from ops.launch.plan import Node
from pdserve.core.errors import PdserveError

HANGS = "the node, or what runs there, hangs: see its load and Ray's logs"
"""The remedy when a probe does not answer."""


@dataclass(slots=True)
class Site:
    """Its probes are those of its seats, by worker; of a node without any, one that stands for nobody. ``findings`` are
    about what went wrong with them."""

    node: Node
    seats: tuple[Seat, ...]
    probes: dict[str, ProbeHandle] = field(default_factory=dict)
    report: NodeReport | None = None
    endpoints: dict[str, Endpoints] = field(default_factory=dict)
    clock: ClockReading | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def any_probe(self) -> ProbeHandle:
        """One of them."""
        return next(iter(self.probes.values()))

    @contextlib.contextmanager
    def noting(self, where: str, remedy: str) -> Iterator[None]:
        """An error of a probe within is a finding."""
        try:
            yield
        except PdserveError as error:
            self.findings.append(fail("probe", where, str(error), remedy))

    def examined(self) -> ExaminedNode:
        """What came of it."""
        return ExaminedNode(self.node, self.seats, self.report, self.clock, tuple(self.endpoints.values()))
