"""Reads which floating-point types this host's devices compute natively. Imports torch only to ask for GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from engine.model.dtypes import NativeDtypes, cpu_dtypes, gpu_dtypes

CPUINFO = Path("/proc/cpuinfo")
_MAX_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the second is oneDNN's older name of the first


def native_dtypes(device: str) -> list[NativeDtypes]:
    """The devices of kind ``device`` (``cpu`` or ``cuda``) that this process can use: one CPU, or each GPU that torch
    sees. Empty if there is none."""
    if device == "cpu":
        return [_cpu()]
    import torch

    return [
        gpu_dtypes(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    ]


def _cpu() -> NativeDtypes:
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux: float32 is native everywhere
        text = ""
    max_isa = next((value for name in _MAX_ISA_VARIABLES if (value := os.environ.get(name))), "")
    return cpu_dtypes(text, max_isa)
