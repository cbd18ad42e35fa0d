"""Goodput: its arithmetic on rows made by hand, its options, and a run against a real service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from experiments.goodput import Goodput, GoodputOptions
from experiments.modes import Split
from experiments.run_folder import FinishedCell, RequestRow, RunData, RunFolder
from pdserve import ServiceStatus, ServiceWorker
from pdserve.core.errors import InvalidRequest
from pdserve.pb import inference_pb2 as pb
from tests.experiments.quiet import holds, judged, measured
from tests.local_cluster import LocalCluster


def row(cell: str, arm: str, index: int, ttft_ms: float, **changes: Any) -> RequestRow:
    values: dict[str, Any] = {"cell": cell, "arm": arm, "repeat": 0, "index": index, "ttft_ms": ttft_ms,
                              "itl_ms": (5.0,), "tpot_ms": 5.0, "e2e_ms": ttft_ms + 5.0}  # fmt: skip
    return RequestRow(**{**values, **changes})


Cell = tuple[FinishedCell, Sequence[RequestRow]]


def loaded(split: str, rate: float, good: dict[str, int]) -> Cell:
    """A cell with ten requests per arm in 5 s, of which ``good`` by arm have a TTFT of 10 ms and the others 100 ms."""
    name, devices = f"{split}/rate-{rate:g}", Split.parse(split, "").devices
    loads = [{"arm": arm, "repeat": 0, "duration_s": 5.0, "took_s": 6.0, "lag": None} for arm in good]
    parameters = {"split": split, "devices": devices, "load": f"rate-{rate:g}", "rate_per_device": rate}
    rows = [
        row(name, arm, index, 10.0 if index < count else 100.0) for arm, count in good.items() for index in range(10)
    ]
    return FinishedCell(name, parameters, 1.0, {"loads": loads, "workload": "random"}), rows


def summary_of(*cells: Cell, slo: str = "ttft=50") -> dict[str, Any]:
    rows = tuple(each for _, of_cell in cells for each in of_cell)
    return judged(Goodput, RunData("goodput", {}, {}, tuple(cell for cell, _ in cells), rows), slo=slo)[0]


def test_the_best_split_and_its_gain() -> None:
    summary = summary_of(
        loaded("2P1D", 0.5, {"pd": 10, "colocated": 10}),
        loaded("2P1D", 1.0, {"pd": 8, "colocated": 2}),
        loaded("1P2D", 0.5, {"pd": 9, "colocated": 8}),
        loaded("1P2D", 1.0, {"pd": 1, "colocated": 0}),
    )
    by_name = {system["system"]: system for system in summary["systems"]}
    offered = 10 / 5.0 / 3  # requests per second and device
    figures = {
        "2P1D disaggregated.goodput_rps_per_device.mean": offered,
        "2P1D disaggregated.at_rate_per_device": 0.5,
        "2P1D disaggregated.sustained_rate_per_device": 0.5,
        "2P1D disaggregated.points.1.attainment.mean": 0.8,
        # The rows of both services together. Of the two rounds, one met it with 10 of 10 requests and one with 8: too
        # few for an interval.
        "3 colocated.points.0.attainment": {"mean": 0.9, "lo": None, "hi": None, "n": 2},
        "3 colocated.goodput_rps_per_device.mean": 0.9 * offered,
        "1P2D disaggregated.sustained_rate_per_device": 0.5,
    }
    holds(by_name, figures, abs=1e-5)
    assert len(by_name) == 3
    whole = {"best_split": "2P1D", "gain_rps_per_device.mean": 0.1 * offered, "slo_ms": {"ttft": 50.0}, "failed": []}
    holds(summary, whole, abs=1e-5)


def test_goodput_counts_from_when_requests_were_due() -> None:
    cell, rows = loaded("1P1D", 1.0, {"pd": 10, "colocated": 10})
    late = [msgspec.structs.replace(each, sent_s=0.2) if each.arm == "pd" and each.index < 4 else each for each in rows]
    cell.facts["loads"][0]["unsent"] = 2
    summary = summary_of((cell, late))
    by_arm = {system["arm"]: system for system in summary["systems"]}
    figures = {"pd.points.0.attainment.mean": 0.5, "pd.goodput_rps_per_device.mean": 6 / 5.0 / 2,  # 6 of 12
               "colocated.points.0.attainment.mean": 1.0}  # fmt: skip
    holds(by_arm, figures, abs=1e-5)
    holds(summary, {"cells.0.attainment.pd.mean": 0.5})


def test_an_automatic_slo_is_of_the_idle_requests() -> None:
    idle = FinishedCell("1P1D/idle", {"split": "1P1D", "devices": 2, "load": "idle"}, 1.0, {})
    rows = [row("1P1D/idle", arm, index, 10.0 + index) for index in range(11) for arm in ("pd", "colocated")]
    load = loaded("1P1D", 1.0, {"pd": 5, "colocated": 10})
    # Twice the 90th percentile, and twice the median gap.
    holds(summary_of((idle, rows), load, slo="auto"), {"slo_ms": {"ttft": 38.0, "itl": 10.0}})
    holds(summary_of(load, slo="auto"), {"slo_ms": None, "systems": [], "best_split": None})


def test_a_running_service_keeps_its_split() -> None:
    workers = tuple(
        ServiceWorker.from_proto(pb.WorkerStatus(worker_id=role, role=role, state="ready"))
        for role in ("prefill", "decode")
    )
    status = replace(ServiceStatus.from_proto(pb.GetStatusResponse()), workers=workers)
    with pytest.raises(InvalidRequest, match="--splits: the running service is 1P1D"):
        Goodput(GoodputOptions.choose({"splits": "2P1D"})).cells(status)


def test_cells_of_every_split_of_the_devices() -> None:
    cells = Goodput(GoodputOptions.choose({"devices": 3, "rates": "0.5", "duration_s": 4, "rounds": 2})).cells(None)
    assert [cell.name for cell in cells] == ["2P1D/idle", "2P1D/rate-0.5", "1P2D/rate-0.5"]
    assert cells[0].service == cells[1].service == {"cluster.prefill": 2, "cluster.decode": 1}
    assert [split.name for split in Split.all(4)] == ["2P2D", "3P1D", "1P3D"]


def test_a_run_against_a_service(tmp_path: Path, tcp_service: LocalCluster) -> None:
    given = {"rates": "2,4", "duration_s": 1, "rounds": 2, "dataset": "azure-code", "scale": "0.02:0.2"}
    summary, folder, _ = measured(Goodput(GoodputOptions.choose(given)), tmp_path, tcp_service.target)
    assert [system["system"] for system in summary["systems"]] == ["1P1D disaggregated", "2 colocated"]
    assert summary["best_split"] == "1P1D"
    assert "azure-code" in summary["workload"]
    rows = RunFolder.open(folder).load().rows_of("1P1D/rate-2")
    assert {row.mode for row in rows if row.arm == "colocated"} == {"colocated"}
    lengths = {
        arm: {(row.repeat, row.index): row.prompt_tokens for row in rows if row.arm == arm}
        for arm in ("pd", "colocated")
    }
    # On a busy machine, the last requests of a load may not be sent.
    both = lengths["pd"].keys() & lengths["colocated"].keys()
    assert {repeat for repeat, _ in both} == {0, 1}
    assert all(lengths["pd"][each] == lengths["colocated"][each] for each in both)
