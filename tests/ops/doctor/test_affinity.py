"""Where GPUs and interfaces are attached, read from a tree as Linux's sysfs has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.doctor.affinity import Affinity, affinity_of, pci_addresses

SWITCHED, OTHER_SOCKET = "pci0000:15/0000:15:01.0/0000:16:00.0", "pci0000:80/0000:80:01.0"


def attach(sysfs: Path, place: str, address: str, numa_node: int, **interfaces: str) -> None:
    device = sysfs / "devices" / place / address
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{numa_node}\n")
    (sysfs / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (sysfs / "bus/pci/devices" / address).symlink_to(device)
    for name, kind in interfaces.items():
        (sysfs / "class" / kind / name).mkdir(parents=True)
        (sysfs / "class" / kind / name / "device").symlink_to(device)


def test_the_interfaces_nearest_to_a_gpu(tmp_path: Path) -> None:
    attach(tmp_path, SWITCHED, "0000:18:00.0", 0)
    attach(tmp_path, SWITCHED, "0000:19:00.0", 0, mlx5_0="infiniband", ib0="net")
    attach(tmp_path, "pci0000:15/0000:15:02.0", "0000:1a:00.0", 0, eth0="net")
    attach(tmp_path, OTHER_SOCKET, "0000:81:00.0", 1)
    attach(tmp_path, OTHER_SOCKET, "0000:82:00.0", 1, mlx5_1="infiniband")
    (tmp_path / "class/net/lo").mkdir()
    assert affinity_of("0000:18:00.0", tmp_path) == Affinity(0, ("mlx5_0", "ib0"), near=True)
    assert affinity_of("0000:81:00.0", tmp_path) == Affinity(1, ("mlx5_1",), near=True)


def test_a_gpu_whose_socket_has_no_interface(tmp_path: Path) -> None:
    attach(tmp_path, OTHER_SOCKET, "0000:81:00.0", 1)
    attach(tmp_path, SWITCHED, "0000:19:00.0", 0, eth0="net")
    assert affinity_of("0000:81:00.0", tmp_path) == Affinity(1, ("eth0",), near=False)


@pytest.mark.parametrize("numa_node", [-1, 0])
def test_what_is_not_known_is_not_claimed(numa_node: int, tmp_path: Path) -> None:
    attach(tmp_path, SWITCHED, "0000:18:00.0", -1)
    assert affinity_of("0000:18:00.0", tmp_path) == Affinity(None, (), near=None)
    attach(tmp_path, SWITCHED, "0000:19:00.0", numa_node, eth0="net")
    assert affinity_of("0000:18:00.0", tmp_path) == Affinity(None, ("eth0",), near=None)
    assert affinity_of("0000:77:00.0", tmp_path) == Affinity(None, (), near=None)


def test_addresses_as_nvidia_smi_tells_them(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-aa-01, 00000000:1A:00.0'\necho 'GPU-bb-02, 00000001:81:00.0'\n")
    program.chmod(0o755)
    assert pci_addresses({"PATH": f"{tmp_path}:/bin"}) == {"aa-01": "0000:1a:00.0", "bb-02": "0001:81:00.0"}
    program.write_text("#!/bin/sh\nexit 9\n")
    assert pci_addresses({"PATH": f"{tmp_path}:/bin"}) == {}
