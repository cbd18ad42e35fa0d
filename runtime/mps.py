"""The CUDA Multi-Process Service (MPS): its variables, and why it cannot be used here.

Without it, the processes that use a GPU take turns on it: while one computes, kernels of the other wait. A worker is
two such processes, its engine and the one that transfers KV. With MPS the GPU runs kernels of both at the same time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.core.errors import ConfigError

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
VISIBLE = "CUDA_VISIBLE_DEVICES"
TRANSFER_THREADS = "PDSERVE_MPS_TRANSFER_THREADS"
"""Set where `THREADS` is pdserve's limit on transfers, which is not the engine's."""

_DEFAULT_PIPES = Path("/tmp/nvidia-mps")  # where CUDA looks without `PIPES`
_LEAST_CAPABILITY = (7, 0)  # before Volta, clients share one address space
_SMI_S = 10.0
_LIMIT = re.compile(r"(?P<gpu>\d+)=(?P<size>\d+)(?P<unit>[mMgG])[bB]?")


@dataclass(frozen=True, slots=True)
class GpuModes:
    """What nvidia-smi says of a GPU: ``capability`` is (9, 0) for 9.0, ``compute_mode`` Default, Exclusive_Process or
    Prohibited, ``mig`` whether it is divided into instances."""

    capability: tuple[int, int]
    compute_mode: str
    mig: bool


def gpu_modes(environment: Mapping[str, str]) -> GpuModes | None:
    """The modes of the first GPU that ``environment`` shows; None if nvidia-smi is missing or does not tell."""
    visible = environment.get(VISIBLE, "").partition(",")[0].strip()
    command = [
        "nvidia-smi",
        "--query-gpu=compute_cap,compute_mode,mig.mode.current",
        "--format=csv,noheader",
        *(["-i", visible] if visible and not visible.startswith("MIG-") else []),
    ]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_S, env=dict(environment), check=True
        ).stdout
        capability, mode, mig = (part.strip() for part in said.splitlines()[0].split(","))
        major, _, minor = capability.partition(".")
        return GpuModes((int(major), int(minor)), mode, mig == "Enabled")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def mps_obstacle(environment: Mapping[str, str], modes: GpuModes | None) -> str | None:
    """Why a worker with this environment cannot have an MPS daemon of its own; None if nothing speaks against it."""
    if shutil.which(CONTROL, path=environment.get("PATH")) is None:
        return f"{CONTROL} is not on PATH"
    if environment.get(VISIBLE, "").startswith("MIG-") or (modes is not None and modes.mig):
        return "the GPU is divided into MIG instances"
    if modes is not None and modes.capability < _LEAST_CAPABILITY:
        return f"the GPU has compute capability {modes.capability[0]}.{modes.capability[1]}, and MPS needs 7.0 (Volta)"
    if not os.access("/dev/shm", os.W_OK):
        return "/dev/shm cannot be written, and MPS keeps its memory there"
    return None


def foreign_daemon(environment: Mapping[str, str]) -> str | None:
    """The folder of an MPS daemon that this environment leads CUDA to already; None if there is none."""
    folder = Path(environment.get(PIPES) or _DEFAULT_PIPES)
    return str(folder) if daemon_pid(folder) else None


def daemon_pid(pipes: Path) -> int:
    """The process id of the control daemon with the pipes in this folder; 0 if it does not run."""
    try:
        pid = int((pipes / f"{CONTROL}.pid").read_text().strip())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return 0
    return pid if CONTROL.encode() in command else 0


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine whose worker has this one: without the limit of the worker's transfers."""
    dropped = (THREADS, TRANSFER_THREADS) if TRANSFER_THREADS in environment else ()
    return {name: value for name, value in environment.items() if name not in dropped}


def memory_limit(environment: Mapping[str, str], index: int) -> int | None:
    """The bytes that a process with this environment may allocate on GPU ``index`` under MPS; None if there is no
    limit. ConfigError if `MEMORY` cannot be read."""
    for part in environment.get(MEMORY, "").split(","):
        if not part.strip():
            continue
        found = _LIMIT.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"{MEMORY}: {part.strip()!r} is not of the form GPU=SIZE (0=40G or 0=4096M)")
        if int(found["gpu"]) == index:
            return int(found["size"]) * (2**30 if found["unit"] in "gG" else 2**20)
    return None
