"""CPU time that other processes of this host use before and while something is measured."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import psutil

from ops.launch.state import ServiceState
from pdserve.client.target import Target

BESIDE_CORES = 0.25
"""What is measured while other processes use this many cores or more is measured beside other load."""
LOAD = "machine_load"
"""The key of the facts of a measurement (`MachineLoad.facts`)."""
_BEFORE_S = 0.5


def own_processes(service: Target | None = None) -> tuple[list[psutil.Process], bool]:
    """The processes of a measurement, and whether they are all: this one, its descendants (a service that it started is
    among them), and those of a ``service`` that was running already. The latter are known if this user started it on
    this host. The servers that either service has for workers belong to it."""
    this = psutil.Process()
    own = {this, *this.children(recursive=True)}
    before = None if service is None else ServiceState.at(service.address)
    started = [state for state in ServiceState.all() if state.process() in own]
    found = own.union(*(state.running_processes() for state in (*started, before) if state is not None))
    return list(found), service is None or before is not None


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds that this host and the processes of a measurement have used so far, by the kernel's counters. What
    other virtual machines took (steal) counts as use of this host."""

    at_s: float
    host_s: float
    own_s: Mapping[int, float]

    @classmethod
    def now(cls, own: Sequence[psutil.Process]) -> Self:
        """Up to this moment; processes of ``own`` that have ended are left out."""
        times, own_s = psutil.cpu_times(), {}
        for process in own:
            with contextlib.suppress(psutil.Error):
                own_s[process.pid] = sum(process.cpu_times()[:4])  # user and system, children that ended included
        busy = ("user", "nice", "system", "irq", "softirq", "steal")
        return cls(time.monotonic(), sum(getattr(times, each, 0.0) for each in busy), own_s)

    def others_s(self, since: CpuUse) -> float:
        """What all other processes used since then."""
        own_s = sum(now_s - since.own_s.get(pid, 0.0) for pid, now_s in self.own_s.items())
        return max(0.0, self.host_s - since.host_s - own_s)

    def others_cores(self, since: CpuUse) -> float:
        """The same as a number of cores."""
        return self.others_s(since) / max(self.at_s - since.at_s, 1e-9)


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """Measures what other processes use before and during a measurement, which begins when the meter is made."""

    before_cores: float
    _service: Target | None
    _begun: CpuUse

    @classmethod
    def begin(cls, service: Target | None = None) -> Self:
        """Measure the load before the measurement, for half a second. ``service``: one that was not started by this
        process. If its processes are not known, they count as others here, when they are idle."""
        own, _ = own_processes(service)
        since = CpuUse.now(own)
        time.sleep(_BEFORE_S)
        begun = CpuUse.now(own)
        return cls(begun.others_cores(since), service, begun)

    def facts(self) -> dict[str, Any]:
        """The facts of a measurement that ends now: under `LOAD` the ``cores`` of this host, and how many of them other
        processes used: ``before_cores`` and ``during_cores`` (None if the service's processes are not known)."""
        own, complete = own_processes(self._service)
        during_cores = round(CpuUse.now(own).others_cores(self._begun), 3) if complete else None
        before_cores = round(self.before_cores, 3)
        return {LOAD: {"cores": os.cpu_count(), "before_cores": before_cores, "during_cores": during_cores}}


def beside_cores(facts: Mapping[str, Any]) -> float:
    """How many cores other processes used, before or during a measurement with these facts; 0 if that is unknown."""
    load = facts.get(LOAD) or {}
    return max((load[key] or 0.0 for key in ("before_cores", "during_cores") if key in load), default=0.0)


def beside_text(facts: Mapping[str, Any]) -> str:
    """``beside other load: 1.2 of 2 cores`` if other processes used `BESIDE_CORES` or more; else empty."""
    most = beside_cores(facts)
    return f"beside other load: {most:.1f} of {facts[LOAD]['cores']} cores" if most >= BESIDE_CORES else ""
