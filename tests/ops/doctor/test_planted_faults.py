"""Real faults planted into one of two "nodes". The doctor has to find each of them, and nothing else."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from checkpoints.source import resolve_model
from ops.doctor.checks import check_tokenizer
from ops.doctor.node_report import PACKAGES, ROOT, report_node
from ops.doctor.report import DoctorReport, Level
from pdserve.core.config import PdserveConfig
from tests.local_cluster import free_port, free_ports
from tests.ops.doctor.planted_host import FIRST, SECOND, Planted, PlantedHost, examine, found, troubles
from tests.planted.clocks import time_namespaces_problem


def installation(folder: Path) -> Path:
    """A copy of pdserve in ``folder``."""
    for package in (*PACKAGES, "models"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_two_nodes_that_are_fit() -> None:
    host = PlantedHost()
    report = examine(host, cluster={"port_base": free_ports(12)}, model={"dtype": "float32"})
    findings = [each for each in report.findings if each.check != "cores"]  # services that run beside the tests
    assert not findings, findings
    assert [node.name for node in report.nodes] == [FIRST, SECOND]
    (pair,) = report.pairs
    assert pair.across
    assert pair.gbs > 0.01
    assert pair.meeting.figures is not None
    assert 0 < pair.meeting.figures.round_trip_s < 0.1
    assert list(pair.predictions) == [512, 2048]
    assert all(each.exposed_s > each.wire_s > 0 for each in pair.predictions.values())
    values = report.to_dict()
    assert values["ok"] is True
    assert values["nodes"][0]["memory_bytes"] > values["need_bytes"]["total_bytes"]
    assert all(process._process.poll() is not None for process in host.processes)


def test_a_running_services_ports_are_no_fault() -> None:
    base, port = free_ports(12), free_port()
    with socket.create_server((SECOND, base + 5)), socket.create_server((FIRST, port)):
        report = examine(
            PlantedHost(running=[port]), cluster={"port_base": base}, gateway={"host": FIRST, "port": port}
        )
    assert not report.failed
    assert {finding.where for finding in found(report, "port", "ok")} == {"the gateway", SECOND}


def test_a_wrong_interface() -> None:
    report = examine(PlantedHost(), cluster={"port_base": free_ports(12)}, transfer={"interface": "nosuch0"})
    assert troubles(report) == ["interface"]
    assert len(found(report, "interface")) == 2
    assert "lo 127.0.0.1" in found(report, "interface")[0].what  # what there is
    assert report.pairs[0].meeting.obstacle == "not tried"


def test_another_model(tmp_path: Path) -> None:
    """The same path, other weights; the gateway's host has no tokenizer."""
    for name in ("first", "second"):
        shutil.copytree(ROOT / "models" / "tiny", tmp_path / name / "model")
    (tmp_path / "first" / "model" / "tokenizer.json").unlink()
    weights = tmp_path / "second" / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    host = PlantedHost(first=Planted(cwd=tmp_path / "first"), second=Planted(cwd=tmp_path / "second"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "first")
        report = examine(host, cluster={"port_base": free_ports(12)}, model={"path": "model"})
    assert troubles(report) == ["model", "reach"]
    assert found(report, "model")[0].where == SECOND
    assert report.pairs[0].meeting.obstacle == "layout"
    assert [each.where for each in found(report, "tokenizer", "warn")] == ["the gateway"]


def test_a_draft_model_that_one_host_lacks(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    shutil.copytree(ROOT / "models" / "tiny", tmp_path / "first" / "draft")
    host = PlantedHost(first=Planted(cwd=tmp_path / "first"), second=Planted(cwd=tmp_path / "second"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "first")
        report = examine(
            host,
            cluster={"port_base": free_ports(12)},
            engine={"speculation": "draft"},
            model={"dtype": "float32"},
        )
    (finding,) = found(report, "model")
    assert finding.where == SECOND
    assert finding.what.startswith(
        "engine.speculation: neither off nor ngram, and no draft model: draft: no such folder"
    )
    assert report.need is not None
    assert report.need.weight_bytes == 2 * 4 * resolve_model("tiny").shape.num_parameters
    (finding,) = found(examine(PlantedHost(), engine={"speculation": "dummy:135m"}), "model")
    assert (finding.where, "has other tokens than tiny" in finding.what) == ("the gateway's host", True)


def test_an_installation_without_a_doctor(tmp_path: Path) -> None:
    """An old pdserve without a doctor cannot report its version, which is a finding."""
    other = installation(tmp_path)
    shutil.rmtree(other / "ops" / "doctor")
    report = examine(PlantedHost(second=Planted(root=other)), cluster={"port_base": free_ports(12)})
    assert troubles(report) == ["probe"]
    assert report.pairs[0].meeting.obstacle == "not tried"


def test_several_faults_at_once(tmp_path: Path) -> None:
    """Another version, ports in use, and too little memory are each found, with a remedy."""
    other = installation(tmp_path)
    (other / "pdserve" / "version.py").write_text('VERSION = "0.0.1"\n')
    base, port = free_ports(12), free_port()
    # decode-0 is the second worker: its control port is 5 after the base, its one KV transport's 6.
    with socket.create_server((SECOND, base + 6)), socket.create_server((FIRST, port)):
        report = examine(
            PlantedHost(second=Planted(root=other)),
            cluster={"port_base": base},
            engine={"kv_memory_mb": 100_000_000},
            gateway={"host": FIRST, "port": port},
        )
    assert troubles(report) == ["memory", "port", "version"]
    (version,) = found(report, "version")
    assert (version.where, "0.0.1" in version.what) == (SECOND, True)
    gateway, worker = sorted(found(report, "port"), key=lambda finding: "decode-0" in finding.where)
    assert "gateway.port" in gateway.remedy
    assert f"{SECOND}, port {base + 6}" in worker.what
    assert f"process {os.getpid()} " in worker.what  # who holds it
    assert "cluster.port_base" in worker.remedy
    assert [finding.where for finding in found(report, "memory")] == [FIRST, SECOND]
    assert "engine.kv_memory_mb" in found(report, "memory")[0].remedy
    assert report.pairs[0].gbs > 0  # measured over a free port


def test_a_changed_source_a_shared_address_and_another_clock(tmp_path: Path) -> None:
    other = installation(tmp_path)
    with (other / "kv_transfer" / "status.py").open("a") as file:
        file.write("\n# a hot fix\n")
    problem = time_namespaces_problem()
    ahead = ("unshare", "--time", "--monotonic", "5000", "--boottime", "5000", "--fork", "--kill-child")
    report = examine(
        PlantedHost(second=Planted(root=other, prefix=() if problem else ahead)),
        cluster={"port_base": free_ports(12)},
        transfer={"interface": "127.0.0.0/8"},  # as with a bridge of containers
    )
    assert troubles(report) == ["interface", "version"]
    assert "source" in found(report, "version")[0].what
    assert "call itself" in found(report, "interface")[0].what
    if problem is not None:
        pytest.skip(problem)
    (finding,) = found(report, "clock", "warn")
    assert "time namespace" in finding.what
    clock = report.nodes[1].clock
    assert clock is not None
    assert abs(clock.offset_s - 5000) < 1
    assert clock.error_s < 0.01


@pytest.mark.cluster
def test_a_node_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.doctor.examine._REPORT_S", 15.0)
    report = examine(
        PlantedHost(second=Planted(prefix=("sh", "-c", "exec sleep 600"))), cluster={"port_base": free_ports(12)}
    )
    assert troubles(report) == ["probe"]
    assert "did not answer report within 15 s" in found(report, "probe")[0].what


def test_weights_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The loader's own checks find the fault without loading the model."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "tiny", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "tensor 'model.norm.weight' is in none of its safetensors files" in report_node(str(folder)).model_error


@pytest.mark.parametrize(
    ("content", "level", "said"),
    [
        (None, "warn", "has no tokenizer.json: prompts must be token ids"),
        ("version https://git-lfs.github.com/spec/v1\n", "fail", "tokenizer.json: is a Git LFS pointer"),
        ("{}", "fail", "tokenizer.json: not a readable tokenizer"),
    ],
)
def test_a_tokenizer_that_is_missing_or_broken(content: str | None, level: Level, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "tiny", folder)
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    (finding,) = check_tokenizer(
        DoctorReport(PdserveConfig(), "cpu", source=replace(resolve_model("tiny"), folder=folder))
    )
    assert (finding.level, said in finding.what, bool(finding.remedy)) == (level, True, True)


@pytest.mark.cluster
def test_nodes_that_emulate_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's own limit makes the probes' hosts such ones. Layouts are those of the dtype that `up` would take."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    report = examine(PlantedHost())
    (finding,) = found(report, "dtype", "warn")
    assert f"auto converts the bfloat16 weights to float32: bfloat16 is emulated on {FIRST} (a CPU " in finding.what
    assert not troubles(report)
    assert report.need is not None
    assert report.need.weight_bytes == 4 * resolve_model("tiny").shape.num_parameters
    (finding,) = found(examine(PlantedHost(), model={"dtype": "bfloat16"}), "dtype", "warn")
    assert "expect prompts to take several times as long" in finding.what
