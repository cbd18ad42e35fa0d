"""Chooses the dtype of a service from the dtypes that its devices compute natively.

Imports torch only to query GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags in /proc/cpuinfo of bfloat16 products: two of x86, one of ARM."""
_FLAG_LINES = ("flags", "Features")  # on x86 and on ARM

_ISAS_WITHOUT_BFLOAT16 = frozenset(
    {
        "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_MIC", "AVX512_MIC_4OPS", "AVX512_CORE",
        "AVX512_CORE_VNNI",
    }
)  # fmt: skip
"""Values of oneDNN's ONEDNN_MAX_CPU_ISA that keep it from using bfloat16 instructions."""

_MAX_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the second is the older name of the first

_AMPERE = (8, 0)

_CANDIDATES = {
    "float32": ("float32",),
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float16": ("float16", "float32"),  # bfloat16 would round the weights
}
"""The choices of `auto` for a checkpoint of each dtype; it takes the first that all devices compute natively."""


@dataclass(frozen=True, slots=True)
class NativeDtypes:
    """The dtypes that a device computes natively. ``device`` describes the device in messages."""

    device: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """``dtype`` is what the engine computes in. ``note`` explains a conversion by `auto`, or warns that a device
    emulates the configured ``dtype``; empty otherwise."""

    dtype: str
    note: str = ""


def native_dtypes(device: str) -> list[NativeDtypes]:
    """The devices of kind ``device`` (``cpu`` or ``cuda``) that this process can use: one CPU, or every GPU that torch
    finds."""
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


def cpu_dtypes(cpuinfo: str, max_isa: str = "") -> NativeDtypes:
    """The native dtypes of a CPU, from the text of /proc/cpuinfo. A flag counts if every core has it. ``max_isa`` is
    the value of ONEDNN_MAX_CPU_ISA, which limits the instructions that oneDNN uses (empty: not set).

    float16 is never native: torch converts it on CPUs, at about a fifth of the speed of float32.
    """
    cores = [
        set(value.split())
        for line in cpuinfo.splitlines()
        for key, _, value in [line.partition(":")]
        if key.strip() in _FLAG_LINES
    ]
    flags = set.intersection(*cores) if cores else set()
    if not flags & BFLOAT16_FLAGS:
        return NativeDtypes("a CPU without bfloat16 instructions", ("float32",))
    if max_isa.upper() in _ISAS_WITHOUT_BFLOAT16:
        return NativeDtypes(f"a CPU limited by ONEDNN_MAX_CPU_ISA={max_isa}", ("float32",))
    return NativeDtypes("a CPU with bfloat16 instructions", ("float32", "bfloat16"))


def gpu_dtypes(name: str, capability: tuple[int, int]) -> NativeDtypes:
    """The native dtypes of a GPU: bfloat16 from Ampere (compute capability 8.0) on."""
    dtypes = ("float32", "float16", "bfloat16") if capability >= _AMPERE else ("float32", "float16")
    return NativeDtypes(f"{name} (compute capability {capability[0]}.{capability[1]})", dtypes)


def choose_dtype(asked: str, checkpoint: str, places: Mapping[str, Sequence[NativeDtypes]]) -> DtypeChoice:
    """Choose the dtype of a service.

    ``asked`` is `ModelConfig.dtype`: ``auto`` takes the dtype of the ``checkpoint`` if all devices compute it natively
    (or none is known), else the fastest that all of them do; any other value is taken as it is. ``places`` are the
    devices of each place where a worker runs, by the name of the place in messages.
    """
    if asked != "auto":
        lacking = _lacking(asked, places)
        if not lacking:
            return DtypeChoice(asked)
        faster = choose_dtype("auto", checkpoint, places).dtype
        return DtypeChoice(
            asked,
            f"model.dtype: {asked} is emulated on {lacking}: expect prompts to take several times as long as in "
            f"{faster}, which model.dtype: auto takes",
        )
    dtype = next((each for each in _CANDIDATES[checkpoint] if not _lacking(each, places)), "float32")
    if dtype == checkpoint:
        return DtypeChoice(dtype)
    lacking = _lacking(checkpoint, places)
    return DtypeChoice(
        dtype, f"model.dtype: auto converts the {checkpoint} weights to {dtype}: {checkpoint} is emulated on {lacking}"
    )


def _lacking(dtype: str, places: Mapping[str, Sequence[NativeDtypes]]) -> str:
    """The places with a device that emulates ``dtype``, as text; empty if there are none."""
    found = [
        f"{place} ({device.device})" if place else device.device
        for place, devices in places.items()
        for device in devices
        if dtype not in device.dtypes
    ]
    return ", ".join(dict.fromkeys(found))
