"""Two "nodes" of this host for the doctor, each with an address of its own (127.0.0.1, 127.0.0.2), whose probes are
processes that may run another installation, another folder, or another clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.doctor.examine import Examination
from ops.doctor.node_report import ROOT
from ops.doctor.probes import ProbeHandle, ProbeProcess, Site
from ops.doctor.report import DoctorReport, Finding, Level
from ops.launch.plan import Node
from pdserve.core.config import PdserveConfig

FIRST, SECOND = "127.0.0.1", "127.0.0.2"


@dataclass(frozen=True)
class Planted:
    """How the probes of a node are started."""

    root: Path = ROOT
    prefix: Sequence[str] = ()
    cwd: Path | None = None


@dataclass
class PlantedHost:
    """``resources`` are each node's."""

    second: Planted = field(default_factory=Planted)
    first: Planted = field(default_factory=Planted)
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    running: Sequence[int] = ()
    processes: list[ProbeProcess] = field(default_factory=list)

    @property
    def site(self) -> Site:
        nodes = [Node(ip, ip, self.resources, self.resources) for ip in (FIRST, SECOND)]
        return Site(nodes, self.running, self.probe, local=False, host=FIRST, node_id=FIRST)

    def probe(self, node: Node, name: str) -> ProbeHandle:
        how = self.first if node.ip == FIRST else self.second
        process = ProbeProcess(name, root=how.root, prefix=how.prefix, cwd=how.cwd)
        self.processes.append(process)
        return process


def examine(host: PlantedHost, **sections: Mapping[str, Any]) -> DoctorReport:
    """With free ports, unless ``sections`` of the configuration say otherwise."""
    gateway = {"host": "127.0.0.1", "port": 0, **sections.pop("gateway", {})}
    transfer = {"transport": "tcp", "connect_timeout_s": 2.0, **sections.pop("transfer", {})}
    config = PdserveConfig.parse({"gateway": gateway, "transfer": transfer, **sections})
    return Examination(config, host.site).run()


def found(report: DoctorReport, check: str, level: Level = "fail") -> list[Finding]:
    """The findings of a check that have this level; what has to be acted on has a remedy."""
    findings = [each for each in report.findings if each.check == check and each.level is level]
    assert all(each.remedy for each in findings if level != "ok")
    return findings


def troubles(report: DoctorReport) -> list[str]:
    """The checks that failed, each once."""
    return sorted({each.check for each in report.findings if each.level == "fail"})
