"""`pdserve doctor` on hosts of its own: first as they should be, then with faults planted into their network."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from runtime.dtypes import native_dtypes
from tests.cluster.cluster_file import ROOT
from tests.cluster.environment import PROJECT, install_environment
from tests.cluster.host import Host, outside
from tests.cluster.hosts import Hosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

DECODERS = ("dec-1", "dec-2", "dec-3")
AHEAD_S = 5000
FIT_MBIT = 200.0
SLOW_MBIT = 20.0
TCP_OF_DEC_3, CONTROL_OF_DEC_3 = 20_015, 20_013
"""Base 20000, worker n (from 0) has 1 + 4 n: control, then one for shm (which needs none), then one for tcp."""
CONFIG = """
cluster:
  device: cpu
  placement: strict_spread
  prefill: 1
  decode: 3
  prefill_resources: {prefill: 1}
  decode_resources: {decode: 1}
engine: {kv_memory_mb: 64}
transfer: {connect_timeout_s: 3, interface: eth0}
"""


@dataclass(frozen=True)
class Cluster:
    """A Ray on all hosts, where placement is certain: prefill-0 on pre, decode-n on dec-(n + 1)."""

    hosts: Hosts

    def doctor(self) -> dict[str, Any]:
        """What it says on the head."""
        head = self.hosts["head"]
        (head.home / "doctor.yaml").write_text(CONFIG)
        command = f"cd {PROJECT} && .venv/bin/pdserve doctor -c ../doctor.yaml --address auto --json"
        run = head.run(command, timeout_s=240, check=False)
        assert run.stdout.count("\n") == 1, run.stdout + run.stderr
        report: dict[str, Any] = json.loads(run.stdout)
        assert run.returncode == (0 if report["ok"] else 1)
        return report

    def check_nothing_left(self) -> None:
        """Nothing of a doctor listens any more."""
        deadline_s = time.monotonic() + 20
        while left := {host.name: ports for host in self.hosts if (ports := _ours(host))}:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.2)


def _ours(host: Host) -> set[int]:
    return {port for port in host.listening() if 20_000 <= port < 20_100}


def _start_ray(host: Host, head: str) -> None:
    role = {"head": "", "pre": "prefill"}.get(host.name, "decode")
    resources = json.dumps({role: 1} if role else {})
    where = "--head --port=6379 --include-dashboard=false --num-cpus=0" if not role else f"--address={head}:6379"
    options = "" if not role else f"--num-cpus=1 --resources='{resources}'"
    common = f"--node-ip-address={host.address} --object-store-memory=100000000 --disable-usage-stats"
    command = f"cd ~/pdserve && .venv/bin/ray start {where} {options} {common}"
    host.run(command, timeout_s=120, RAY_AUTH_MODE="token")


@pytest.fixture(scope="module")
def cluster(namespaces: None) -> Iterator[Cluster]:
    names = ("head", "pre", *DECODERS)
    with Hosts(names, clock_ahead_s={"dec-2": AHEAD_S}) as hosts:
        for host in hosts:
            install_environment(host)
            exclude = ("--exclude", ".git", "--exclude", ".venv", "--exclude", "__pycache__", "--exclude", ".*_cache")
            outside("rsync", "-a", *exclude, f"{ROOT}/", f"{host.home / 'pdserve'}/", timeout_s=60)
            (host.home / ".ray").mkdir()
            token = host.home / ".ray" / "auth_token"
            token.touch(0o600)
            token.write_text("a" * 64)
        head = hosts["head"]
        _start_ray(head, head.address)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda host: _start_ray(host, head.address), [host for host in hosts if host is not head]))
        yield Cluster(hosts)


def found(report: dict[str, Any], check: str, level: str = "fail") -> list[dict[str, Any]]:
    """The findings of a check, all of them with a remedy."""
    findings = [each for each in report["findings"] if (each["check"], each["level"]) == (check, level)]
    assert all(each["remedy"] for each in findings)
    return findings


def test_hosts_as_they_should_be(cluster: Cluster) -> None:
    cluster.hosts.rate(FIT_MBIT)
    try:
        report = cluster.doctor()
    finally:
        cluster.hosts.rate(None)
    assert report["ok"], report["findings"]
    no_faults = {"clock"}  # dec-2's
    if native_dtypes("cpu")[0].dtypes == ("float32",):
        no_faults.add("dtype")  # that auto is float32 on this CPU
    assert {each["check"] for each in report["findings"]} == no_faults
    by_name = {host.name: host.address for host in cluster.hosts}
    assert [node["node"] for node in report["nodes"]] == [by_name[name] for name in ("pre", *DECODERS)]
    assert len(report["pairs"]) == 3
    for pair in report["pairs"]:
        assert pair["transport"] == "tcp"
        assert 0 < pair["gbs"] * 8000 < 1.3 * FIT_MBIT, "the cable lets no more through"
        (prediction, *_) = pair["predictions"]
        assert prediction["wire_ms"] == pytest.approx(prediction["num_bytes"] / pair["gbs"] / 1e6)
    clocks = {node["node"]: node for node in report["nodes"]}
    assert clocks[by_name["dec-2"]]["clock_offset_ms"] == pytest.approx(AHEAD_S * 1e3, abs=1000)
    assert clocks[by_name["dec-1"]]["clock_offset_ms"] == 0  # the very same clock, which is known by name
    cluster.check_nothing_left()


def test_faults_of_the_network(cluster: Cluster) -> None:
    """A slow cable, a firewall that drops, and one that refuses. (`tests.ops.doctor` has the faults of hosts.)"""
    hosts, by_name = cluster.hosts, {host.name: host.address for host in cluster.hosts}
    hosts["dec-2"].rate(SLOW_MBIT)
    hosts["dec-3"].close_port(TCP_OF_DEC_3)
    hosts["dec-3"].close_port(CONTROL_OF_DEC_3, silently=False)
    report = cluster.doctor()
    assert {each["check"] for each in report["findings"] if each["level"] == "fail"} == {"reach", "control"}, report
    (closed,) = found(report, "reach")
    assert closed["where"] == "prefill-0 → decode-2"
    assert f"{by_name['dec-3']}:{TCP_OF_DEC_3}" in closed["what"]
    assert "timed out" in closed["what"]
    assert "firewall" in closed["remedy"]
    (control,) = found(report, "control")
    assert str(CONTROL_OF_DEC_3) in control["what"]
    (slow,) = found(report, "link", "warn")
    assert slow["where"] == "prefill-0 → decode-1"
    assert "eth0" in slow["remedy"]
    pairs = {pair["decode"]: pair for pair in report["pairs"]}
    assert 0 < pairs["decode-1"]["gbs"] * 8000 < 1.3 * SLOW_MBIT
    cluster.check_nothing_left()
