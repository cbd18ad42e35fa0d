"""Where the GPUs and network interfaces of a host are attached: which interfaces are near a GPU, from Linux's sysfs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SMI_S = 10.0
_CLASSES = "infiniband", "net"
SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Affinity:
    """The place of a GPU: its NUMA node (None: unknown), the interfaces that are nearest to it, and whether these are
    on its NUMA node (None: unknown, or there is no interface)."""

    numa_node: int | None
    interfaces: tuple[str, ...]
    near: bool | None


def pci_addresses(environment: Mapping[str, str]) -> dict[str, str]:
    """The PCI addresses of the host's GPUs, as sysfs names them, by their UUIDs without ``GPU-``; empty if nvidia-smi
    is missing or does not tell."""
    command = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_S, env=dict(environment), check=True
        ).stdout
        pairs = [[part.strip() for part in line.split(",")] for line in said.splitlines()]
        return {uuid.removeprefix("GPU-"): bus_id.lower()[-12:] for uuid, bus_id in pairs}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def affinity_of(pci_address: str, sysfs: Path = SYSFS) -> Affinity:
    """The place of the GPU at ``pci_address`` (as ``0000:18:00.0``). The nearest interfaces are those that share most
    of the path of PCI bridges with it; interfaces without a device, as bridges and loopback, do not count. Of a GPU
    that sysfs does not have, nothing is known."""
    gpu = (sysfs / "bus/pci/devices" / pci_address).resolve()
    if not gpu.exists():
        return Affinity(None, (), None)
    numa_node = _numa_node(gpu)
    devices = {
        each.name: (each / "device").resolve()
        for kind in _CLASSES
        for each in sorted((sysfs / "class" / kind).glob("*"))
        if (each / "device").exists()
    }
    nodes = {name: _numa_node(device) for name, device in devices.items()}
    closeness = {name: (_shared(gpu, device), nodes[name] == numa_node) for name, device in devices.items()}
    nearest = tuple(name for name in devices if closeness[name] == max(closeness.values()))
    theirs = {nodes[name] for name in nearest}
    near = None if numa_node is None or not nearest or None in theirs else theirs == {numa_node}
    return Affinity(numa_node, nearest, near)


def _shared(one: Path, other: Path) -> int:
    """The parts that the paths have in common from their beginning."""
    count = 0
    for mine, theirs in zip(one.parts, other.parts, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _numa_node(device: Path) -> int | None:
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not tell
