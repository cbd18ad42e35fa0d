"""The service as a user has it: on Ray, through the CLI and the clients."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ops.launch.state import ServiceState
from pdserve import AsyncClient, Client
from pdserve.core.errors import PdserveError
from tests.e2e.conftest import RunningService

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def free_blocks(target: str) -> dict[str, int]:
    with Client(target) as client:
        return {worker.worker_id: worker.free_blocks for worker in client.status().workers}


def wait_all_free(target: str, timeout_s: float = 60.0) -> None:
    """Return once every worker has all its blocks; heartbeats tell of them with some delay."""
    deadline_s = time.monotonic() + timeout_s
    while (blocks := free_blocks(target)) != dict.fromkeys(blocks, 256):
        assert time.monotonic() < deadline_s, blocks
        time.sleep(0.2)


def test_status_shows_workers_on_slots_of_their_own(service: RunningService) -> None:
    answer = service.cli.run("status", "--target", service.target, "--json")
    assert answer.returncode == 0, answer.stderr
    workers = json.loads(answer.stdout)["workers"]
    assert [w["worker_id"] for w in workers] == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert len({w["engine_pid"] for w in workers} | {w["pid"] for w in workers}) == 8
    for worker in workers:
        assert psutil.Process(worker["engine_pid"]).cpu_affinity() == [int(worker["cores"])]


def test_what_was_started_oversubscribed_scales_beyond_its_slots(service: RunningService) -> None:
    """Its workers have all the slots of a Ray that gets no more nodes."""
    more = service.cli.run("scale", "--prefill", "3", "--target", service.target)
    assert more.returncode == 0, more.stderr
    assert "scaled: 3P2D" in more.stderr
    with Client(service.target) as client:
        workers = {worker.worker_id: worker.state for worker in client.status().workers}
        assert workers["prefill-2"] == "ready"
    fewer = service.cli.run("scale", "--prefill", "2", "--target", service.target)
    assert fewer.returncode == 0, fewer.stderr
    assert sorted(free_blocks(service.target)) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]


def test_list_and_logs_say_where_everything_is(service: RunningService) -> None:
    (listed,) = json.loads(service.cli.run("list", "--json").stdout)["services"]
    assert (listed["port"], listed["pid"]) == (service.port, service.supervisor.pid)
    assert (listed["model"], listed["state"], listed["workers"]) == ("tiny", "ready", "2P2D")
    assert listed["ray"].startswith("its own, ")
    found = json.loads(service.cli.run("logs", "--target", service.target, "--json").stdout)["logs"]
    paths = {log["name"]: Path(log["path"]) for log in found}
    assert {name for name in paths if "@" not in name} == {
        "supervisor",
        "gateway",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
    }
    assert all(path.is_file() for path in paths.values())
    with Client(service.operator) as operator:
        pids = {worker.worker_id: worker.pid for worker in operator.status().workers}
    assert all(paths[name].name.endswith(f"-{pid}.err") for name, pid in pids.items())
    decode = service.cli.run("logs", "decode-1", "--target", service.target)
    assert decode.stdout == paths["decode-1"].read_text()
    last = service.cli.run("logs", "supervisor", "-n", "1", "--target", service.target)
    assert last.stdout.splitlines() == paths["supervisor"].read_text().splitlines()[-1:]
    unknown = service.cli.run("logs", "decode-7", "--target", service.target)
    assert unknown.returncode == 1
    assert "error: decode-7 has no log" in unknown.stderr


def test_a_log_is_followed(service: RunningService) -> None:
    code = f"from ops.cli.main import main; main(['logs', 'supervisor', '-f', '--target', '{service.target}'])"
    following = subprocess.Popen([sys.executable, "-c", code], env=service.cli.env, stdout=subprocess.PIPE, text=True)
    try:
        assert following.stdout is not None
        for line in following.stdout:  # what there is, up to here
            if "'ready'" in line:
                break
        with open(ServiceState.load(service.state_file).log, "a") as file:
            file.write("a line of the future\n")
        assert any("a line of the future" in line for line in following.stdout)
    finally:
        following.send_signal(signal.SIGINT)
        following.communicate(timeout=20)
    assert following.returncode == 130


def test_many_requests_at_once(service: RunningService) -> None:
    async def run() -> None:
        draw = random.Random(3)
        async with AsyncClient(service.target) as client:

            async def one(index: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
                prompt = [draw.randrange(4000) for _ in range(draw.choice((3, 30, 100, 300)))]
                apart = await client.generate(prompt, max_tokens=8, ignore_eos=True, mode="pd", timeout_s=180).result()
                return tuple(prompt), apart.token_ids, apart.kv_bytes == apart.kv_bytes_expected > 0

            done = await asyncio.gather(*(one(index) for index in range(24)))
            assert all(exact for _, _, exact in done)
            for prompt, tokens, _ in done[:3]:
                together = await client.generate(prompt, max_tokens=8, ignore_eos=True, mode="colocated").result()
                assert together.token_ids == tokens

    asyncio.run(run())
    wait_all_free(service.target)
    with Client(service.target) as client:
        links = {worker.worker_id: worker.links for worker in client.status().workers}
    for prefill in ("prefill-0", "prefill-1"):
        assert {(link.worker_id, link.transport) for link in links[prefill]} == {
            ("decode-0", "shm"),
            ("decode-1", "shm"),
        }


def test_generate_prints_one_json_object(service: RunningService) -> None:
    request = ("generate", "def add(a, b):", "--mode", "pd", "--max-tokens", "5", "--json")
    answer = service.cli.run(*request, "--target", service.target)
    assert answer.returncode == 0, answer.stderr
    (line,) = answer.stdout.splitlines()
    result = json.loads(line)
    assert result["mode"] == "pd"
    assert result["transport"] == "shm"
    transfer = result["transfer"]
    assert transfer["checksum"] == "xxh3-64 verified"
    assert 0 < transfer["wire_ms"] <= transfer["span_ms"] <= transfer["request_to_ready_ms"]
    assert transfer["gbs"] > 0
    assert result["kv_bytes"] == result["kv_bytes_expected"] > 0


def test_bench_counts_and_leaks_nothing(service: RunningService) -> None:
    answer = service.cli.run(
        "bench", "--requests", "8", "--concurrency", "4", "--input-len", "40", "--output-len", "6", "--seed", "1",
        "--slo", "ttft=5000,itl=1000", "--target", service.target, "--json",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout.splitlines()[-1])
    assert result["requests"] == 8
    assert result["leaked_blocks"] == 0


@pytest.mark.parametrize(("which", "of"), [("engine", "prefill-1"), ("worker", "decode-1")])
def test_a_killed_engine_or_worker_is_started_again_and_costs_no_request(
    service: RunningService, which: str, of: str
) -> None:
    with Client(service.target) as client, Client(service.operator) as operator:
        victim = next(w for w in operator.status().workers if w.worker_id == of)
        psutil.Process(victim.engine_pid if which == "engine" else victim.pid).kill()
        deadline_s = time.monotonic() + 180
        while True:
            result = client.generate([8] * 20, max_tokens=3, ignore_eos=True, timeout_s=60, mode="pd").result()
            assert len(result.token_ids) == 3
            now = next((w for w in operator.status().workers if w.worker_id == of), None)
            if now is not None and now.state == "ready" and now.engine_pid != victim.engine_pid:
                break
            assert time.monotonic() < deadline_s, now
            time.sleep(0.2)
        assert (now.pid == victim.pid) == (which == "engine")
        assert now.worker_restarts - victim.worker_restarts == (which == "worker")
        assert now.engine_restarts == (victim.engine_restarts + 1 if which == "engine" else 0)
    if which == "worker":
        before = service.cli.run("logs", f"{of}@{victim.pid}", "--target", service.target)
        assert (before.returncode, bool(before.stdout)) == (0, True), before.stderr
        assert f"{of}@{victim.pid} " in service.cli.run("logs", "--port", str(service.port)).stdout
    wait_all_free(service.target)


def test_a_killed_gateway_refuses_nothing_once_it_is_back(service: RunningService) -> None:
    """Its workers have not reported to it yet when it listens again."""
    with Client(service.operator) as operator:
        psutil.Process(operator.status().pid).kill()
    deadline_s, answered = time.monotonic() + 120, False
    errors: list[str] = []
    while not answered:
        assert time.monotonic() < deadline_s, errors
        try:
            with Client(service.target) as client:
                stream = client.generate([8] * 20, max_tokens=3, ignore_eos=True, timeout_s=60, mode="pd")
                answered = len(stream.result().token_ids) == 3
        except PdserveError as error:
            errors.append(str(error))
            time.sleep(0.02)
    # All that failed is what did not reach a gateway.
    unreachable = (f"the service at {service.target} is not available", f"nothing answers at {service.target}")
    assert not [error for error in errors if not error.startswith(unreachable)]
    wait_all_free(service.target)


def test_down_leaves_nothing(service: RunningService) -> None:
    """Last in this file: afterwards the session's service is gone."""
    family = [service.supervisor, *service.supervisor.children(recursive=True)]
    assert len(family) > 8
    ray_folders = {
        Path(f.path).parts[2] for p in family if p.is_running() for f in open_files(p) if "/pdserve-ray-" in f.path
    }
    answer = service.cli.run("down", "--port", str(service.port))
    assert answer.returncode == 0, answer.stderr
    assert f"tiny on 2P2D at {service.target} is down" in answer.stderr
    assert json.loads(service.cli.run("list", "--json").stdout) == {"services": []}
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not [folder for folder in ray_folders if Path("/tmp", folder).exists()]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", service.port))
    again = service.cli.run("down", "--target", service.target)
    assert again.returncode != 0
    assert "Traceback" not in again.stderr
    lonely = service.cli.run("generate", "hello", "--target", service.target)
    assert lonely.returncode != 0
    assert service.target in lonely.stderr


def open_files(process: psutil.Process) -> list[psutil._ntuples.popenfile]:
    try:
        return list(process.open_files())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
