"""The hosts that the other tests here run on share nothing, lose nothing but their processes, and leave nothing."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.host import HOME, outside
from tests.cluster.hosts import STATES, Hosts

pytestmark = pytest.mark.cluster

AHEAD_S = 5000


def reaches(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=0.5):
        return True
    return False


def test_hosts(namespaces: None) -> None:
    with Hosts(["left", "right"], clock_ahead_s={"right": AHEAD_S}) as pair:
        left, right = pair
        seen = "hostname; ls -A ~ /tmp /dev/shm; ps -e | wc -l; cut -d. -f1 /proc/uptime"
        before = left.run(seen).stdout.split()
        left.run("touch ~/mine /tmp/mine /dev/shm/mine; sleep 1000 >/dev/null 2>&1 &")
        (sleeping,) = left.processes()
        deadline_s = time.monotonic() + 10.0
        while sleeping.name() != "sleep":  # at first it is the shell
            assert time.monotonic() < deadline_s, sleeping
            time.sleep(0.05)
        assert right.processes() == []
        other = right.ssh(seen).stdout.split()
        assert (before[0], other[0]) == ("left", "right")
        assert "mine" not in other
        assert not (HOME / "mine").exists()
        assert int(other[-1]) >= AHEAD_S
        assert "SSH" in left.run(f"exec 3<>/dev/tcp/{right.name}/22; head -1 <&3").stdout

        with socket.create_connection((right.address, 22), timeout=5) as connection:
            assert connection.recv(100).startswith(b"SSH")
            right.partition()
            assert not reaches(right.address)
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):  # nothing said that it is over
                connection.recv(100)
            right.heal()
            assert reaches(right.address)

        left.kill()
        assert not reaches(left.address)
        assert not sleeping.is_running()
        left.boot()
        assert left.ssh("ls ~/mine; ls /tmp /dev/shm").stdout.split() == [f"{HOME}/mine", "/dev/shm:", "/tmp:"]

        ran, bridge, state = left.processes() + right.processes(), pair.bridge, pair.state
        assert bridge in outside("ip", "link", "show")
    assert not any(psutil.pid_exists(process.pid) for process in ran)
    assert bridge not in outside("ip", "link", "show")
    assert state not in Path(STATES).iterdir()
