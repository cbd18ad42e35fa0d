"""What the machine has: the first step."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

from experiments.benchmarks.first_hour.step import Findings, Options
from ops.doctor.node_report import NodeReport, report_node
from runtime.mps import foreign_daemon, gpu_modes

_PACKAGES = ("triton", "transformers", "nixl", "flashinfer-python")
_VARIABLES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "UCX_")
_BUSY_BYTES = 2**30
_SMI = "index,name,uuid,driver_version,compute_cap,compute_mode,mig.mode.current,memory.total,memory.used"


def environment(options: Options) -> Findings:
    """Versions, GPUs, modes and variables, and what of them would keep the rest from working."""
    findings, report = Findings(), report_node("tiny")
    findings.figures |= {
        "node": report,
        "kernel": platform.release(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }
    findings.require(not report.torch_error, report.torch_error)
    if not report.ray:
        findings.notes.append("Ray is not installed; no step needs it, and `pdserve up` does")
    if options.on_gpu:
        _gpus(findings, report)
    return findings


def _gpus(findings: Findings, report: NodeReport) -> None:
    import torch

    figures = findings.figures
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
    figures["mps"] = foreign_daemon(os.environ) or report.mps or "possible"
    modes = gpu_modes(os.environ)
    mode = "" if modes is None else modes.compute_mode
    findings.require(mode != "Prohibited", "the GPU's compute mode is Prohibited")
    findings.require(
        mode != "Exclusive_Process" or not report.mps,
        f"the GPU's compute mode is Exclusive_Process, which admits one process: MPS is needed, and {report.mps}",
    )
    for index, device in enumerate(report.devices):
        if (used := device.total_bytes - device.free_bytes) > _BUSY_BYTES:
            findings.notes.append(f"GPU {index} has {used / 2**30:.1f} GiB in use already: figures will be off")
    x = torch.ones(1024, device="cuda")
    findings.require(float((x + x).sum().item()) == 2048.0, "the GPU computes 1 + 1 wrongly")


def _smi(query: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"not told: {error}"]
    return done.stdout.splitlines()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
