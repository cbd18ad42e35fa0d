"""The profile: its cases, its figures on data made by hand, and a run that a plan can use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from experiments.engine_alone.steps import StepCase
from experiments.plan import Planner
from experiments.planned_site import Change, PlannerOptions
from experiments.profile import Profile, ProfileOptions, draw_cases
from experiments.run_folder import FinishedCell, RequestRow, RunData
from experiments.served_steps import served_cases, unshared_salt
from pdserve import Client
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest
from simulator.planning.profile import Profiled
from simulator.planning.step_time import MeasuredSteps, StepShape
from tests.experiments.quiet import judged, measured
from tests.local_cluster import LocalCluster

PLANTED = MeasuredSteps((0.01, 0.011, 0.012, 0.02, 0.04, 0.1, 0.4), 1e-4, 1e-7, 1e-6)


def steps_cell(count: int = 60) -> FinishedCell:
    """Steps that take what was planted."""
    steps = [
        {
            **msgspec.structs.asdict(case),
            "times_s": [PLANTED.seconds(StepShape.plain(case.batch, case.tokens, case.context, case.beside))] * 2,
        }
        for case in draw_cases(count, 0)
    ]
    return FinishedCell("steps", {}, 1.0, {"steps": steps, "device": "cpu", "dtype": "bfloat16", "chunk": 512})


def row(arm: str, kind: str, cell: str = "served") -> RequestRow:
    ttft = {"network": 2.0, "gateway": 1.0, "route": 0.5, "dispatch": 3.0, "prefill_queue": 0.25, "prefill": 50.0}
    decode = {**ttft, "kv_exposed": 4.0, "decode_queue": 1.0, "first_decode": 10.0}
    return RequestRow(
        cell=cell, arm=arm, repeat=0, index=0, kind=kind, itl_ms=(3.0, 2.7, 3.3),
        stages_ms={"ttft": ttft, "ttft_decode": decode},
    )  # fmt: skip


def whole_run() -> RunData:
    rows = [row(arm, kind) for arm in ("pd", "colocated") for kind in ("64", "512")]
    served = FinishedCell("served", {}, 1.0, {"links": [{"ceiling_gbs": 2.0}], "block_size": 64, "pool_tokens": 640})
    between = FinishedCell("between", {}, 1.0, {"alone_s": 0.002})
    return RunData("profile", {}, {}, (steps_cell(), between, served), (*rows, row("colocated", "64", "between")))


def test_figures() -> None:
    summary, report = judged(Profile, whole_run())
    assert summary["steps"]["error"] < 0.01
    assert summary["link"] == {"bytes_per_s": 2e9, "latency_s": 0.0}
    assert summary["overheads"] == pytest.approx(
        {"arrive_s": 0.0025, "dispatch_s": 0.00175, "answer_s": 0.0025, "announce_s": 0.0015, "handoff_s": 0.005,
         "between_s": 0.001}
    )  # fmt: skip
    spread = summary["spread"]
    assert (min(spread), max(spread), sum(spread) / len(spread)) == pytest.approx((0.9, 1.1, 1.0))
    assert "6.8 ms to the time to first token" in report.answer
    assert sum(case["held_out"] for case in summary["cases"]) == 20


def test_cases_are_of_all_kinds() -> None:
    cases = draw_cases(60, 1)
    assert {case.kind for case in cases} == {"prompt", "prefill", "decode", "mixed"}
    assert all(case.rows + case.beside <= 512 for case in cases)
    assert cases == draw_cases(60, 1)
    assert all(isinstance(case, StepCase) for case in cases)


def test_figures_of_a_service_of_other_engines() -> None:
    """Whose links have no measured rate, and whose stages are those that one sees from outside."""
    rows = []
    for tokens, leg_ms in ((64, 20.0), (1024, 36.0)):
        ttft = {"network": 2.0, "gateway": 1.0, "route": 0.5, "prefill_leg": 50.0}
        decode = {**ttft, "leg_gap": 1.0, "decode_leg": leg_ms, "first_decode": 10.0}
        stages = {"ttft": ttft, "ttft_decode": decode}
        rows.append(
            RequestRow(cell="served", arm="pd", repeat=0, index=0, kind=str(tokens), stages_ms=stages,
                       kv_bytes_expected=tokens * 1000)
        )  # fmt: skip
    steps = steps_cell()
    steps.facts["by_requests"] = True
    served = FinishedCell("served", {}, 1.0, {"links": [], "block_size": 64, "pool_tokens": 640})
    summary, report = judged(Profile, RunData("profile", {}, {}, (steps, served), tuple(rows)))
    assert summary["link"]["bytes_per_s"] == pytest.approx(960_000 / 0.016)
    assert summary["overheads"] == pytest.approx(
        {"arrive_s": 0.0025, "dispatch_s": 0.0, "answer_s": 0.001, "announce_s": 0.0, "handoff_s": 0.021,
         "between_s": 0.0}
    )  # fmt: skip
    assert "21.0 ms to a hand-off of one block." in report.answer
    assert any("No step with parts of prompts and decodes was measured" in each for each in report.caveats if each)


def test_cases_for_a_running_service_fit_it() -> None:
    for room in (200, 1000, 100_000):
        cases = list(served_cases(40, 2, room))
        assert {case.kind for case in cases} == {"prompt", "decode"}
        assert all(case.batch * (case.context + case.tokens) <= room for case in cases)


def test_what_of_a_running_service_is_refused(tcp_service: LocalCluster) -> None:
    with Client(tcp_service.target) as client:
        status = client.status()
    with pytest.raises(InvalidRequest, match="--model: dummy:135m has a vocabulary of"):
        Profile(ProfileOptions.choose({})).cells(status)
    prefill = next(worker for worker in status.workers if worker.role == "prefill")
    more = replace(status, workers=(*status.workers, prefill))
    with pytest.raises(InvalidRequest, match="one prefill and one decode worker, and not 2P1D"):
        Profile(ProfileOptions.choose({"model": "tiny"})).cells(more)


def test_a_running_service_is_measured_by_requests(tmp_path: Path, tcp_service: LocalCluster) -> None:
    given = {"model": "tiny", "steps": 36, "repeats": 1, "requests": 3, "step_tokens": 256}
    summary, path, _ = measured(Profile(ProfileOptions.choose(given)), tmp_path, tcp_service.target)
    rows = [json.loads(line) for line in (path / "requests.jsonl").read_text().splitlines()]
    assert {row["prefill_cached_tokens"] for row in rows} == {0}
    assert unshared_salt() != unshared_salt(), "another run finds nothing cached either"
    assert summary["by_requests"]
    assert {case["kind"] for case in summary["cases"]} == {"prompt", "decode"}
    assert all(case["measured_ms"] > 0 for case in summary["cases"])
    profiled = Profiled.read(path, "PROFILE")
    assert (profiled.chunk, profiled.model, profiled.overheads.between_s) == (256, "tiny", 0.0)
    assert profiled.device == "cpu"


@pytest.mark.timeout(240)
@pytest.mark.ray
@pytest.mark.cluster
def test_a_run_that_a_plan_can_use(tmp_path: Path) -> None:
    options = ProfileOptions.choose({"model": "tiny", "steps": 36, "repeats": 1, "requests": 3})
    summary, path, _ = measured(Profile(options), tmp_path)
    assert summary["overheads"]["arrive_s"] > 0
    profiled = Profiled.read(path, "PROFILE")
    assert profiled.model == "tiny"
    assert profiled.pool_tokens > 1000

    given = {"model": "tiny", "device": str(path), "devices": 2, "requests": 20, "duration_s": 0.1,
             "input_len": "16:64", "output_len": "2:8", "slo": "ttft=1000,itl=500"}  # fmt: skip
    plan = Planner(PlannerOptions.choose(given))
    plan.configure(PdserveConfig())
    service = plan.site.service(plan.site.candidates()[-1], Change())
    assert service.overheads == profiled.overheads
    other = Planner(PlannerOptions.choose({**given, "model": "dummy:135m"}))
    other.configure(PdserveConfig())
    with pytest.raises(InvalidRequest, match="is of tiny"):
        other.cells(None)
