"""Workers that start the servers of another engine: real processes of a recorded command, behind the real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

import external_engines.server as server_module
import external_engines.started as started_module
from checkpoints.source import resolve_model
from external_engines.started import StartedServer
from external_engines.vllm_server import environment_of
from gateway.gateway import Gateway
from ops.launch.preparation import prepare
from ops.launch.worker import make_worker
from pdserve import AsyncClient, LayoutMismatch
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError, LaunchError
from pdserve.core.worker import Role
from runtime.secret import ServiceSecret
from tests.e2e.conftest import Cli
from tests.external_engines.recorded_command import install, started
from tests.external_engines.recorded_vllm import greedy
from tests.external_engines.served import EXPECTED, PROMPT, Service
from tests.local_cluster import free_port
from worker.client import WorkerClient
from worker.spec import WorkerSpec

SECRET = ServiceSecret.new()


def config_of(folder: Path, **settings: object) -> PdserveConfig:
    engine = str(settings.get("worker.engine", "vllm"))
    overrides = {
        "worker.engine": engine,
        "worker.command": install(folder, engine),
        "gateway.port": 0,
        "gateway.http_port": 0,
        "router.heartbeat_s": 0.05,
        "model.dtype": "bfloat16",
        **settings,
    }
    return PdserveConfig.load(None, overrides)


def spec_of(
    config: PdserveConfig, role: Role, registry: str, cores: tuple[int, ...] = (), device: str = "cpu"
) -> WorkerSpec:
    return WorkerSpec(
        worker_id=f"{role}-0",
        role=role,
        host="127.0.0.1",
        node="127.0.0.1",
        device=device,
        registry_addresses=(registry,),
        version="test",
        service="s",
        config=config,
        cores=cores,
    )


@asynccontextmanager
async def started_service(*configs: PdserveConfig, device: str = "cpu") -> AsyncIterator[tuple[Gateway, list[Any]]]:
    """A gateway, and a prefill and a decode worker of these configurations, which start servers on ``device``."""
    config, cores = configs[0], sorted(os.sched_getaffinity(0))
    gateway = Gateway(
        config,
        model=resolve_model("tiny"),
        connect=partial(WorkerClient.connect, secret=SECRET),
        secret=SECRET,
        service="s",
    )
    await gateway.start()
    gateway.expect({"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}, version=1)
    workers = [
        make_worker(spec_of(each, role, gateway.registry_address, (cores[number % len(cores)],), device), SECRET)
        for number, (role, each) in enumerate(zip(Role, configs, strict=True))
    ]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        await asyncio.gather(*(worker.started for worker in workers))
        yield gateway, workers
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await gateway.stop(0.0)


@asynccontextmanager
async def service(
    folder: Path, decode: dict[str, Any] | None = None, **settings: object
) -> AsyncIterator[Service[StartedServer]]:
    """``decode`` are further settings of the decode worker."""
    try:
        configs = config_of(folder, **settings), config_of(folder, **settings, **(decode or {}))
        async with (
            started_service(*configs) as (gateway, workers),
            AsyncClient(f"127.0.0.1:{gateway.port}") as client,
        ):
            yield Service(gateway, client, *workers)
    finally:
        assert not [each for each in started(folder) if psutil.pid_exists(each["pid"])]  # type: ignore[arg-type]


async def test_a_hand_off_a_client_that_leaves_other_roles_and_a_dismissed_worker(tmp_path: Path) -> None:
    async with service(tmp_path) as served:
        result = await served.generate()
        assert list(result.token_ids) == EXPECTED
        assert (result.prefill_worker, result.decode_worker) == ("prefill-0", "decode-0")
        assert result.kv_bytes == result.kv_bytes_expected > 0
        assert result.prefill_cached_tokens == 16  # the recorded server says so
        alone = await served.generate("colocated")
        assert (list(alone.token_ids), alone.prefill_cached_tokens) == (EXPECTED, 16)
        workers = served.workers()
        assert {worker.state for worker in workers.values()} == {"ready"}
        assert [link.transport for link in workers["prefill-0"].links] == ["nixl"]
        assert {worker.engine_pid for worker in workers.values()} == {each["pid"] for each in started(tmp_path)}
        assert not served.gateway.status().notes
        await leave(served)
        await take_other_roles(served)
        await served.gateway.dismiss(["decode-0"])
        await served.until(lambda: len([p for p in started(tmp_path) if psutil.pid_exists(p["pid"])]) == 1)  # type: ignore[arg-type]


async def leave(served: Service[StartedServer]) -> None:
    """Leave a stream, which ends its request on the server."""
    stream = served.client.generate(PROMPT, max_tokens=450, mode="pd", ignore_eos=True)
    async for token in stream:
        if token.index == 10:
            break
    assert served.decode.report("", None).load.others_requests == 1
    await stream.aclose()
    await served.until(lambda: served.decode.report("", None).load.others_requests == 0)
    await served.until(lambda: served.workers()["decode-0"].running == 0)


async def take_other_roles(served: Service[StartedServer]) -> None:
    """Have the two workers change their roles."""
    served.gateway.expect({"prefill-0": Role.DECODE, "decode-0": Role.PREFILL}, version=2)
    assert not await served.gateway.directory.wait_roles(["prefill-0", "decode-0"], 10.0)
    result = await served.generate()
    assert list(result.token_ids) == EXPECTED
    assert (result.prefill_worker, result.decode_worker) == ("decode-0", "prefill-0")


async def test_sglang_servers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"worker.engine": "sglang"}
    async with service(tmp_path, **settings) as served:
        result = await served.generate()
        assert list(result.token_ids) == EXPECTED
        assert (result.prefill_worker, result.decode_worker) == ("prefill-0", "decode-0")
        assert [link.transport for link in served.workers()["prefill-0"].links] == ["sglang"]
        given = {str(each["disaggregation_mode"]): each for each in started(tmp_path)}
        assert given.keys() == {"prefill", "decode"}
        assert given["prefill"]["model_path"] == str(resolve_model("tiny").folder)
        for each in given.values():  # other users of the host are refused
            async with httpx2.AsyncClient(trust_env=False) as http:
                assert (await http.get(f"http://{each['host']}:{each['port']}/server_info")).status_code == 401
        os.kill(int(str(given["decode"]["pid"])), signal.SIGKILL)
        await served.until(lambda: served.workers()["decode-0"].engine_restarts == 1)
        assert list((await served.generate()).token_ids) == EXPECTED


async def test_what_a_server_is_started_with(tmp_path: Path) -> None:
    settings: dict[str, object] = {"engine.kv_memory_mb": 64, "worker.arguments": ["--block-size", "32"]}
    config = config_of(tmp_path, **settings)
    core = sorted(os.sched_getaffinity(0))[-1]
    worker = StartedServer(spec_of(config, Role.PREFILL, "127.0.0.1:1", (core,)), SECRET)
    task = asyncio.create_task(worker.run())
    try:
        info = await worker.started
    finally:
        task.cancel()
        await asyncio.wait([task])
    (given,) = started(tmp_path)
    assert given["model"] == str(resolve_model("tiny").folder)
    assert (given["dtype"], given["kv_cache_memory_bytes"]) == ("bfloat16", 64 * 2**20)
    assert json.loads(str(given["kv_transfer_config"]))["kv_load_failure_policy"] == "fail"
    assert given["block_size"] == info.layout.block_size == 32
    assert given["cores"] == [core]
    environment = given["environment"]
    assert isinstance(environment, dict)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == str(core)
    assert info.kv_endpoints[0].address == f"127.0.0.1:{environment['VLLM_NIXL_SIDE_CHANNEL_PORT']}"
    assert not Path(str(given["uds"])).parent.exists()


@pytest.mark.parametrize(
    ("arguments", "binding"),
    [
        (["--enforce-eager"], "4,5,6,7"),
        (["-tp", "2"], "4,5|6,7"),
        (["--seed", "1", "--tensor-parallel-size=4"], "4|5|6|7"),
        (["-tp", "8"], "|".join(["4,5,6,7"] * 8)),
        (["-tp", "two"], "4,5,6,7"),
    ],
)
def test_ranks_divide_the_cores(tmp_path: Path, arguments: list[str], binding: str) -> None:
    spec = spec_of(config_of(tmp_path, **{"worker.arguments": arguments}), Role.PREFILL, "127.0.0.1:1", (4, 5, 6, 7))
    assert environment_of(spec, {})["VLLM_CPU_OMP_THREADS_BIND"] == binding


async def test_servers_that_differ_are_no_pair(tmp_path: Path) -> None:
    async with service(tmp_path, decode={"worker.arguments": ["--block-size", "32"]}) as served:
        await served.until(lambda: len(served.gateway.registry.workers) == 2)
        with pytest.raises(LayoutMismatch, match="block_size is '16' and '32'"):
            await served.client.generate(PROMPT, max_tokens=8, mode="pd", timeout_s=5.0).result()


async def test_a_server_that_falls_silent_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_module, "SILENT_S", 0.5)
    monkeypatch.setattr(started_module, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(server_module, "ANSWER_TIMEOUT_S", 0.2)
    async with service(tmp_path) as served:
        await served.generate()
        os.kill(served.workers()["decode-0"].engine_pid, signal.SIGSTOP)
        await served.until(lambda: served.workers()["decode-0"].engine_restarts == 1)
        assert list((await served.generate()).token_ids) == EXPECTED


async def test_a_request_survives_the_end_of_its_server_which_is_started_again(tmp_path: Path) -> None:
    async with service(tmp_path) as served:
        await served.gateway.wait_serving(20.0)
        killed = served.workers()["decode-0"].engine_pid
        stream = served.client.generate(PROMPT, max_tokens=200, mode="pd", ignore_eos=True, timeout_s=20.0)
        tokens: list[int] = []
        async for token in stream:
            tokens.append(token.token_id)
            if len(tokens) == 20:
                os.kill(killed, signal.SIGKILL)
        assert tokens == greedy(PROMPT, 200)
        assert (await stream.result()).failures
        await served.until(lambda: served.workers()["decode-0"].engine_restarts == 1)
        assert served.workers()["decode-0"].engine_pid != killed
        os.kill(served.workers()["decode-0"].engine_pid, signal.SIGKILL)  # while it is idle
        await served.until(lambda: served.workers()["decode-0"].engine_restarts == 2)
        assert list((await served.generate()).token_ids) == EXPECTED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker.arguments": ["--fails"]}, r"vllm ended while it started \(exit status 3\)"),
        ({"worker.command": "/no/such/program"}, "worker.command: there is no program '/no/such/program' on 127.0.0.1"),
    ],
)
async def test_a_server_that_does_not_start(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    worker = StartedServer(spec_of(config_of(tmp_path, **settings), Role.DECODE, "127.0.0.1:1"), SECRET)
    with suppress(LaunchError):
        await worker.run()
    with pytest.raises(LaunchError, match=message):
        worker.started.result()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine.chunk_tokens": 64}, "engine.chunk_tokens: not an option of workers with vllm"),
        ({"transfer.overlap": "none"}, "transfer.overlap: not an option of workers with vllm"),
        ({"transfer.transport": "tcp"}, "servers of other engines move KV by themselves"),
        (
            {"worker.engine": "sglang", "engine.num_blocks": 9},
            "engine.num_blocks: not an option of workers with sglang",
        ),
        ({"worker.engine": "sglang", "worker.connector": "pdserve"}, "pdserve is a connector of vLLM"),
        (
            {"worker.engine": "sglang", "scaling.controller": "roles", "scaling.ttft_ms": 9, "scaling.itl_ms": 9},
            "SGLang servers keep their roles",
        ),
        ({"cluster.prefill_urls": ["http://localhost:1"]}, "worker.engine: prefill_urls and decode_urls name servers"),
        ({"worker.engine": "other"}, "worker.engine"),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, **settings)


def test_a_model_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dummy:135m has no files that vllm could load"):
        prepare(config_of(tmp_path, **{"model.path": "dummy:135m"}))


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_service_that_starts_its_servers(tmp_path: Path) -> None:
    """All of it by the command line: start, hand-off, scale, a killed server, and nothing left at the end."""
    cli, port, command = Cli.of(tmp_path), free_port(), install(tmp_path)
    settings = ("--set", "worker.engine=vllm", "--set", f"worker.command={command}", "--set", "model.dtype=bfloat16")
    at = ("--port", str(port))
    try:
        up = cli.done("up", *settings, *at, "--detach", "--oversubscribe")
        assert "1P1D" in up.stderr
        result = json.loads(cli.done("generate", "Hello", *at, "--mode", "pd", "--json").stdout)
        assert (result["prefill_worker"], result["decode_worker"]) == ("prefill-0", "decode-0")
        assert result["kv_bytes"] == result["kv_bytes_expected"] > 0
        assert "1P2D" in cli.done("scale", "--decode", "2", "--oversubscribe", *at).stderr
        assert len(started(tmp_path)) == 3
        shown = cli.done("status", *at).stdout
        assert "engine vllm 0.32.0 · abort: yes · " in shown
        assert " · hand off: decode fetches it" in shown
        status = json.loads(cli.done("status", "--json", *at).stdout)
        assert {worker["device"] for worker in status["workers"]} == {"vllm"}
        os.kill(int(str(started(tmp_path)[0]["pid"])), signal.SIGKILL)
        assert json.loads(cli.done("generate", "Hello", *at, "--json").stdout)["token_ids"] == result["token_ids"]
    finally:
        cli.run("down", *at, "--now")
    assert not [each for each in started(tmp_path) if psutil.pid_exists(int(str(each["pid"])))]
