"""`pdserve doctor` on hosts of its own: first as they should be, then with ten faults planted into them."""

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
from tests.cluster.host import HOME, Host, outside
from tests.cluster.hosts import Hosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

DECODERS = ("dec-1", "dec-2", "dec-3")
AHEAD_S = 5000
FIT_MBIT = 200.0
SLOW_MBIT = 20.0
TCP_PORTS = {"dec-1": 20_007, "dec-2": 20_011, "dec-3": 20_015}
"""Base 20000, worker n (from 0) has 1 + 4 n: control, then one for shm (which needs none), then one for tcp."""
CONTROL_OF_DEC_3 = 20_013
CONFIG = """
cluster:
  device: {device}
  placement: strict_spread
  prefill: 1
  decode: 3
  prefill_resources: {{prefill: 1}}
  decode_resources: {{decode: 1}}
engine: {{kv_memory_mb: {kv_memory_mb}}}
transfer: {{connect_timeout_s: 3, interface: {interface}}}
"""
_HOLD = "import socket, time; server = socket.create_server(('0.0.0.0', {port})); time.sleep(600)"


@dataclass(frozen=True)
class Cluster:
    """A Ray on all hosts, where placement is certain: prefill-0 on pre, decode-n on dec-(n + 1)."""

    hosts: Hosts

    def doctor(
        self, *, device: str = "cpu", kv_memory_mb: int = 64, interface: str = "eth0", **env: str
    ) -> dict[str, Any]:
        """What it says on the head."""
        head = self.hosts["head"]
        config = CONFIG.format(device=device, kv_memory_mb=kv_memory_mb, interface=interface)
        (head.home / "doctor.yaml").write_text(config)
        command = f"cd {PROJECT} && .venv/bin/pdserve doctor -c ../doctor.yaml --address auto --json"
        run = head.run(command, timeout_s=240, check=False, **env)
        assert run.stdout.count("\n") == 1, run.stdout + run.stderr
        report: dict[str, Any] = json.loads(run.stdout)
        assert run.returncode == (0 if report["ok"] else 1)
        return report

    def check_nothing_left(self, *, but: int = 0) -> None:
        """Nothing of a doctor listens any more; the port ``but`` is somebody else's."""
        deadline_s = time.monotonic() + 20
        while left := {host.name: ports for host in self.hosts if (ports := _ours(host) - {but})}:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.2)


def _ours(host: Host) -> set[int]:
    return {port for port in host.listening() if 20_000 <= port < 20_100}


def _start_ray(host: Host, head: str) -> None:
    role = {"head": "", "pre": "prefill"}.get(host.name, "decode")
    resources = json.dumps({role: 1} if role else {})
    where = "--head --port=6379 --include-dashboard=false --num-cpus=0" if not role else f"--address={head}:6379"
    options = "" if not role else f"--num-cpus=1 --num-gpus=1 --resources='{resources}'"
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
        assert pair["gbs"] * 8000 == pytest.approx(FIT_MBIT, rel=0.3)
        (prediction, *_) = pair["predictions"]
        assert prediction["wire_ms"] == pytest.approx(prediction["num_bytes"] / pair["gbs"] / 1e6)
    clocks = {node["node"]: node for node in report["nodes"]}
    assert clocks[by_name["dec-2"]]["clock_offset_ms"] == pytest.approx(AHEAD_S * 1e3, abs=1000)
    assert clocks[by_name["dec-1"]]["clock_offset_ms"] == 0  # the very same clock, which is known by name
    cluster.check_nothing_left()


def test_ten_faults(cluster: Cluster) -> None:
    """Seven of them in one run; two, and one, in two more."""
    hosts, by_name = cluster.hosts, {host.name: host.address for host in cluster.hosts}
    version = hosts["dec-1"].home / "pdserve" / "pdserve" / "version.py"
    weights = hosts["dec-3"].home / "pdserve" / "models" / "tiny" / "model.safetensors"
    kept = {version: version.read_bytes(), weights: weights.read_bytes()}
    version.write_text('VERSION = "0.0.1"\n')
    weights.write_bytes(kept[weights][:-1] + bytes([kept[weights][-1] ^ 1]))
    hold = _HOLD.format(port=TCP_PORTS["dec-1"])
    hosts["dec-1"].run(f'setsid ~/pdserve/.venv/bin/python -c "{hold}" >/dev/null 2>&1 </dev/null &')
    hosts["dec-2"].rate(SLOW_MBIT)
    hosts["dec-3"].close_port(TCP_PORTS["dec-3"])
    hosts["dec-3"].close_port(CONTROL_OF_DEC_3, silently=False)
    began_s = time.monotonic()
    report = cluster.doctor(kv_memory_mb=1_000_000)
    assert time.monotonic() - began_s < 180
    failed = {each["check"] for each in report["findings"] if each["level"] == "fail"}
    assert failed == {"version", "model", "port", "reach", "control", "memory"}, report["findings"]
    (skew,) = found(report, "version")
    assert (skew["where"], "0.0.1" in skew["what"]) == (by_name["dec-1"], True)
    (other,) = found(report, "model")
    assert other["where"] == by_name["dec-3"]
    (busy,) = found(report, "port")
    assert f"port {TCP_PORTS['dec-1']}" in busy["what"]
    assert "import socket" in busy["what"]  # who holds it
    (closed,) = found(report, "reach")
    assert closed["where"] == "prefill-0 → decode-2"
    assert f"{by_name['dec-3']}:{TCP_PORTS['dec-3']}" in closed["what"]
    assert "timed out" in closed["what"]
    assert "firewall" in closed["remedy"]
    (control,) = found(report, "control")
    assert str(CONTROL_OF_DEC_3) in control["what"]
    assert {each["where"] for each in found(report, "memory")} == {by_name[name] for name in ("pre", *DECODERS)}
    (clock,) = found(report, "clock", "warn")
    assert (clock["where"], "time namespace" in clock["what"]) == (by_name["dec-2"], True)
    (slow,) = found(report, "link", "warn")
    assert slow["where"] == "prefill-0 → decode-1"
    assert "eth0" in slow["remedy"]
    pairs = {pair["decode"]: pair for pair in report["pairs"]}
    assert pairs["decode-1"]["gbs"] * 8000 == pytest.approx(SLOW_MBIT, rel=0.3)
    cluster.check_nothing_left(but=TCP_PORTS["dec-1"])

    for path, data in kept.items():
        path.write_bytes(data)
    hosts["dec-2"].rate(None)
    hosts["dec-3"].open_ports()
    report = cluster.doctor(device="cuda", interface="ib0")
    assert {each["where"] for each in found(report, "device")} == {by_name[name] for name in ("pre", *DECODERS)}
    assert len(found(report, "interface")) == 4
    assert "eth0" in found(report, "interface")[0]["what"]

    stranger = hosts["head"].home / "stranger" / ".ray"
    stranger.mkdir(parents=True)
    (stranger / "auth_token").touch(0o600)
    (stranger / "auth_token").write_text("b" * 64)
    began_s = time.monotonic()
    report = cluster.doctor(HOME=str(HOME / "stranger"))
    assert time.monotonic() - began_s < 120
    (refused,) = report["findings"]
    assert (refused["check"], refused["level"]) == ("join", "fail")
    assert "auth_token" in refused["remedy"]
