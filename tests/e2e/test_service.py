"""The service as a user has it: on Ray, through the CLI and the clients."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from pdserve import Client
from pdserve.core.errors import PdserveError
from tests.e2e.conftest import RunningService, alive, states, wait_for
from tests.local_cluster import leaked_blocks

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_status_shows_workers_on_slots_of_their_own(service: RunningService) -> None:
    workers = json.loads(service.cli.done("status", "--target", service.target, "--json").stdout)["workers"]
    assert [w["worker_id"] for w in workers] == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert len({w["engine_pid"] for w in workers} | {w["pid"] for w in workers}) == 8
    for worker in workers:
        assert psutil.Process(worker["engine_pid"]).cpu_affinity() == [int(worker["cores"])]


def test_what_was_started_oversubscribed_scales_beyond_its_slots(service: RunningService) -> None:
    """Its workers have all the slots of a Ray that gets no more nodes."""
    assert "scaled: 3P2D" in service.cli.done("scale", "--prefill", "3", "--target", service.target).stderr
    with Client(service.target) as client:
        assert states(client.status())["prefill-2"] == "ready"
        service.cli.done("scale", "--prefill", "2", "--target", service.target)
        assert sorted(states(client.status())) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]


def test_list_and_logs_say_where_everything_is(service: RunningService) -> None:
    (listed,) = json.loads(service.cli.run("list", "--json").stdout)["services"]
    assert (listed["port"], listed["pid"]) == (service.port, service.state.pid)
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
    command = service.cli.command("logs", "supervisor", "-f", "--target", service.target)
    following = subprocess.Popen(command, env=service.cli.env, stdout=subprocess.PIPE, text=True)
    try:
        assert following.stdout is not None
        for line in following.stdout:  # what there is, up to here
            if "'ready'" in line:
                break
        with open(service.state.log, "a") as file:
            file.write("a line of the future\n")
        assert any("a line of the future" in line for line in following.stdout)
    finally:
        following.send_signal(signal.SIGINT)
        following.communicate(timeout=20)
    assert following.returncode == 130


def test_generate_prints_one_json_object(service: RunningService) -> None:
    request = ("generate", "def add(a, b):", "--mode", "pd", "--max-tokens", "5", "--json")
    (line,) = service.cli.done(*request, "--target", service.target).stdout.splitlines()
    result = json.loads(line)
    assert result["mode"] == "pd"
    assert result["transport"] == "shm"
    transfer = result["transfer"]
    assert transfer["checksum"] == "xxh3-64 verified"
    assert 0 < transfer["wire_ms"] <= transfer["span_ms"] <= transfer["request_to_ready_ms"]
    assert transfer["gbs"] > 0
    assert result["kv_bytes"] == result["kv_bytes_expected"] > 0


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
    wait_for(service.target, "blocks back", lambda status: not leaked_blocks(status))


def test_down_leaves_nothing(service: RunningService) -> None:
    """Last in this file: afterwards the session's service is gone."""
    family = service.family
    assert len(family) > 8
    ray_folders = {
        Path(f.path).parts[2] for p in family if p.is_running() for f in open_files(p) if "/pdserve-ray-" in f.path
    }
    said = service.cli.done("down", "--port", str(service.port)).stderr
    assert f"tiny on 2P2D at {service.target} is down" in said
    assert json.loads(service.cli.run("list", "--json").stdout) == {"services": []}
    assert not alive(family)
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
