"""The worker plane of a whole service answers nobody without the service's secret, and the secret shows nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from contract.control import MAX_CONTROL_BYTES, Beat, Receive, Run
from contract.message import encode
from pdserve import Client
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError, TransferRefused
from pdserve.core.handoff import KVEndpoint, KVPeer
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role, WorkerLoad
from runtime.secret import SECRET_VARIABLE, ServiceSecret
from tests.fake_worker import fake_info
from tests.host_pool import HostPool
from tests.http2_flood import PeakMemory, flood
from tests.kv_transfer.conftest import sender_of
from tests.local_cluster import ROOT, LocalCluster, free_port, local_cluster
from tests.loopback import create_transport
from tests.worker.test_authentication import REFUSED
from worker.authentication import CONTROL, REGISTRY, StreamService, open_stream, stream_channel

PROMPT = "def read_lines(path):"
OTHER = ServiceSecret.new()
SETTINGS = {
    "model": {"path": "tiny", "dtype": "float32"},
    "engine": {"block_size": 16, "num_blocks": 256},
    "transfer": {"transport": "tcp"},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(SETTINGS) as cluster:
        yield cluster


async def attack(address: str, service: StreamService, *messages: bytes) -> grpc.StatusCode:
    """Send messages as a proven peer would, without a proof; how the stream ended."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = channel.stream_stream(f"/{service.name}/{service.method}")
        call = stub(timeout=10.0)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in messages:
                await call.write(message)
        return await call.code()  # type: ignore[no-any-return]


async def test_what_strangers_did_before_there_was_a_secret(cluster: LocalCluster) -> None:
    """Reserve a worker's blocks, crash its engine by token ids that the model does not have, register a worker of their
    own, and fill decode's prefix cache with KV of their own: none of it happens, and requests get the right tokens."""
    with Client(cluster.target) as client:
        expected = client.generate(PROMPT, max_tokens=8, mode="pd").result().token_ids
        before = cluster.inside()
        decode = next(worker for worker in before.workers if worker.worker_id == "decode-0")
        prompt, sampling = (1,) * 1000, SamplingParams(4, ignore_eos=True)
        peer = fake_info("test", Role.PREFILL).peer
        reserve = [encode(Receive(Request(f"r{i}", prompt, sampling, attempt_id=f"r{i}"), peer)) for i in range(10)]
        crash = encode(Run(Request("bad", (2**31 - 1,) * 20, sampling, attempt_id="bad")))
        beat = encode(Beat(fake_info("decode-9", Role.DECODE), WorkerLoad()))
        assert await attack(decode.address, CONTROL, *reserve, crash) in REFUSED
        assert await attack(cluster.registries[0], REGISTRY, beat, beat) in REFUSED
        for service, address in ((CONTROL, decode.address), (REGISTRY, cluster.registries[0])):
            async with stream_channel(address, MAX_CONTROL_BYTES) as channel:
                with pytest.raises(PdserveError, match="does not know the service's secret"):
                    await open_stream(channel, service, OTHER, address)
        pool = HostPool(KVLayout.uniform("model", "float32", 16, 2, 2, 16), 4)
        for secret in (OTHER, ServiceSecret.new()):
            transport = create_transport("tcp", pool.memory, secret)
            sender = sender_of(pool, transport, worker_id="prefill-0")
            with pytest.raises(TransferRefused, match="does not know the service's secret"):
                await sender.connect(KVPeer("decode-0", "e", (KVEndpoint("tcp", decode.kv_addresses["tcp"]),)))
            await sender.aclose()
            await transport.aclose()
        after = await asyncio.to_thread(cluster.wait_idle)
        assert [worker.worker_id for worker in after.workers] == [worker.worker_id for worker in before.workers]
        assert [worker.engine_restarts for worker in after.workers] == [0, 0]
        result = client.generate(PROMPT, max_tokens=8, mode="pd").result()
        assert result.token_ids == expected
        assert result.attempts == 1


def test_floods_of_strangers_are_not_held(cluster: LocalCluster) -> None:
    """gRPC knows no limit for a message that is being read, so nothing of theirs is kept. A single read by gRPC may
    take some MiB."""
    with Client(cluster.target) as client:
        status = cluster.inside()
        (decode,) = (worker for worker in status.workers if worker.worker_id == "decode-0")
        for pid, address, service in (
            (decode.pid, decode.address, CONTROL),
            (status.pid, cluster.registries[0], REGISTRY),
        ):
            methods = [f"/{service.name}/{method}" for method in (service.method, "Meet")]
            flood(address, methods[0], 2**16)
            peak = PeakMemory(pid)
            for method in methods:
                flood(address, method, 64 * 2**20)
            assert peak.growth_bytes() < 40 * 2**20
        assert client.generate(PROMPT, max_tokens=4, mode="pd").result().attempts == 1


def test_the_secret_is_in_no_command_line_and_its_variable_is_not_inherited(cluster: LocalCluster) -> None:
    secret = cluster.secret.hex()
    for popen in cluster.processes.values():
        process = psutil.Process(popen.pid)
        engines = process.children(recursive=True)
        assert all(secret not in " ".join(each.cmdline()) for each in (process, *engines))
        for engine in engines:
            assert SECRET_VARIABLE not in engine.environ()


@pytest.mark.parametrize("module", ["gateway", "ops.launch.worker"])
def test_without_a_secret_no_process_starts(module: str) -> None:
    config = PdserveConfig.parse(SETTINGS).model_dump_json()
    command = [sys.executable, "-P", "-m", module, config, f"127.0.0.1:{free_port()}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {SECRET_VARIABLE}")
    assert "is not set" in done.stderr


def _holds(path: Path, needles: list[bytes]) -> bool:
    """Whether one of these is in the file."""
    try:
        content = path.read_bytes()
    except OSError:  # a socket, or removed meanwhile
        return False
    return any(needle in content for needle in needles)


SERVICE = """
import json, sys
from ops.launch.preparation import prepare
from pdserve.core.config import PdserveConfig

prepared = prepare(PdserveConfig.parse(json.loads(sys.argv[1])))
prepared.head.begin()
from ops.launch.service import Service
from ray._private.state import actors

told = []
service = Service(prepared, told.append, told.append)
try:
    service.start()
    secret = service._secret.hex()
    shown = [*told, repr(actors())]
    print(json.dumps({"secret": secret, "shown": shown, "folder": str(prepared.head.folder)}), flush=True)
    sys.stdin.read()
finally:
    service.stop()
"""
"""Starts a service as the supervisor does, and tells what the supervisor never tells."""


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_service_on_ray_shows_its_secrets_nowhere() -> None:
    """The service's secret and its Ray's token are in no command line, environment, log or other file of Ray's session,
    and not in what Ray tells of its actors."""
    port = free_port()
    settings = {
        **SETTINGS,
        "gateway": {"host": "127.0.0.1", "port": port, "http_port": 0},
        "cluster": {"prefill": 1, "decode": 1, "oversubscribe": True},
    }
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        told = json.loads(supervisor.stdout.readline())
        folder, secret = Path(told["folder"]), str(told["secret"])
        token = (folder / "auth_token").read_text()
        assert len(token) == 64
        with Client(f"127.0.0.1:{port}") as client:
            status = client.status()
            assert client.generate(PROMPT, max_tokens=4, mode="pd").result().attempts == 1
        assert "DecodeWorkerActor" in told["shown"][-1]  # what Ray's dashboard has of actors
        shown = [repr(status), *told["shown"]]
        process = psutil.Process(supervisor.pid)
        family = [process, *process.children(recursive=True)]
        assert any("DecodeWorkerActor" in " ".join(each.cmdline()) for each in family)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                shown += [*each.cmdline(), *each.environ().values()]
        assert not [text for text in shown if secret in text or token in text]
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != "auth_token"]
        assert any("worker" in path.name for path in files)
        needles = [secret.encode(), bytes.fromhex(secret), token.encode()]
        assert not [path for path in files if _holds(path, needles)]
        supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0
