"""The hosts that the other tests here run on are what they claim to be."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.host import HOME, outside
from tests.cluster.hosts import STATES, Hosts

pytestmark = pytest.mark.cluster

AHEAD_S = 5000


@pytest.fixture(scope="module")
def pair(namespaces: None) -> Iterator[Hosts]:
    with Hosts(["left", "right"], clock_ahead_s={"right": AHEAD_S}) as made:
        yield made


@pytest.fixture(autouse=True)
def whole(pair: Hosts) -> Iterator[None]:
    yield
    pair.restore()


def reaches(address: str, port: int = 22) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=0.5):
        return True
    return False


def test_they_share_nothing(pair: Hosts) -> None:
    left, right = pair
    seen = "hostname; ls -A ~ /tmp /dev/shm; ps -e | wc -l; cut -d. -f1 /proc/uptime"
    before = left.run(seen).stdout.split()
    left.run("touch ~/mine /tmp/mine /dev/shm/mine; sleep 1000 >/dev/null 2>&1 &")
    assert [process.name() for process in left.processes()] == ["sleep"]
    assert right.processes() == []
    other = right.ssh(seen).stdout.split()
    assert (before[0], other[0]) == ("left", "right")
    assert "mine" not in other
    assert not (HOME / "mine").exists()
    assert (left.home / "mine").exists()
    assert abs(int(other[-1]) - AHEAD_S - time.clock_gettime(time.CLOCK_BOOTTIME)) < 30


def test_partition_and_closed_ports(pair: Hosts) -> None:
    left, right = pair
    with socket.create_connection((right.address, 22), timeout=5) as connection:
        assert connection.recv(100).startswith(b"SSH")
        right.partition()
        assert not reaches(right.address)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):  # nobody said that it is over
            connection.recv(100)
        right.heal()
        assert reaches(right.address)
    right.close_port(22)
    assert not reaches(right.address)
    right.open_ports()
    right.close_port(9)
    assert reaches(right.address)
    assert "SSH" in left.run(f"exec 3<>/dev/tcp/{right.name}/22; head -1 <&3").stdout


def test_power_fails_and_returns(pair: Hosts) -> None:
    right = pair["right"]
    right.run("touch ~/kept /tmp/lost; sleep 1000 >/dev/null 2>&1 &")
    sleeping = right.processes()
    right.kill()
    assert not reaches(right.address)
    assert not any(process.is_running() for process in sleeping)
    right.boot()
    assert right.ssh("ls ~/kept; ls /tmp").stdout.split() == [f"{HOME}/kept"]


def test_a_shaped_cable_is_slower(pair: Hosts) -> None:
    left = pair["left"]

    def seconds() -> float:
        began_s = time.monotonic()
        left.ssh("head -c 1250000 /dev/zero")
        return time.monotonic() - began_s

    unshaped_s = seconds()
    left.rate(10)
    assert seconds() > unshaped_s + 0.5  # 1 s less what a full bucket lets through at once, and noise
    left.rate(None)
    assert seconds() < unshaped_s + 0.5


def test_nothing_is_left(namespaces: None) -> None:
    with Hosts(["only"]) as made:
        made["only"].run("sleep 1000 >/dev/null 2>&1 &")
        ran = made["only"].processes()
        bridge, state = made.bridge, made.state
        assert bridge in outside("ip", "link", "show")
    assert not any(psutil.pid_exists(process.pid) for process in ran)
    assert bridge not in outside("ip", "link", "show")
    assert state not in Path(STATES).iterdir()
