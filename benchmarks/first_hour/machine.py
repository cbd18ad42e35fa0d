"""What the machine has: the first step."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from benchmarks.first_hour.step import Findings, Options
from runtime.mps import CONTROL, foreign_daemon, gpu_modes, mps_obstacle

_PACKAGES = ("torch", "triton", "transformers", "ray", "nixl", "flashinfer-python")
_VARIABLES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "UCX_")
_BUSY_BYTES = 2**30
_SMI = "index,name,uuid,driver_version,compute_cap,compute_mode,mig.mode.current,memory.total,memory.used"


def environment(options: Options) -> Findings:
    """Versions, GPUs, modes and variables, and what of them would keep the rest from working."""
    findings = Findings()
    figures = findings.figures
    figures["python"], figures["kernel"] = platform.python_version(), platform.release()
    figures["packages"] = {name: found for name in _PACKAGES if (found := _version(name))}
    figures["variables"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    figures["tools"] = {
        name: shutil.which(name) is not None for name in ("nvidia-smi", CONTROL, "compute-sanitizer", "nsys")
    }
    if _version("ray") is None:
        findings.notes.append("Ray is not installed; no step needs it, and `pdserve up` does")
    if options.on_gpu:
        _gpus(findings)
    return findings


def _gpus(findings: Findings) -> None:
    import torch

    figures = findings.figures
    figures["cuda"] = torch.version.cuda
    figures["gpus"] = [
        {"name": each.name, "capability": f"{each.major}.{each.minor}", "gib": round(each.total_memory / 2**30, 1)}
        for each in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    figures["nvidia-smi"] = _smi(_SMI)
    if torch.distributed.is_nccl_available():
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if torch.cuda.device_count() > 1:
        figures["peer access"] = torch.cuda.can_device_access_peer(0, 1)
    capability = torch.cuda.get_device_capability(0)
    findings.require(capability >= (7, 0), f"compute capability {capability}: Triton needs 7.0")
    if capability < (8, 0):
        findings.notes.append("no native bfloat16 before compute capability 8.0: model.dtype auto means float16")
    findings.require(importlib.util.find_spec("triton") is not None, "Triton is missing: use a CUDA build of torch")
    modes = gpu_modes(os.environ)
    obstacle = mps_obstacle(os.environ, modes)
    figures["mps"] = foreign_daemon(os.environ) or obstacle or "possible"
    if modes is not None:
        figures["compute mode"] = modes.compute_mode
        findings.require(modes.compute_mode != "Prohibited", "the GPU's compute mode is Prohibited")
        if modes.compute_mode == "Exclusive_Process":
            findings.require(
                obstacle is None,
                f"the GPU's compute mode is Exclusive_Process, which admits one process: MPS is needed, and {obstacle}",
            )
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        if total - free > _BUSY_BYTES:
            used_gib = (total - free) / 2**30
            findings.notes.append(f"GPU {index} has {used_gib:.1f} GiB in use already: figures will be off")
    x = torch.ones(1024, device="cuda")
    findings.require(float((x + x).sum().item()) == 2048.0, "the GPU computes 1 + 1 wrongly")


def _smi(query: str) -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [f"not told: {error}"]
    return done.stdout.splitlines()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
