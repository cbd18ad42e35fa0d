"""What published accelerators do, and what a step takes on them by calculation."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from checkpoints.arithmetic import ModelArithmetic
from checkpoints.shape import ModelShape
from pdserve.core.errors import InvalidRequest
from simulator.planning.step_time import CalculatedSteps

REACHED_FLOPS, REACHED_BANDWIDTH = 0.6, 0.8
"""The shares of a data sheet's rates that steps are assumed to reach. They are assumptions: measure with ``pdserve
experiment profile`` where there is a device."""
STEP_S = 0.3e-3
"""Assumed for launching a step and sampling."""
SUM_LATENCY_S = 10e-6
"""Assumed for a sum over devices, beside its bytes."""
USABLE_MEMORY = 0.9


class DeviceKind(msgspec.Struct, frozen=True):
    """A device by its data sheet: dense bfloat16 ``flops`` per second, bytes per second of its memory (``bandwidth``),
    bytes of memory, and bytes per second in one direction of its links within a host (``link``) and of a network
    interface for each device (``nic``). ``source`` says where the figures are from."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    nic: float
    source: str

    def steps(self, shape: ModelShape, dtype: str, devices: int) -> CalculatedSteps:
        """The steps of a model that ``devices`` of this kind share."""
        return CalculatedSteps(
            ModelArithmetic.of(shape, dtype),
            REACHED_FLOPS * self.flops,
            REACHED_BANDWIDTH * self.bandwidth,
            STEP_S,
            devices,
            shape.hidden_size,
            self.link,
            SUM_LATENCY_S,
        )


_SHEET = "the maker's data sheet, as of November 2026"
DEVICES: Mapping[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind("a100", 312e12, 2.039e12, 80e9, 300e9, 25e9, f"A100 SXM 80 GB: {_SHEET}"),
        DeviceKind("h100", 989e12, 3.35e12, 80e9, 450e9, 50e9, f"H100 SXM: {_SHEET}"),
        DeviceKind("h200", 989e12, 4.8e12, 141e9, 450e9, 50e9, f"H200 SXM: {_SHEET}"),
        DeviceKind("b200", 2250e12, 8e12, 180e9, 900e9, 50e9, f"HGX B200: {_SHEET}"),
        DeviceKind("l40s", 362e12, 0.864e12, 48e9, 32e9, 25e9, f"L40S, PCIe 4: {_SHEET}"),
        DeviceKind("mi300x", 1307e12, 5.3e12, 192e9, 64e9, 50e9, f"MI300X, one Infinity Fabric link: {_SHEET}"),
        DeviceKind("lpu", 188e12, 80e12, 0.23e9, 16.5e9, 16.5e9, f"first Groq LPU, FP16, memory on the chip: {_SHEET}"),
    )
}
"""By name. ``nic``: 200 or 400 Gbit/s for each device, as such hosts usually have."""


def device_kind(text: str) -> DeviceKind:
    """The device that ``text`` names, or describes: ``flops=989e12,bandwidth=3.35e12,memory=80e9,link=450e9,nic=50e9``.
    InvalidRequest if it does neither."""
    if text in DEVICES:
        return DEVICES[text]
    wanted = [name for name in DeviceKind.__struct_fields__ if name not in ("name", "source")]
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    if set(parts) != set(wanted):
        raise InvalidRequest(
            f"device: {text!r} is none of {', '.join(DEVICES)}, and does not give {', '.join(wanted)}; write, for "
            "example, flops=989e12,bandwidth=3.35e12,memory=80e9,link=450e9,nic=50e9"
        )
    values = {}
    for name in wanted:
        try:
            values[name] = float(parts[name])
        except ValueError:
            values[name] = 0.0
        if not 0 < values[name] < float("inf"):
            raise InvalidRequest(f"device: {name}={parts[name]} is not a positive number")
    return DeviceKind("device", **values, source="as given")
