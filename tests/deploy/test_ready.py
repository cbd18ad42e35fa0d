"""The gateway pod's readiness: the service's gRPC health, and ready while there is nothing to ask."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.core.address import target_of
from tests.certificates import Certificates
from tests.deploy.files import DEPLOY, pod_templates
from tests.pdserve.scripted_service import ScriptedService


def is_ready(port: int, *tls: str | Path) -> bool:
    status = subprocess.run([sys.executable, DEPLOY / "ready.py", str(port), *tls], timeout=60, check=False).returncode
    assert status in (0, 1)
    return status == 0


@pytest.fixture
def service() -> Iterator[tuple[int, health.HealthServicer]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port, servicer
    server.stop(None).wait()


def test_it_says_what_the_service_says(service: tuple[int, health.HealthServicer]) -> None:
    port, servicer = service
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not is_ready(port)
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert is_ready(port)


def test_it_asks_over_tls(certificates: Certificates) -> None:
    """The certificate has another name than the address that a probe in the pod connects to."""
    with ScriptedService(certificates.server) as service:
        port = target_of(service.target)[0].rpartition(":")[2]
        assert is_ready(int(port), certificates.ca, "localhost")
        assert not is_ready(int(port), certificates.ca, "elsewhere")
        assert not is_ready(int(port), certificates.stranger.cert, "localhost")
        assert not is_ready(int(port))
        service.set_serving(False)
        assert not is_ready(int(port), certificates.ca, "localhost")


def test_nobody_listens_yet() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody else can be there
        assert is_ready(taken.getsockname()[1])


def test_what_listens_but_does_not_answer_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not is_ready(silent.getsockname()[1])


def test_the_pods_probe_waits_longer_than_it_takes() -> None:
    probe = pod_templates()["gateway"]["spec"]["containers"][0]["readinessProbe"]
    assert probe["exec"]["command"] == ["python", "/opt/pdserve/deploy/ready.py", "50051"]
    assert 2 * 3.0 < probe["timeoutSeconds"] <= probe["periodSeconds"]
