"""The floating-point type a model is computed in: what devices compute natively, and what a service takes of it.

Imports torch only to ask for GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""The flags of /proc/cpuinfo that stand for bfloat16 products: two of x86, one of ARM."""
_FLAG_LINES = ("flags", "Features")  # as x86 and ARM call them

_ISAS_WITHOUT_BFLOAT16 = frozenset(
    {
        "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_MIC", "AVX512_MIC_4OPS", "AVX512_CORE",
        "AVX512_CORE_VNNI",
    }
)  # fmt: skip
"""Values of oneDNN's ONEDNN_MAX_CPU_ISA that keep it from using bfloat16 instructions."""

_MAX_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the second is oneDNN's older name of the first

_AMPERE = (8, 0)

_CANDIDATES = {
    "float32": ("float32",),
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float16": ("float16", "float32"),  # bfloat16 would round the weights
}
"""What `auto` takes for a checkpoint of each type: the first that all devices compute natively."""


@dataclass(frozen=True, slots=True)
class NativeDtypes:
    """The types that a device computes natively; ``device`` describes it for messages."""

    device: str
    dtypes: tuple[str, ...]

    def to_wire(self) -> dict[str, Any]:
        """Plain values."""
        return {"device": self.device, "dtypes": list(self.dtypes)}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> NativeDtypes:
        """The value that `to_wire` described."""
        return cls(data["device"], tuple(data["dtypes"]))


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """``dtype`` is what the engine computes in. ``note`` explains a conversion that `auto` makes, or warns that
    ``dtype`` was asked for although a device does not compute it natively; empty if there is nothing to say."""

    dtype: str
    note: str = ""


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


def cpu_dtypes(cpuinfo: str, max_isa: str = "") -> NativeDtypes:
    """What a CPU computes natively, from the text of /proc/cpuinfo. A flag counts if every core has it. ``max_isa`` is
    the value of ONEDNN_MAX_CPU_ISA, which limits the instructions that oneDNN uses (empty: not set).

    float16 never counts: torch computes it on CPUs by conversion, at about a fifth of the speed of float32.
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
    """What a CUDA GPU computes natively: bfloat16 from Ampere (compute capability 8.0) on."""
    dtypes = ("float32", "float16", "bfloat16") if capability >= _AMPERE else ("float32", "float16")
    return NativeDtypes(f"{name} (compute capability {capability[0]}.{capability[1]})", dtypes)


def choose_dtype(asked: str, checkpoint: str, places: Mapping[str, Sequence[NativeDtypes]]) -> DtypeChoice:
    """The type for a service whose workers run at ``places`` (the devices of each, by what messages call the place).

    ``asked`` is `ModelConfig.dtype`, ``checkpoint`` the type of the weights. A type other than auto is taken as it is.
    auto takes the checkpoint's type where all devices compute it natively, else the fastest that all of them do; the
    checkpoint's own if no device is known.
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
    """The places with a device that does not compute ``dtype`` natively, in words; empty if there is none."""
    found = [
        f"{place} ({device.device})" if place else device.device
        for place, devices in places.items()
        for device in devices
        if dtype not in device.dtypes
    ]
    return ", ".join(dict.fromkeys(found))
