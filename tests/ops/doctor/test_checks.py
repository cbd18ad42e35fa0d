"""Checks of made-up reports: faults that cannot be planted on one host, and hosts without faults."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints.source import resolve_model
from kv_transfer.handshake import LinkFigures
from ops.doctor.affinity import Affinity
from ops.doctor.checks import (
    check_access,
    check_affinity,
    check_clocks,
    check_compilers,
    check_context,
    check_cores,
    check_devices,
    check_dtype,
    check_endpoints,
    check_memory,
    check_models,
    check_reach,
    check_speed,
    check_versions,
)
from ops.doctor.handoff_prediction import HandoffPrediction
from ops.doctor.network import ClockReading, Obstacle
from ops.doctor.node_report import Device, NodeReport, missing_compilers
from ops.doctor.report import DoctorReport, Endpoints, ExaminedNode, ExaminedPair, Finding, Level, Meeting, Seat, fail
from ops.launch.plan import Node
from ops.model_memory import ServedModel
from pdserve.core.config import PdserveConfig
from pdserve.core.kv_layout import KVLayout
from pdserve.core.worker import Role
from runtime.dtypes import NativeDtypes, choose_dtype
from worker.addresses import Interface
from worker.cores import CoreHolder

GB = 10**9
REPORT = NodeReport(
    host="a",
    python="3.11.7",
    torch="2.13.0+cpu",
    ray="2.60.0",
    pdserve="1.0",
    source="s",
    model_hash="m",
    model_error="",
    memory_bytes=10 * GB,
    clock_id="boot-a/time:[1]",
    native={"cpu": (NativeDtypes("a CPU", ("float32", "bfloat16")),)},
    allowed_cores=(0, 1),
    held_cores=(),
)
LAYOUT = KVLayout.uniform("m", "bfloat16", block_size=64, num_layers=5, num_kv_heads=2, head_dim=32)
NEED = ServedModel(LAYOUT, 2048, weight_bytes=2 * GB, pool_bytes=GB, activation_bytes=0)


def seat(worker_id: str, ip: str, gpus: float = 0.0) -> Seat:
    resources = {"CPU": 8.0, "GPU": gpus}
    role = Role.PREFILL if worker_id.startswith("prefill") else Role.DECODE
    return Seat(worker_id, role, Node(ip, ip, resources, resources), 0, 0, {"CPU": 1.0})


def node(
    report: NodeReport | None = REPORT,
    ip: str = "10.0.0.2",
    *,
    workers: int = 1,
    gpus: float = 0.0,
    clock: ClockReading | None = None,
    endpoints: Sequence[Endpoints] = (),
) -> ExaminedNode:
    seats = tuple(seat(f"decode-{index}", ip, gpus) for index in range(workers))
    return ExaminedNode(Node(ip, ip, {"GPU": gpus}), seats, report, clock, {each.worker_id: each for each in endpoints})


def seen(
    nodes: Sequence[ExaminedNode] = (), device: str = "cpu", own_port: int = 0, *, sections: Any = None, **found: Any
) -> DoctorReport:
    """What was seen by a doctor for a configuration with these ``sections``."""
    config = PdserveConfig.parse(sections or {})
    return DoctorReport(config, device, (), own_port, **{"here": REPORT, "need": NEED, "nodes": [*nodes], **found})


def levels(findings: Sequence[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, None),
        ({"python": "3.11.2"}, None),
        ({"python": "3.12.0"}, "fail"),
        ({"ray": "2.61.0"}, "fail"),
        ({"pdserve": "1.1"}, "fail"),
        ({"source": "t"}, "fail"),
        ({"torch": "2.13.0+cu128"}, None),
        ({"torch": "2.12.0+cpu"}, "warn"),
        ({"torch_error": "libcudart is missing"}, "fail"),
    ],
)
def test_versions(change: dict[str, Any], level: Level | None) -> None:
    findings = [*check_versions(seen([node(), node(replace(REPORT, **change), "10.0.0.3"), node(None)]))]
    assert levels(findings) == ([] if level is None else [level])
    assert all(finding.where == "10.0.0.3" and finding.remedy for finding in findings)


def test_a_model_missing_on_the_gateways_host_is_found_once() -> None:
    here = replace(REPORT, model_hash="", model_error="no such folder")
    findings = [*check_models(seen([node(here), node(REPORT, "10.0.0.3")], here=here, gateway_node="10.0.0.2"))]
    assert [finding.where for finding in findings] == ["the gateway's host"]
    other = replace(REPORT, model_hash="n")
    findings = [*check_models(seen([node(REPORT, "10.0.0.3"), node(other, "10.0.0.4")], here=here))]
    assert [finding.where for finding in findings] == ["the gateway's host", "10.0.0.4"]


def test_a_model_of_the_hub_that_a_host_would_download_is_a_warning() -> None:
    there = node(replace(REPORT, model_hash="", model_error="not in this host's cache"), "10.0.0.3")
    for path, level in ((f"org/model@{'0' * 40}", "warn"), ("/models/model", "fail")):
        sections = {"model": {"path": path}}
        (finding,) = check_models(seen([node(REPORT), there], gateway_node="10.0.0.2", sections=sections))
        assert (finding.where, finding.level) == ("10.0.0.3", level)


def test_what_slim_images_lack_is_found_before_an_engine_fails(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}

    def lacks(environment: dict[str, str], *packages: str) -> tuple[str, ...]:
        triton, flashinfer = missing_compilers(environment, lambda name: "1" * (name in packages), tmp_path)
        return (*triton, *flashinfer)

    compiler, headers = "a C compiler (apt install gcc, or CC)", "Python.h (apt install python3-dev)"
    assert lacks(nothing) == (compiler, headers)
    assert [each.split()[0] for each in lacks(nothing, "flashinfer-python")] == ["a", "Python.h", "nvcc", "ninja"]
    assert lacks(nothing, "flashinfer-python", "flashinfer-cubin") == (compiler, headers)
    for name in ("gcc", "ninja", "Python.h", "bin/nvcc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    assert lacks(nothing, "flashinfer-python") == ()
    assert lacks({**nothing, "CC": "missing"}) == (compiler,)
    report = replace(REPORT, triton_lacks=(headers,), flashinfer_lacks=("ninja (pip install ninja)",))
    assert levels([*check_compilers(seen([node(report)], device="cuda"))]) == ["fail", "warn"]
    triton_only = {"engine": {"prefill_attention": "triton"}}
    assert levels([*check_compilers(seen([node(report)], device="cuda", sections=triton_only))]) == ["fail"]
    assert levels([*check_compilers(seen([node(report)]))]) == []


def test_where_gpus_are_attached() -> None:
    near, far, unknown = (
        Affinity(0, ("mlx5_0",), near=True),
        Affinity(1, ("eth0",), near=False),
        Affinity(None, (), None),
    )
    devices = tuple(Device("H100", 2, 1, place) for place in (near, far, unknown, None))
    found = [*check_affinity(seen([node(replace(REPORT, devices=devices))], device="cuda"))]
    assert levels(found) == ["ok", "warn", "ok"]
    assert found[0].what == "GPU 0: NUMA node 0, nearest network interfaces mlx5_0"
    assert found[1].what == "GPU 1: NUMA node 1, nearest network interfaces eth0, on another NUMA node"
    assert found[2].what == "GPU 2: NUMA node unknown, nearest network interfaces none"


def test_a_report_survives_the_trip() -> None:
    report = replace(
        REPORT,
        devices=(Device("A100", 2, 1, Affinity(0, ("eth0",), near=True)),),
        held_cores=(CoreHolder(0, 1, 2, 3, "s", "prefill-0"),),
    )
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(report))), NodeReport) == report


@pytest.mark.parametrize(
    ("workers", "width", "found"), [(1, 1, False), (2, 1, True), (1, 2, True), (4, 4, True), (0, 1, False)]
)
def test_cores_that_another_service_has_claimed(workers: int, width: int, found: bool) -> None:
    held = CoreHolder(1, 123, os.getuid(), 50_052, "", "prefill-0")
    nodes = [node(replace(REPORT, held_cores=(held, replace(held, core=7))), workers=workers)]
    width_of = {"cores_per_worker": width}

    def check(device: str = "cpu", own_port: int = 0, **cluster: Any) -> list[Finding]:
        return list(check_cores(seen(nodes, device, own_port, sections={"cluster": width_of | cluster})))

    findings = check()
    assert levels(findings) == (["warn"] if found else [])
    assert not found or "core 1: prefill-0 of the service on port 50052 (process 123)" in findings[0].what
    assert not check(own_port=50_052), "its own cores are its own"
    assert not check(oversubscribe=True)
    assert not check("cuda")


@pytest.mark.parametrize("asked", ["auto", "bfloat16", "float32"])
def test_a_dtype_that_a_node_emulates(asked: str) -> None:
    places = {"10.0.0.1": REPORT.native["cpu"], "10.0.0.2": (NativeDtypes("a CPU without", ("float32",)),)}
    findings = list(check_dtype(asked, choose_dtype(asked, "bfloat16", places)))
    assert levels(findings) == ([] if asked == "float32" else ["warn"])
    assert all("10.0.0.2 (a CPU without)" in finding.what and finding.remedy for finding in findings)


def test_devices() -> None:
    gpu = Device("H200", 141 * GB, 140 * GB)
    for cuda, remedy in (("", "CPU build"), ("12.8", "nvidia-smi")):
        (finding,) = check_devices(seen([node(replace(REPORT, cuda=cuda), gpus=1)], "cuda"))
        assert remedy in finding.remedy
    assert not [*check_devices(seen([node(replace(REPORT, devices=(gpu,)), gpus=1), node(None)], "cuda"))]
    assert not [*check_devices(seen([node(gpus=1)]))]


def test_workers_of_a_node_add_up() -> None:
    assert not [*check_memory(seen([node(workers=2)], "cpu", 0))]
    (tight,) = check_memory(seen([node(replace(REPORT, memory_bytes=6_500_000_000), workers=2)], "cpu", 0))
    assert tight.level == "warn"
    (fails,) = check_memory(seen([node(workers=4)], "cpu", 0))
    assert (fails.level, "4 ×" in fails.what) == ("fail", True)
    (beside,) = check_memory(seen([node(workers=4)], "cpu", 50_051))
    assert beside.level == "ok"


def test_a_gpu_of_its_own_for_each_worker_or_a_share() -> None:
    gpus = replace(REPORT, devices=(Device("x", 4 * GB, 4 * GB),) * 2)
    assert not [*check_memory(seen([node(gpus, workers=2, gpus=2)], "cuda", 0))]
    (fails,) = check_memory(seen([node(gpus, workers=4, gpus=2)], "cuda", 0))
    assert fails.level == "fail"


def test_a_context_that_the_model_or_the_pool_cannot_hold() -> None:
    source = resolve_model("tiny")

    def found(need: ServedModel = NEED, device: str = "cpu", **engine: int) -> list[str]:
        gpus = node(replace(REPORT, devices=(Device("x", 3 * GB, 3 * GB),)), gpus=1)
        findings = check_context(seen([gpus], device, need=need, source=source, sections={"engine": engine}))
        return [f"{each.level} {each.check}: {each.what}" for each in findings]

    assert found() == []
    assert found(max_model_len=4096) == [
        "fail context: engine.max_model_len: 4096 exceeds the model's context of 2048 tokens"
    ]
    held = "warn context: a request may have 2048 tokens, and a KV pool holds {}: longer requests are refused"
    assert found(replace(NEED, pool_bytes=1000 * LAYOUT.token_bytes)) == [held.format(1000)]
    rest = replace(NEED, pool_bytes=0)
    assert found(rest, "cuda") == []
    full = replace(rest, weight_bytes=3 * GB - rest.blank_bytes - 10 * LAYOUT.token_bytes)
    assert found(full, "cuda") == [held.format(10)]


def test_clocks() -> None:
    def found(clock: ClockReading, clock_id: str) -> list[Finding]:
        return [*check_clocks(seen([node(replace(REPORT, clock_id=clock_id), clock=clock)]))]

    assert not found(ClockReading(7000.0, 0.0001, 0.01), "boot-b/time:[1]")  # of another machine: any offset will do
    assert not found(ClockReading(0.00005, 0.0001, 0.0), "boot-a/time:[2]")
    (vague,) = found(ClockReading(7000.0, 0.02, 0.0), "boot-b/time:[1]")
    assert "20.0 ms" in vague.what
    (skewed,) = found(ClockReading(7000.0, 0.0001, -90.0), "boot-b/time:[1]")
    assert ("-90.0 s" in skewed.what, "chrony" in skewed.remedy) == (True, True)
    (namespace,) = found(ClockReading(5000.0, 0.0001, 0.0), "boot-a/time:[2]")
    assert "time namespace" in namespace.what


def test_interfaces() -> None:
    up, down = Interface("10.0.0.2", "eth0", 10_000), Interface("10.0.0.2", "eth0", 10_000, is_up=False)
    ends = Endpoints("decode-0", "", up, (), ())
    assert not [*check_endpoints(seen([node(endpoints=[ends])]))]
    (dead,) = check_endpoints(seen([node(endpoints=[replace(ends, interface=down)])]))
    assert (dead.check, "carrier" in dead.what) == ("interface", True)
    (shared,) = check_endpoints(seen([node(endpoints=[ends]), node(ip="10.0.0.3", endpoints=[ends])]))
    assert "call itself" in shared.what


def test_what_keeps_a_worker_from_listening_is_found_once() -> None:
    """The running service's own ports are no fault, and KV ends need a model."""
    checks = ("transport", "kv", "interface", "port")
    ends = Endpoints("decode-0", "", None, (), tuple(fail(check, "there", "what", "remedy") for check in checks))

    def failed(report: NodeReport, own_port: int) -> list[str]:
        found = check_endpoints(seen([node(report, endpoints=[ends])], own_port=own_port))
        return [finding.check for finding in found if finding.level == "fail"]

    assert failed(REPORT, 0) == list(checks)
    assert failed(replace(REPORT, model_error="no such folder"), 50_051) == ["transport", "interface"]


def pair(gbs: float, decode: str = "10.0.0.2", *, wire_ms: float = 1.0) -> ExaminedPair:
    meeting = Meeting("tcp", f"{decode}:1", "", LinkFigures(gbs, gbs, 0.001, 0.001, 1))
    predictions = {2048: HandoffPrediction(1, wire_ms / 1e3, wire_ms / 1e3)}
    return ExaminedPair(seat("prefill-0", "10.0.0.1"), seat("decode-0", decode), meeting, predictions, 1.0)


def test_slow_links() -> None:
    ends = Endpoints("prefill-0", "", Interface("10.0.0.1", "eth0", 10_000), (), ())
    nodes = [node(ip="10.0.0.1", endpoints=[ends])]
    assert not [*check_speed(seen(nodes, pairs=[pair(1.2), pair(0.4, "10.0.0.3")]))]
    (slow,) = check_speed(seen(nodes, pairs=[pair(1.2), pair(0.2, "10.0.0.3")]))
    assert "9.6" in slow.what
    assert "eth0 10.0.0.1 (prefill-0; claims 10000 Mbit/s)" in slow.remedy
    assert not [*check_speed(seen(nodes, pairs=[pair(9.0, "10.0.0.1"), pair(1.0)]))]  # within a host is another matter
    (long,) = check_speed(seen(nodes, pairs=[pair(0.1, wire_ms=1500)]))
    assert "1.5 s" in long.what
    assert not [*check_speed(seen(nodes, pairs=[pair(0.0)]))]


@pytest.mark.parametrize("obstacle", [each for each in Obstacle if each not in (Obstacle.NONE, Obstacle.NOT_TRIED)])
def test_every_obstacle_has_a_remedy(obstacle: Obstacle) -> None:
    met = Meeting("tcp", "10.0.0.2:20007", "", None, obstacle, "what")
    (finding,) = check_reach(seen(pairs=[replace(pair(1.0), meeting=met)]))
    assert "10.0.0.2:20007" in finding.what
    assert finding.remedy
    assert not [*check_reach(seen(pairs=[replace(pair(1.0), meeting=replace(met, obstacle=Obstacle.NOT_TRIED))]))]


def test_a_gateway_that_others_would_reach_unprotected() -> None:
    (finding,) = check_access(seen(sections={"gateway": {"host": "0.0.0.0"}}))
    assert (finding.level, finding.check) == ("fail", "access")
    assert "gateway.host: others can reach 0.0.0.0" in finding.what
    assert not list(check_access(seen()))
    assert not list(check_access(seen(sections={"gateway": {"host": "0.0.0.0", "insecure": True}})))
