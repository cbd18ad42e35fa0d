"""The run folder of `pdserve bench --output`: its figures, against a service, and after an interruption."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.bench_plan import BenchPlan, Pace, run_bench
from experiments.bench_report import BenchRecorder, BenchRun, BenchRunOptions, report_of
from experiments.cli.bench import _summary
from experiments.report.page import Report
from experiments.run_folder import FinishedCell, RequestRow, RunData, RunFolder
from experiments.runner import redraw
from experiments.workloads.synthetic import Fixed, Synthetic
from ops.launch.state import last_report
from pdserve import AsyncClient
from tests.local_cluster import local_cluster
from tests.pdserve.scripted_service import ScriptedService


def row(arm: str, index: int, ttft_ms: float, **changes: Any) -> RequestRow:
    values: dict[str, Any] = {
        "cell": "load", "arm": arm, "repeat": 0, "index": index, "scheduled_s": float(index), "sent_s": float(index),
        "ttft_ms": ttft_ms, "ttft_decode_ms": ttft_ms + 10.0, "itl_ms": (10.0, 12.0), "tpot_ms": 11.0,
        "e2e_ms": ttft_ms + 22.0, "output_tokens": 3, "prompt_tokens": 7,
        "stages_ms": {"ttft": {"prefill": ttft_ms - 1.0, "network": 1.0}},
    }  # fmt: skip
    return RequestRow(**{**values, **changes})


def test_the_figures_of_a_run() -> None:
    rows = (row("pd", 0, 20.0), row("pd", 1, 40.0), row("colocated", 0, 15.0), row("colocated", 1, 30.0),
            RequestRow(cell="load", arm="pd", repeat=0, index=2, sent_s=2.0, error="WorkerLost: gone"))  # fmt: skip
    load = {"mode": "both", "duration_s": 4.0, "unsent": 1, "partial": False, "planned": 5}
    cell = FinishedCell("load", {"mode": "both"}, 4.0, {"loads": [load], "leaked_blocks": 0, "workload": "random"})
    kind = BenchRun(BenchRunOptions(slo="ttft=25", paired=True, percentiles="50,99"))
    run = RunData("bench", {}, {}, (cell,), rows)
    summary = kind.summarise(run)

    assert list(summary["arms"]) == ["pd", "colocated"]
    pd = summary["arms"]["pd"]
    assert (pd["requests"], pd["failed"], pd["failures"]) == (3, 1, {"WorkerLost": 1})
    assert pd["ttft_ms"]["mean"] == 30.0
    assert (pd["ttft_ms"]["p50"], pd["ttft_ms"]["count"]) == (30.0, 2)
    assert pd["itl_ms"]["count"] == 4
    assert pd["requests_per_s"] == 0.5
    assert pd["output_tokens_per_s"] == 1.5
    assert pd["total_tokens_per_s"] == 5.0
    assert pd["goodput"] == {"requests_per_s": 0.25, "share": pytest.approx(1 / 3)}
    assert pd["stages_ms"]["ttft"] == {"prefill": 29.0, "network": 1.0}
    assert summary["added_ms"]["ttft"]["median"] == pytest.approx(7.5)
    assert (summary["partial"], summary["leaked_blocks"], summary["slo_ms"]) == (False, 0, {"ttft": 25.0})
    assert summary["failed"] == ["pd: 1 request failed, first with WorkerLost: gone"]


def test_an_open_loop_is_judged_from_when_requests_were_due() -> None:
    rows = (row("pd", 0, 20.0), row("pd", 1, 20.0, sent_s=1.1), row("pd", 2, 20.0, kv_bytes=7, request_id="wrong"))
    load = {"mode": "pd", "duration_s": 4.0, "unsent": 1, "partial": False, "planned": 4}
    run = RunData("bench", {}, {}, (FinishedCell("load", {}, 4.0, {"loads": [load]}),), rows)
    kind = BenchRun(BenchRunOptions(slo="ttft=25", scheduled=True))
    summary = kind.summarise(run)
    pd = summary["arms"]["pd"]
    assert pd["ttft_ms"]["max"] == pytest.approx(120.0)
    assert pd["stages_ms"]["ttft"]["lag"] == pytest.approx(100 / 3, abs=1e-3)
    assert (pd["e2e_ms"]["max"], pd["tpot_ms"]["max"]) == (pytest.approx(142.0), 11.0)
    assert pd["goodput"] == {"requests_per_s": 0.5, "share": 0.5}  # with the one that was never sent
    assert pd["lag"]["behind"]
    assert "latencies count from when" in " ".join(kind.report(run, summary).caveats).lower()
    assert "first in wrong: 7 instead of 0" in summary["failed"][0]
    closed = BenchRun(BenchRunOptions(slo="ttft=25")).summarise(run)["arms"]["pd"]
    assert (closed["ttft_ms"]["max"], closed["lag"], closed["goodput"]["share"]) == (20.0, None, 1.0)


async def test_a_load_beside_requests_of_others_has_a_caveat(tmp_path: Path, service: ScriptedService) -> None:
    plan = BenchPlan(Synthetic(Fixed(20), Fixed(3)), Pace(concurrency=2), requests=4)
    async with AsyncClient(service.target) as client:
        busy = replace(await client.status(), running=3, queued=2)
        recorder = BenchRecorder(tmp_path, plan, service.target)
        recorder.begin(busy)
        loads = await run_bench(client, plan, busy, recorder.record, asyncio.Event())
        reports = [report_of(plan, *load) for load in loads]
    recorder.finish(reports)
    summary = redraw(BenchRun.of(recorder.folder), recorder.folder)
    text = "auto began on a busy service beside requests that were not the measurement's (3 running, 2 queued)"
    assert summary["caveats"][0].startswith(f"load: {text}")
    assert text in html.unescape((recorder.folder.path / "report.html").read_text())
    assert any(line.startswith("busy        this load began on a busy service beside") for line in _summary(reports))


def test_a_report_is_drawn_once(tmp_path: Path, pdserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path, "bench", {})
    folder.append(row("auto", 0, 20.0))
    drawn: list[str] = []
    report = BenchRun.report

    def counted(self: BenchRun, run: RunData, summary: Mapping[str, Any]) -> Report:
        drawn.append(run.name)
        return report(self, run, summary)

    monkeypatch.setattr(BenchRun, "report", counted)
    ran = pdserve("report", str(folder.path))
    assert ran.code == 0, ran.err
    assert drawn == ["bench"]
    assert " ".join(ran.out.split()).startswith(folder.summary["answer"])


def test_stages_are_in_the_order_of_their_table_whichever_request_came_first() -> None:
    colocated = {"prefill": 5.0, "first_decode": 3.0, "unattributed": 0.0}
    pd = {"network": 1.0, "prefill": 5.0, "kv_exposed": 2.0, "first_decode": 3.0, "unattributed": 0.0}
    rows = [row("auto", index, 20.0, stages_ms={"ttft_decode": stages}) for index, stages in enumerate((colocated, pd))]
    summary = BenchRun(BenchRunOptions(scheduled=True)).summarise(RunData("bench", {}, {}, (), tuple(rows)))
    stages_ms = summary["arms"]["auto"]["stages_ms"]["ttft_decode"]
    assert list(stages_ms) == ["lag", "network", "prefill", "kv_exposed", "first_decode", "unattributed"]


def test_a_run_that_was_killed_has_the_rows_so_far() -> None:
    run = RunData("bench", {}, {}, (), (row("auto", 0, 20.0), row("auto", 1, 40.0)))
    kind = BenchRun(BenchRunOptions())
    summary = kind.summarise(run)
    assert summary["partial"]
    assert summary["arms"]["auto"]["duration_s"] == pytest.approx(1.062)
    assert "interrupted" in kind.report(run, summary).caveats[0]


def test_a_bench_writes_its_folder_and_report_draws_it_again(tmp_path: Path, pdserve: Any) -> None:
    with local_cluster({}) as cluster:
        ran = pdserve(
            "bench", "--target", cluster.target, "--requests", "6", "--rate", "20", "--mode", "both", "--input-len",
            "40", "--output-len", "5", "--slo", "ttft=5000", "--output", str(tmp_path), "--json",
        )  # fmt: skip
    assert ran.code == 0, ran.err
    (folder,) = (tmp_path / "bench").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.yaml", "env.json", "requests.jsonl", "cells.jsonl", "summary.json", "report.html",
                     "cdf.png", "stages.png", "over_time.png"}  # fmt: skip
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert {each["arm"] for each in rows} == {"pd", "colocated"}
    sent = [each for each in rows if each["arm"] == "pd"]
    assert all(each["transfer"]["exposed_ms"] > 0 and each["stages_ms"]["ttft_decode"]["prefill"] > 0 for each in sent)
    later = [each["scheduled_s"] for each in rows if each["arm"] == "colocated"]
    assert min(later) > max(each["scheduled_s"] for each in sent)  # one arm after the other
    summary = json.loads((folder / "summary.json").read_text())
    for arm, printed in ran.json["arms"].items():
        of_arm = summary["arms"][arm]
        for key in ("requests", "failed", "duration_s", "goodput", "lag", "requests_per_s", "output_tokens_per_s"):
            assert of_arm[key] == pytest.approx(printed[key], abs=1e-6), key
        assert of_arm["ttft_ms"] == pytest.approx(printed["ttft_ms"])
    before = (folder / "summary.json").read_text()
    (folder / "report.html").unlink()
    again = pdserve("report", str(folder))
    assert again.code == 0
    assert "requests/s and" in again.out
    assert (folder / "summary.json").read_text() == before
    assert (folder / "report.html").is_file()
    assert last_report().resolve() == (folder / "report.html").resolve()
