"""Failures of Ray or the network while a service starts are LaunchErrors of one line."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from ops.launch.ports import free_ports
from ops.launch.preparation import prepare
from ops.launch.ray_head import RayHead
from ops.launch.ray_session import RaySession
from ops.launch.service import Service
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError

CANNOT_START = r"^cannot start a Ray of our own \(cluster\.address: local\): "


@pytest.fixture
def head() -> Iterator[RayHead]:
    head = RayHead()
    yield head
    head.stop()
    assert not head.folder.exists()


def test_a_ray_of_our_own_whose_process_dies(head: RayHead) -> None:
    earlier = set(psutil.Process().children())
    head.begin()
    (process,) = set(psutil.Process().children()) - earlier  # its command line is empty for a moment
    process.kill()
    with pytest.raises(LaunchError, match=CANNOT_START + r"its process ended \(exit code -9\)$"):
        head.wait_started()


def test_a_ray_of_our_own_whose_raylet_dies(head: RayHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is kept, although the folder of the Ray is removed. A raylet that ends at once has none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    head.begin()

    def kill_raylet() -> None:
        if not any(log.stat().st_size for log in head.folder.glob("ray/session_2*/logs/raylet.out")):
            return
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.name() == "raylet" and str(head.folder) in " ".join(each.cmdline()):
                    each.kill()

    with pytest.raises(LaunchError, match=CANNOT_START + r"its raylet ended \(exit code -9\); see ") as failed:
        head.wait_started(kill_raylet)
    head.stop()
    assert "raylet" in Path(str(failed.value).split("; see ")[1]).read_text()


def test_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = RayHead()
    monkeypatch.setattr(head, "folder", tmp_path / "missing" / "folder")
    with pytest.raises(LaunchError, match=r"^cannot create /.*/missing/folder: No such file or directory$"):
        head.begin()


@pytest.mark.parametrize("error", [ValueError("no luck"), ray.exceptions.RaySystemError("no luck")])
def test_a_ray_that_cannot_be_joined(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fails)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(LaunchError, match=rf"^cluster\.address: cannot join Ray at '{address}': .*no luck; check "):
            RaySession(address).start()


def test_a_ray_that_breaks_while_the_service_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(session: RaySession, **_: Any) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(RaySession, "start", breaks)
    service = Service(prepare(PdserveConfig.parse({"gateway": {"host": "127.0.0.1", "port": 0}})))
    with pytest.raises(LaunchError, match=r"^Ray failed while the service was starting: .+$"):
        service.start()


@pytest.mark.parametrize("host", ["localhost", "::1", ""])
def test_a_free_port_of_either_ip_version(host: str) -> None:
    if ":" in host and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    port = free_ports(host)
    assert free_ports(host, port) == port
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    with socket.socket(family) as taken:
        taken.bind(address)
        taken.listen(1)
        mine = rf"in use by {re.escape(psutil.Process().name())} \(process {os.getpid()}\); choose another with --port$"
        with pytest.raises(LaunchError, match=r"^gateway\.port: cannot listen on .*" + mine):
            free_ports(host, port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(LaunchError, match=r"^gateway\.host: cannot listen on no\.such\.host\.invalid: "):
        free_ports("no.such.host.invalid")
