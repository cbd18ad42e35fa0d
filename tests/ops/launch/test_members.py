"""The workers that are added and removed, their ports, and the state file of their service."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ops.launch import ports
from ops.launch.members import Members
from ops.launch.plan import Node, worker_bundles
from ops.launch.ports import first_port, free_ports, port_base
from ops.launch.service import _to_flip, _to_leave
from ops.launch.state import ServiceState, cache_key
from pdserve.core.config import ClusterConfig, PdserveConfig
from pdserve.core.errors import InvalidRequest, LaunchError
from pdserve.core.worker import Role
from pdserve.pb import inference_pb2 as pb
from runtime.secret import ServiceSecret
from tests.local_cluster import ROOT
from tests.local_cluster import free_ports as claimed_ports

NODES = {"p0": "", "p1": "a", "p2": "b", "p3": ""}
ONE_HOST = [Node("a", "10.0.0.1", {"CPU": 8.0}, {"CPU": 8.0})]


def members_of(nodes: list[Node], **cluster: Any) -> Members:
    """Those of a service that has none yet."""
    config, secret = PdserveConfig.parse({"cluster": cluster}), ServiceSecret.new()
    bundles = worker_bundles(config.cluster, "cpu", nodes)
    return Members(config, "cpu", bundles, registry_addresses=(), service="", secret=secret, port_base=0, host="")


def test_strict_spread_refuses_rather_than_waits() -> None:
    members = members_of([*ONE_HOST, Node("b", "10.0.0.2", {"CPU": 8.0})], placement="strict_spread")
    with pytest.raises(LaunchError, match="strict_spread wants a node for each worker, and there is none for 1 of 2"):
        members.add([Role.PREFILL, Role.DECODE], ONE_HOST)
    assert members.all == ()
    waiting = ClusterConfig(placement="strict_spread", autoscale=True)
    with pytest.raises(LaunchError, match=r"cluster\.placement: strict_spread"):
        worker_bundles(waiting, "cpu", ONE_HOST)


def test_workers_without_a_node_leave_first_then_the_latest() -> None:
    members: list[Any] = [SimpleNamespace(worker_id=name, node_id=node) for name, node in NODES.items()]

    def leaving(stay: int) -> list[str]:
        return [member.worker_id for member in _to_leave(members, stay)]

    assert leaving(3) == ["p3"]
    assert leaving(2) == ["p0", "p3"]
    assert leaving(1) == ["p2", "p0", "p3"]
    assert leaving(5) == []


def test_which_workers_take_another_role() -> None:
    """Those that were born with it, on a slot of their own, with little to do; then the latest."""
    born = {"decode-0": Role.DECODE, "prefill-1": Role.PREFILL, "decode-1": Role.DECODE, "decode-2": Role.DECODE}
    members: list[Any] = [SimpleNamespace(worker_id=name, born=role) for name, role in born.items()]
    cores = {"prefill-0": "0", "decode-0": "1", "prefill-1": "2", "decode-1": "3", "decode-2": "0"}
    workers = {
        name: pb.WorkerStatus(worker_id=name, role="decode", node="a", device="cpu", cores=core)
        for name, core in cores.items()
    }
    workers["prefill-0"].role = "prefill"

    def flipped(count: int, to: Role, workers: dict[str, pb.WorkerStatus]) -> list[str]:
        return [member.worker_id for member in _to_flip(members, to, count, workers)]

    assert flipped(2, Role.PREFILL, {}) == ["prefill-1", "decode-2"], "nothing is known of them"
    assert flipped(3, Role.PREFILL, workers) == ["prefill-1", "decode-1", "decode-0"], "decode-2 shares a core"
    workers["decode-1"].outstanding_tokens = 7
    assert flipped(4, Role.PREFILL, workers) == ["prefill-1", "decode-0", "decode-1", "decode-2"]


def test_roles_that_ask_for_different_resources_keep_their_workers() -> None:
    host = [Node("a", "10.0.0.1", {"CPU": 8.0, "decode": 8.0})]
    assert members_of(host).may_flip
    assert not members_of(host, decode_resources={"decode": 1.0}).may_flip


def test_ports_belong_to_the_workers_number() -> None:
    assert port_base(ClusterConfig()) == 0
    assert port_base(ClusterConfig(address="auto")) == 20_000
    assert port_base(ClusterConfig(port_base=3000)) == 3000
    assert [first_port(20_000, ordinal) for ordinal in range(3)] == [20_001, 20_005, 20_009]
    assert [first_port(20_000, ordinal, gateways=3) for ordinal in range(2)] == [20_003, 20_007]
    assert first_port(0, 7) == 0
    with pytest.raises(LaunchError, match=r"cluster\.port_base: 65000 leaves no ports for worker number 133"):
        first_port(65_000, 133)


def test_a_killed_service_is_cleared_up_after_by_the_next_on_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "pdserve-operator-x"
    folder.mkdir()
    killed = ServiceState(os.getpid(), psutil.Process().create_time() - 1000, 7, "", socket=str(folder / "socket"))
    killed.claim()
    other = psutil.Process(os.getppid())
    now = ServiceState(other.pid, other.create_time(), 7, "log", socket="", phase="starting")
    now.claim()
    assert not folder.exists()
    assert json.loads(ServiceState.path(7).read_text())["log"] == "log"
    with pytest.raises(LaunchError, match=rf"process {other.pid}, starting; see `pdserve list`\) uses port 7; choose "):
        ServiceState(os.getpid(), psutil.Process().create_time(), 7, "").claim()
    killed.remove()
    assert ServiceState.read(7) == now, "a service removes its own file, not that of the next one"
    assert now.update(phase="ready", processes=((1, 2.0),)) == ServiceState.read(7)


def test_a_state_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(in_the_way))
    up = [sys.executable, "-c", "from ops.cli.main import main; main()", "up", "--port", "0"]
    for detach in ([], ["--detach"]):
        answer = subprocess.run([*up, *detach], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        assert answer.returncode == 1
        assert answer.stderr.count("\n") == 1, answer.stderr
        assert re.match(rf"error: cannot write to {in_the_way}/.*set XDG_STATE_HOME to a folder that is", answer.stderr)


def test_the_key_of_offloaded_kv_is_made_once_and_only_its_user_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = os.umask(0o022)
    try:
        with ThreadPoolExecutor(8) as services:
            keys = set(services.map(lambda _: cache_key(), range(8)))
    finally:
        os.umask(before)
    assert len(keys) == 1
    assert len(keys.pop()) == 32
    (path,) = (tmp_path / "pdserve").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(LaunchError, match=r"cache_key: others can read or change it \(mode 640\)"):
        cache_key()


def test_a_free_port_is_not_one_of_outgoing_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("30000\t60999\n")
    monkeypatch.setattr(ports, "_OUTGOING", tmp_path / "range")
    assert all(24_000 <= free_ports("127.0.0.1", 0, 1) < 30_000 for _ in range(20))
    for few in ("24500\t60999\n", ""):
        (tmp_path / "range").write_text(few)
        assert free_ports("127.0.0.1", 0, 1) > 0  # the system chooses


def test_the_ports_of_several_gateways_follow_each_other() -> None:
    assert free_ports("127.0.0.1", 0, 3) > 0
    first = claimed_ports(3)  # which connections of other tests do not take
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 2))
        assert free_ports("127.0.0.1", first, 2) == first
        with pytest.raises(LaunchError, match=f"gateway.port: cannot listen on 127.0.0.1:{first + 2}"):
            free_ports("127.0.0.1", first, 3)


def test_the_state_of_a_service_is_found_by_the_port_of_any_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    created_s = psutil.Process().create_time()
    state = ServiceState(os.getpid(), created_s, 7000, "", target="https://gpu-1:7000", gateways=2)
    state.claim()
    assert state.targets == ["https://gpu-1:7000", "https://gpu-1:7001"]
    assert ServiceState.read(7001) == state
    assert ServiceState.at("gpu-1:7001") == ServiceState.at("127.0.0.1:7001") == state
    assert ServiceState.at("gpu-1:7002") is None
    with pytest.raises(LaunchError, match="port 7002"):
        ServiceState.read(7002)
    here = f"{socket.gethostname()}:7000"
    for target in ("7000", "localhost:7001", "https://gpu-1:7001", "gpu-1:7000,gpu-1:7001", "127.0.0.1:7000", here):
        assert ServiceState.of(target) == state
    with pytest.raises(LaunchError, match=r"^gpu-2:7000 is on another host; .* \(--port 7000\)$"):
        ServiceState.of("https://gpu-2:7000")
    with pytest.raises(InvalidRequest, match=r"^target: "):
        ServiceState.of("unix:/tmp/socket")
