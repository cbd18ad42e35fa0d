"""The examples of docs/api.md, run as they stand against a service of fake workers. (Those whose answer has to be JSON
are run in `tests.e2e.test_structured_outputs`.)"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2

from pdserve.pb import inference_pb2 as pb
from tests.gateway.conftest import PATIENT, Service, StartService
from tests.gateway.fuzzing import ends_soon
from tests.gateway.http_api.conftest import chat_folder as chat_folder
from tests.local_cluster import free_port

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
REQUESTS = {
    "pdserve.v1.Inference/Generate": pb.GenerateRequest,
    "pdserve.v1.Inference/GetStatus": pb.GetStatusRequest,
    "grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    "grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest,
}


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
async def service(start_service: StartService, chat_folder: Path) -> Service:
    gateway = {"host": "127.0.0.1", "port": 0, "http_port": free_port()}
    service = await start_service(
        "p0", "d0", folder=chat_folder, gateway=gateway, router=PATIENT, model={"name": "tiny"}
    )
    ends_soon(service)
    return service


async def run(service: Service, *command: str) -> str:
    """The output of a command, in which the documented ports are those of ``service``."""
    ports = {"localhost:50051": service.gateway.port, "localhost:8000": service.gateway.http_port}
    arguments = list(command)
    for documented, port in ports.items():
        arguments = [each.replace(documented, f"127.0.0.1:{port}") for each in arguments]
    done = await asyncio.to_thread(
        subprocess.run, arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "example", [each for each in examples("python") if not re.search("tool_calls|response_format", each)]
)
async def test_python(service: Service, example: str) -> None:
    output = await run(service, sys.executable, "-c", example)
    assert output.strip()
    if "BadRequest" in example:
        assert output == "top_p\n"


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
@pytest.mark.parametrize("example", [example for example in examples("sh") if "grpcurl" not in example])
async def test_curl(service: Service, example: str) -> None:
    checked = f'curl() {{ command curl --fail-with-body "$@"; }}\n{example}'
    assert (await run(service, "bash", "-eu", "-o", "pipefail", "-c", checked)).strip()


def test_grpcurl_calls_every_method_with_messages_of_its_own() -> None:
    shell = "".join(example for example in examples("sh") if "grpcurl" in example)
    commands = re.sub(r"\\\n\s*", "", shell).splitlines()
    called = set()
    for command in commands:
        assert command.startswith("grpcurl -plaintext ")
        if command.endswith((" list", " describe pdserve.v1.Inference")):
            continue
        method = command.split()[-1]
        (message,) = re.findall(r"-d '(.*?)'", command)
        json_format.Parse(message, REQUESTS[method]())
        called.add(method)
    assert called == set(REQUESTS)
