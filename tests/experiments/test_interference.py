"""Interference: ratio, arms and report on rows made by hand, and a run against a real service."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.interference import ALONE_BUSY, ALONE_IDLE, CALIBRATION, PD, Interference, InterferenceOptions
from experiments.neighbours import CANCELLED, DECODING, LONG
from experiments.report.drawing import Picture
from experiments.report.page import Report
from experiments.run_folder import FinishedCell, RequestRow, RunData, RunFolder
from pdserve import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.pb import inference_pb2 as pb
from tests.experiments.quiet import holds, judged, measured, told
from tests.local_cluster import LocalCluster

ITL_MS = {
    "colocated-64": 12.0,
    "colocated-128": 15.0,
    "colocated-off": 40.0,
    PD: 11.0,
    ALONE_BUSY: 10.0,
    ALONE_IDLE: 8.0,
}
CHUNKS = {"off": ["colocated-off"], "64": ["colocated-64"], "128": ["colocated-128", PD, ALONE_BUSY, ALONE_IDLE]}


def windows_of(
    name: str,
    arms: Mapping[str, Sequence[str]],
    figures: Mapping[str, tuple[float, float | None, int]],
    repeats: int,
    cores: Sequence[str] = (),
    **changes: Any,
) -> RunData:
    """A run with these arms in each cell. A window takes 1 s, has a decoding request whose gaps are all equal, and a
    long prompt, unless its TTFT is None: ``figures`` are gap, TTFT and prompt tokens."""
    cells, rows = [FinishedCell(CALIBRATION, {}, 1.0, {"long_prompt_s": 0.5})], []
    for cell, of_cell in arms.items():
        windows = []
        for number, (repeat, arm) in enumerate(itertools.product(range(repeats), of_cell)):
            begin_s, (itl_ms, ttft_ms, prompt_tokens) = 10.0 * number, figures[arm]
            windows.append({"arm": arm, "repeat": repeat, "begin_s": begin_s, "end_s": begin_s + 1.0})
            place: dict[str, Any] = {"cell": cell, "arm": arm, "repeat": repeat, "index": 0, "sent_s": begin_s,
                                     "scheduled_s": begin_s}  # fmt: skip
            gaps = {"kind": DECODING, "ttft_ms": 1.0, "itl_ms": (itl_ms,) * 20}
            rows.append(RequestRow(**{**place, **gaps, **changes}))
            if ttft_ms is not None:
                rows.append(RequestRow(**place, kind=LONG, ttft_ms=ttft_ms, prompt_tokens=prompt_tokens))
        facts = {"windows": windows, "arrivals": 1, "cores": {f"w{i}": each for i, each in enumerate(cores)}}
        cells.append(FinishedCell(cell, {}, 1.0, facts))
    return RunData(name, {}, {}, tuple(cells), tuple(rows))


def run_of(repeats: int = 6, cores: Sequence[str] = ("0", "1"), **changes: Any) -> RunData:
    figures = {arm: (itl_ms, None if arm == ALONE_IDLE else 200.0, 79) for arm, itl_ms in ITL_MS.items()}
    arms = {f"chunks-{chunk}/pass-1": arms for chunk, arms in CHUNKS.items()}
    return windows_of("interference", arms, figures, repeats, cores, **changes)


def found(run: RunData) -> tuple[dict[str, Any], Report]:
    return judged(Interference, run, chunk_sizes=(64, 128))


def test_the_figures_of_the_arms_in_order_and_the_ratio_to_the_control() -> None:
    summary, report = found(run_of())
    figures = {
        "p99_itl_ratio": 1.1,
        "p99_itl_ratio_interval": {"median": 1.1, "lo": 1.1, "hi": 1.1, "n": 6},
        "one_core_per_role": True,
        "best_chunk": 64,
        "failed": [],
        "arms.pd.long_ttft_ms.p50": 200.0,
        "arms.pd.output_tokens_per_s.mean": 22.0,  # 21 and token 1 of the long prompt
        "arms.pd.tokens_per_s.mean": 101.0,
        "arms.alone-idle.long_ttft_ms": None,
    }
    holds(summary, figures)
    assert [(name, arm["itl_ms"]["p99"]) for name, arm in summary["arms"].items()] == [*ITL_MS.items()]
    assert told([report.answer], "1.10 times", "whole prompts: p99 ITL 40 ms")
    trade = report.blocks[0]
    assert isinstance(trade, Picture)
    _, stall, _, _ = trade.draw().axes
    assert stall.get_xlabel().startswith("longest gap, ms")
    dots = {line.get_ydata()[0]: line.get_xdata()[0] for line in stall.lines if line.get_marker() == "o"}
    served = [name for name, arm in summary["arms"].items() if arm["long_ttft_ms"] and name != ALONE_BUSY]
    assert dots == {row: ITL_MS[name] for row, name in enumerate(served)}


@pytest.mark.parametrize("cores", [("0", "0"), ("0,1", "2"), ("", "")])
def test_shared_or_several_cores_are_told(cores: Sequence[str]) -> None:
    summary, report = found(run_of(cores=cores))
    assert summary["one_core_per_role"] is False
    assert told(report.caveats, "one core")


def test_failed_requests_and_few_windows_are_told() -> None:
    summary, report = found(run_of(2, error="WorkerLost: gone"))
    assert f"{PD}: 2 requests failed, first with WorkerLost: gone" in summary["failed"]
    assert told(report.caveats, "fewer than 6")


def test_a_run_against_a_service(tmp_path: Path, tcp_service: LocalCluster) -> None:
    given = {"model": "tiny", "prompt_len": 64, "decoding": 2, "rate": 4.0, "arrive_s": 0.5, "repeats": 2}
    experiment = Interference(InterferenceOptions.choose(given))
    summary, folder, progress = measured(experiment, tmp_path, tcp_service.target)
    assert [cell.name for cell in progress.cells] == [
        CALIBRATION,
        "chunks-as-configured/pass-1",
        "chunks-as-configured/pass-2",
    ]
    arms = summary["arms"]
    assert list(arms) == ["colocated", PD, ALONE_BUSY, ALONE_IDLE]
    assert all(arm["windows"] == 2 and arm["itl_ms"]["n"] > 0 for arm in arms.values())
    assert summary["p99_itl_ratio"] > 0
    rows = RunFolder(folder).load().rows
    long = [row for row in rows if row.kind == LONG]
    assert {row.arm: row.mode for row in long} == {"colocated": "colocated", PD: "pd", ALONE_BUSY: "pd"}
    assert {row.arm: bool(row.kv_bytes) for row in long} == {"colocated": False, PD: True, ALONE_BUSY: False}
    assert {row.arm: row.prefill_worker for row in long if row.arm == ALONE_BUSY} == {ALONE_BUSY: "prefill-0"}
    assert all(row.finish_reason in (CANCELLED, "length") for row in rows if row.kind == DECODING)


def test_a_service_that_cannot_disaggregate_is_refused() -> None:
    status = ServiceStatus.from_proto(pb.GetStatusResponse(workers=[pb.WorkerStatus(role="prefill", state="ready")]))
    with pytest.raises(InvalidRequest, match="no linked pair"):
        Interference(InterferenceOptions.choose({"chunk_sizes": (64, 128)})).cells(status)
