"""Where and beside what a run takes place: what ``env.json`` says of machine and service, and requests of others on the
service."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
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


def settings(status: ServiceStatus) -> dict[str, dict[str, Any]]:
    """The service's settings that results depend on, by section of its configuration."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in sorted(status.settings.items()):
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections


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
            f"{what} began on a busy service beside requests that were not the measurement's ({self.running} running, "
            f"{self.queued} queued), and the figures include what they cost."
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
