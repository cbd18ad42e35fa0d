"""The run folder of `pdserve bench --output`: its figures, against a service, and after an interruption."""

from __future__ import annotations

import asyncio
import html
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_

from experiments.bench_plan import BenchPlan, run_bench
from experiments.bench_report import BenchRecorder, BenchRun, report_of
from experiments.cli.bench import _summary
from experiments.report.drawing import Mark, Picture, TableBlock
from experiments.report.page import Report
from experiments.run_folder import FinishedCell, RequestRow, RunData, RunFolder
from experiments.runner import redraw
from experiments.workloads.synthetic import Fixed, Synthetic
from ops.launch.state import last_report
from pdserve import AsyncClient
from tests.experiments.quiet import holds, judged, told
from tests.local_cluster import LocalCluster
from tests.pdserve.scripted_service import ScriptedService


def row(arm: str, index: int, ttft_ms: float, **changes: Any) -> RequestRow:
    values: dict[str, Any] = {
        "cell": "load", "arm": arm, "repeat": 0, "index": index, "scheduled_s": float(index), "sent_s": float(index),
        "ttft_ms": ttft_ms, "ttft_decode_ms": ttft_ms + 10.0, "itl_ms": (10.0, 12.0), "tpot_ms": 11.0,
        "e2e_ms": ttft_ms + 22.0, "output_tokens": 3, "prompt_tokens": 7,
        "stages_ms": {"ttft": {"prefill": ttft_ms - 1.0, "network": 1.0}},
    }  # fmt: skip
    return RequestRow(**{**values, **changes})


def run_of(*rows: RequestRow, **facts: Any) -> RunData:
    cells = (FinishedCell("load", {}, 4.0, facts),) if facts else ()
    return RunData("bench", {}, {}, cells, rows)


def loads(mode: str) -> list[dict[str, Any]]:
    return [{"mode": mode, "duration_s": 4.0, "unsent": 1, "partial": False, "planned": 5}]


def test_the_figures_of_a_run() -> None:
    rows = (row("pd", 0, 20.0), row("pd", 1, 40.0), row("colocated", 0, 15.0), row("colocated", 1, 30.0),
            RequestRow(cell="load", arm="pd", repeat=0, index=2, sent_s=2.0, error="WorkerLost: gone"))  # fmt: skip
    run = run_of(*rows, loads=loads("both"), leaked_blocks=0, workload="random")
    summary, _ = judged(BenchRun, run, slo="ttft=25", paired=True, percentiles="50,99")
    assert list(summary["arms"]) == ["pd", "colocated"]
    figures = {
        "requests": 3,
        "failed": 1,
        "failures": {"WorkerLost": 1},
        "ttft_ms.mean": 30.0,
        "ttft_ms.p50": 30.0,
        "ttft_ms.count": 2,
        "itl_ms.count": 4,
        "requests_per_s": 0.5,
        "output_tokens_per_s": 1.5,
        "total_tokens_per_s": 5.0,
        "goodput.requests_per_s": 0.25,
        "goodput.share": 1 / 3,
        "stages_ms.ttft": {"prefill": 29.0, "network": 1.0},
    }
    holds(summary["arms"]["pd"], figures)
    whole = {"added_ms.ttft.median": 7.5, "partial": False, "leaked_blocks": 0, "slo_ms": {"ttft": 25.0},
             "failed": ["pd: 1 request failed, first with WorkerLost: gone"]}  # fmt: skip
    holds(summary, whole)


def test_pairs_beside_other_load_are_marked_and_told() -> None:
    rows = [
        row(arm, index, ttft_ms + (20.0 if arm == "pd" and index % 2 else 0.0), others_cpu_s=0.2 * (index == 2))
        for index in range(8)
        for arm, ttft_ms in (("pd", 20.0), ("colocated", 15.0))
    ]
    summary, report = judged(BenchRun, run_of(*rows, loads=loads("both")), paired=True)
    holds(summary, {"added_ms.ttft.disturbed": [2], "added_ms.ttft_decode.n": 8})
    assert report.answer.startswith("pd: TTFT was 30.0 ms"), "modes that take turns have no rates of their own"
    assert "disaggregation adds +15 ms [5, 25] (95 %) to token 1" in report.answer
    (picture,) = (block for block in report.blocks if isinstance(block, Picture) and block.stem == "pairs")
    points = picture.panels[0].marks[0]
    assert isinstance(points, Mark)
    assert [point["hollow"] for point in points.data] == [index == 2 for index in range(8)]
    assert len(picture.draw().axes) == 2
    tables = {block.title: block for block in report.blocks if isinstance(block, TableBlock)}
    assert tables["Added by disaggregation"].rows[0] == ["ttft", "8", "+15 [5, 25]", "+15.00", "1"]
    unclear = [each if each.arm == "pd" else replace_(each, ttft_ms=30.0, ttft_decode_ms=40.0) for each in rows]
    answer = judged(BenchRun, run_of(*unclear, loads=loads("both")), paired=True)[1].answer
    assert "other processes used the machine beside 1 of 8 pairs" in answer


def test_an_open_loop_is_judged_from_when_requests_were_due() -> None:
    rows = (row("pd", 0, 20.0), row("pd", 1, 20.0, sent_s=1.1), row("pd", 2, 20.0, kv_bytes=7, request_id="wrong"))
    run = run_of(*rows, loads=loads("pd"))
    summary, report = judged(BenchRun, run, slo="ttft=25", scheduled=True)
    figures = {"ttft_ms.max": 120.0, "stages_ms.ttft.lag": 100 / 3, "e2e_ms.max": 142.0, "tpot_ms.max": 11.0,
               "goodput": {"requests_per_s": 0.5, "share": 0.5}, "lag.behind": True}  # fmt: skip
    holds(summary["arms"]["pd"], figures, abs=1e-3)  # the goodput is with the one that was never sent
    assert told(report.caveats, "Latencies count from when")
    assert told(summary["failed"], "first in wrong: 7 instead of 0")
    closed, _ = judged(BenchRun, run, slo="ttft=25")
    holds(closed["arms"]["pd"], {"ttft_ms.max": 20.0, "lag": None, "goodput.share": 1.0})


async def test_a_load_beside_requests_of_others_has_a_caveat(tmp_path: Path, service: ScriptedService) -> None:
    plan = BenchPlan.of(Synthetic(Fixed(20), Fixed(3)), concurrency=2, requests=4)
    async with AsyncClient(service.target) as client:
        busy = replace(await client.status(), running=3, queued=2)
        recorder = BenchRecorder(tmp_path, plan, service.target, busy)
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

    def counted(self: BenchRun, run: RunData, summary: dict[str, Any]) -> Report:
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
    summary, _ = judged(BenchRun, run_of(*rows), scheduled=True)
    stages_ms = summary["arms"]["auto"]["stages_ms"]["ttft_decode"]
    assert list(stages_ms) == ["lag", "network", "prefill", "kv_exposed", "first_decode", "unattributed"]


def test_a_run_that_was_killed_has_the_rows_so_far() -> None:
    summary, report = judged(BenchRun, run_of(row("auto", 0, 20.0), row("auto", 1, 40.0)))
    holds(summary, {"partial": True, "arms.auto.duration_s": 1.062})
    assert told(report.caveats, "interrupted")


def test_a_bench_writes_its_folder_and_report_draws_it_again(
    tmp_path: Path, pdserve: Any, tcp_service: LocalCluster
) -> None:
    ran = pdserve(
        "bench", "--target", tcp_service.target, "--requests", "6", "--rate", "20", "--mode", "both", "--input-len",
        "40", "--output-len", "5", "--slo", "ttft=5000", "--output", str(tmp_path), "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    (folder,) = (tmp_path / "bench").iterdir()
    (cell,) = RunFolder(folder).load().cells
    assert cell.facts["config"]["engine"]["max_num_seqs"] == 64
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
