"""Where and beside what a run takes place: what ``env.json`` says of machine and service, load that other processes put
on this host, and requests of others on the service."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from pdserve.client.status import ServiceStatus
from pdserve.version import VERSION

_PACKAGES = ("torch", "ray", "grpcio", "protobuf", "numpy", "msgspec", "nixl")
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine() -> dict[str, Any]:
    """The host of the load generator: cores, memory, versions, and the commit of the source, if it is known."""
    model, flags = _cpu()
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": model,
        "cpu_features": [feature for feature in _FEATURES if feature in flags],
        "cores": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "pdserve": VERSION,
        "commit": _commit(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def version_text(machine: Mapping[str, Any]) -> str:
    """The version and commit that `machine` noted."""
    return f"pdserve {machine.get('pdserve', '?')}, commit {machine.get('commit') or 'unknown'}"


def service(status: ServiceStatus) -> dict[str, Any]:
    """The service that was measured: model, workers, and the link of each pair with the transport really in use."""
    return {
        "model": status.model,
        "model_hash": status.model_hash,
        "dtype": status.dtype,
        "context_length": status.context_length,
        "block_size": status.block_size,
        "kv_bytes_per_token": status.kv_bytes_per_token,
        "notes": list(status.notes),
        "workers": [
            {
                "worker": worker.worker_id,
                "role": worker.role,
                "node": worker.node,
                "device": worker.device,
                "cores": worker.cores,
                "num_blocks": worker.num_blocks,
            }
            for worker in status.workers
        ],
        "links": links(status),
    }


def links(status: ServiceStatus) -> list[dict[str, Any]]:
    """Every link between two workers: transport, the reason for it, and its measured ceiling in GB/s."""
    return [
        {
            "from": worker.worker_id,
            "to": link.worker_id,
            "transport": link.transport,
            "reason": link.reason,
            "ceiling_gbs": link.ceiling_gbs,
        }
        for worker in status.workers
        for link in worker.links
    ]


def devices_here() -> int:
    """Devices of this host that workers can use at once: its GPUs, else its cores."""
    import torch  # takes long

    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def _cpu() -> tuple[str, Mapping[str, None] | set[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor(), set()
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found.get("model name", platform.processor()), set(found.get("flags", "").split())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that runs, with ``+`` if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


BESIDE_CORES = 0.25
"""What is measured while other processes use this many cores or more is measured beside other load."""
LOAD = "machine_load"
"""The fact of a cell that has ``cores`` of this host, and how many of them other processes used: ``before_cores`` and
``during_cores`` (null if the service's processes are not known, because it was running already)."""
_BEFORE_S = 0.5


def own_processes() -> list[psutil.Process]:
    """This process and its descendants: the load generator, and every service that it started."""
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


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


def cores_of_others() -> float:
    """How many cores other processes use now, measured over half a second."""
    own = own_processes()
    since = CpuUse.now(own)
    time.sleep(_BEFORE_S)
    return CpuUse.now(own).others_cores(since)


def load_facts(before_cores: float, during_cores: float | None) -> dict[str, Any]:
    """The fact `LOAD` of a cell. ``during_cores``: None if the service's processes are not known."""
    during = None if during_cores is None else round(during_cores, 3)
    return {LOAD: {"cores": os.cpu_count(), "before_cores": round(before_cores, 3), "during_cores": during}}


def beside_text(facts: Mapping[str, Any]) -> str:
    """``beside other load: 1.2 of 2 cores`` if other processes used `BESIDE_CORES` before or during a cell with these
    facts; else empty."""
    load = facts.get(LOAD) or {}
    most = max((load[key] or 0.0 for key in ("before_cores", "during_cores") if key in load), default=0.0)
    return f"beside other load: {most:.1f} of {load['cores']} cores" if most >= BESIDE_CORES else ""


BUSY = "busy"
"""The fact of a cell that lists what was not measured on an idle service: ``arm``, ``running`` and ``queued``."""


@dataclass(frozen=True, slots=True)
class OtherRequests:
    """How many requests ran and were queued that are not the measurement's."""

    running: int
    queued: int

    @classmethod
    def of(cls, status: ServiceStatus) -> Self | None:
        """Those of a service that should be idle; None if it is."""
        if status.idle:
            return None
        on_workers = sum(worker.running + worker.waiting for worker in status.workers)
        return cls(max(status.running, on_workers), status.queued)

    def text(self, what: str) -> str:
        """A sentence about ``what`` is measured beside them."""
        return (
            f"{what} began on a busy service: {self.running} running and {self.queued} queued requests were not the "
            "measurement's, and the figures include what they cost."
        )


def busy_texts(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fact `BUSY` in words: one sentence per arm, with the most requests of others."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        arms.setdefault(entry["arm"], []).append(entry)
    return [
        OtherRequests(*(max(entry[key] for entry in of_arm) for key in ("running", "queued"))).text(arm)
        for arm, of_arm in arms.items()
    ]
