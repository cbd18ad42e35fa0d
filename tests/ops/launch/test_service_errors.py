"""Failures of Ray or the network while a service starts are LaunchErrors of one line."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import ray

from ops.launch.ports import free_port
from ops.launch.ray_session import RaySession
from ops.launch.service import Service
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no\nluck"),
        OSError("no luck"),
        ValueError("no luck"),
        ConnectionError("no luck"),
        ray.exceptions.RaySystemError("no luck"),
    ],
)
def test_a_ray_of_our_own_that_does_not_start(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fails)
    session = RaySession("local")
    with pytest.raises(LaunchError, match=r"^cannot start a Ray of our own .*no luck$"):
        session.start()
    folder = session.folder
    assert folder is not None
    session.stop()
    assert not folder.exists()


def test_a_ray_that_breaks_while_the_service_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(session: RaySession, **_: Any) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(RaySession, "start", breaks)
    service = Service(PdserveConfig.parse({"gateway": {"host": "127.0.0.1", "port": 0}}))
    with pytest.raises(LaunchError, match=r"^Ray failed while the service was starting: .+$"):
        service.start()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", "::", "::1", ""])
def test_a_free_port_of_either_ip_version(host: str) -> None:
    if ":" in host and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    port = free_port(host, 0)
    assert free_port(host, port) == port
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    with socket.socket(family) as taken:
        taken.bind(address)
        taken.listen(1)
        with pytest.raises(LaunchError, match=r"gateway\.port: cannot listen on .*in use; choose another with --port"):
            free_port(host, port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(LaunchError, match=r"^gateway\.host: cannot listen on no\.such\.host\.invalid:0: "):
        free_port("no.such.host.invalid", 0)
