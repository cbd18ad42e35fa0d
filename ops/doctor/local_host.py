"""This host alone, for a service that would start a Ray of its own: probes are processes, and Ray is not needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ops.doctor.node_report import NodeReport
from ops.doctor.probe_host import ProbeHandle
from ops.doctor.probe_process import ProbeProcess
from ops.launch.plan import Node
from ops.launch.state import ServiceState, state_folder
from pdserve.core.errors import DeadlineExceeded, LaunchError, WorkerLost

NODE_ID = "local"
_REPORT_S = 120.0


class LocalHost:
    """``device`` is that of the configuration: only where GPUs may matter they are counted."""

    local, host, node_id = True, "127.0.0.1", NODE_ID

    def __init__(self, model: str, device: str) -> None:
        self._model, self._device = model, device

    def nodes(self) -> Sequence[Node]:
        """One, with the cores that this process may use."""
        present = self._device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
        gpus = self._count_gpus() if present else 0
        resources = {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(gpus)}
        return [Node(NODE_ID, self.host, resources, resources)]

    def services(self) -> Sequence[int]:
        """Those whose supervisors live on this host."""
        ports = []
        for path in state_folder().glob("*.json"):
            with contextlib.suppress(FileNotFoundError, LaunchError):  # it has just ended, or was never one
                state = ServiceState.load(path)
                if state.process() is not None:
                    ports.append(state.port)
        return sorted(ports)

    def probe(self, node: Node, name: str) -> ProbeHandle:
        """A new process."""
        return ProbeProcess(name)

    def _count_gpus(self) -> int:
        probe = ProbeProcess("the probe that counts GPUs")
        try:
            return len(NodeReport.from_wire(probe.call("report", {"model": self._model}, _REPORT_S)).devices)
        except (WorkerLost, DeadlineExceeded):  # the node's own probe will say what is wrong
            return 0
        finally:
            probe.close()
