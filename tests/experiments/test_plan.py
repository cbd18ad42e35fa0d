"""The plan: its candidates, its search, its words on data made by hand, and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.modes import SLO
from experiments.plan import Planner
from experiments.planned_site import Candidate, Change, PlannerOptions
from experiments.run_folder import FinishedCell, RunData
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.worker import Role
from simulator.planning.step_time import StepShape
from tests.experiments.quiet import judged, measured

SMALL = {
    "input_len": "64:256",
    "output_len": "4:16",
    "requests": 20,
    "duration_s": 0.02,
    "devices": 2,
    "slo": "ttft=100,itl=30",
}


def planned(**given: Any) -> Planner:
    """A plan with the usual configuration."""
    plan = Planner(PlannerOptions.choose({**SMALL, **given}))
    plan.configure(PdserveConfig())
    return plan


def cell(candidate: Candidate, rate: float, bound: str = "ITL; decode workers 90% busy") -> FinishedCell:
    """A finished cell of a candidate that sustains ``rate``."""
    point = {
        "rate": rate,
        "attainment": 0.95,
        "ttft_ms": {"mean": 10.0, "p50": 9.0, "p99": 20.0},
        "itl_ms": {"mean": 10.0, "p50": 9.0, "p99": 20.0},
        "exposed_ms": None,
        "link": 0.1,
    }
    devices = sum(candidate.devices)
    facts = {
        "mode": candidate.mode,
        "rate": rate,
        "per_device": rate / devices,
        "per_cost": rate / devices,
        "at_rate": point,
        "binds": bound,
        "points": [point, {**point, "rate": 2 * rate, "attainment": 0.3}],
    }
    return FinishedCell(candidate.name, candidate.parameters, 1.0, facts)


PAIR, ALONE = Candidate("pd", 3, 1, (1, 1)), Candidate("colocated", 0, 4, (1, 1))


def run_of(pair: float, alone: float, changes: list[dict[str, Any]] | None = None) -> RunData:
    """A run in which the two candidates sustain these rates."""
    facts = {"slo": "ttft=100,itl=30", "devices": [{"text": "a device", "caveat": "Not measured."}], "workload": "some"}
    cells = [FinishedCell("idle", {}, 1.0, facts), cell(ALONE, alone), cell(PAIR, pair)]
    if changes is not None:
        cells.append(FinishedCell("changes", {}, 1.0, {"changes": changes}))
    return RunData("plan", {}, {}, tuple(cells), ())


@pytest.mark.parametrize(
    ("pair", "alone", "told"),
    [
        (8.0, 4.0, "Disaggregate: 3P1D serves 2 requests/s per device"),
        (2.0, 4.0, "Do not disaggregate: 4 colocated serves 1 requests/s per device"),
        (4.0, 4.05, "It makes no difference"),
        (4.0, 0.0, "which colocated workers do not serve at all"),
        (0.0, 0.0, "No candidate serves a request within TTFT ≤ 100 ms"),
    ],
)
def test_the_answer(pair: float, alone: float, told: str) -> None:
    summary, report = judged(Planner, run_of(pair, alone))
    assert told in report.answer
    assert summary["best"] == (None if not pair else "3P1D" if pair > alone else "4 colocated")
    assert (summary["best_pd"], summary["best_colocated"]) == ("3P1D", "4 colocated")


def test_what_would_change_the_answer() -> None:
    changes = [
        {"change": "links carry half as much", "pd": 0.5, "colocated": 1.0},
        {"change": "prompts are twice as long", "pd": 2.0, "colocated": 1.0},
    ]
    _, report = judged(Planner, run_of(8.0, 4.0, changes))
    assert "This would change if links carry half as much." in report.answer


def test_candidates_are_all_splits_of_the_devices() -> None:
    names = [each.name for each in planned(devices=4).site.candidates()]
    assert names == ["4 colocated", "4 colocated budget 512", "1P3D", "2P2D", "3P1D"]
    assert [each.name for each in planned(devices=4, splits="3P1D").site.candidates()][2:] == ["3P1D"]
    unlike = planned(devices=8, tensor_parallel="1,2").site.candidates()
    assert all(sum(each.devices) <= 8 for each in unlike)
    assert "4P2D TP 1+2" in [each.name for each in unlike]
    assert len(planned(devices=400).site.candidates()) <= 32


def test_a_model_gets_as_many_devices_as_hold_it() -> None:
    assert planned(devices=8, tensor_parallel="3").site.candidates()[-1].name == "1P1D TP 3+3"
    candidates = planned(device="flops=1e14,bandwidth=1e12,memory=12e9,link=1e11,nic=1e10", devices=8).site.candidates()
    assert {each.tensor_parallel for each in candidates} == {(2, 2)}


def test_a_rate_that_no_service_bears_is_not_sustained() -> None:
    """Even if the SLO allows any time."""
    plan = planned(slo="e2e=1e9", requests=400)
    facts = plan._search(plan.site.candidates()[0], Change(), SLO({"e2e": 1e9}), lambda steps: None)
    assert 1 < facts["rate"] < 2000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "h300"}, "device: 'h300' is none of"),
        ({"device": "flops=1e14,bandwidth=1e12,memory=1e3,link=1e11,nic=1e10"}, "do not hold the weights"),
        ({"tensor_parallel": "1", "device": "lpu"}, "do not hold the weights"),
        ({"tensor_parallel": "0"}, "--tensor-parallel: 0 is no number"),
        ({"splits": "P1"}, "--splits"),
        ({"wan": "fast"}, "--wan"),
        ({"devices": 2, "tensor_parallel": "2"}, "too few"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    plan = planned(**given)
    with pytest.raises(InvalidRequest, match=message):
        plan.site.service(plan.site.candidates()[-1], Change())


def test_a_run_that_writes_a_configuration(tmp_path: Path) -> None:
    target = tmp_path / "best.yaml"
    options = PlannerOptions.choose({**SMALL, "splits": "1P1D", "apply": str(target)})
    summary, path, progress = measured(Planner(options), tmp_path)
    assert [each.name for each in progress.cells] == [
        "idle",
        "2 colocated",
        "2 colocated budget 512",
        "1P1D",
        "changes",
    ]
    rows = {row["name"]: row for row in summary["candidates"]}
    assert all(row["rate"] > 0 for row in rows.values())
    assert len(summary["changes"]) == 15
    written = PdserveConfig.load(target, {})
    assert (written.cluster.prefill, written.cluster.decode) == ((1, 1) if summary["best"] == "1P1D" else (0, 2))
    assert yaml.safe_load(target.read_text())["model"]["path"] == "dummy:8b"
    assert (path / "plan.png").stat().st_size > 10_000


def test_coded_kv_is_smaller_between_hosts() -> None:
    plan = planned(wan="8:20", devices=4)
    pair = plan.site.candidates()[-1]
    plain, coded = (plan.site.service(pair, change) for change in (Change(), Change("coded", coded=True)))
    assert plain.shared is not None
    assert coded.shared is not None
    assert coded.shared.bytes_per_s / plain.shared.bytes_per_s == pytest.approx(4 / 3)
    assert coded.shared.most_bytes_per_s < plain.shared.most_bytes_per_s, "a worker codes so fast at most"
    assert coded.within == plain.within


@pytest.mark.parametrize("role", Role)
def test_a_worker_that_is_slow_or_lost(role: Role) -> None:
    plan = planned(devices=4)
    for pair in plan.site.candidates():
        of = Role.DECODE if pair.mode == "colocated" else role
        plain, slow, lost = (
            plan.site.service(pair, change).workers
            for change in (Change(), Change("slow", slow=role), Change("lost", lost=role))
        )
        others = [worker for worker in plain if worker.worker_id != f"{of}-0"]
        assert list(lost) == others
        assert [worker for worker in slow if worker.worker_id != f"{of}-0"] == others
        step = StepShape.plain(1, 64, 0)
        (one,), (its,) = ([w.steps for w in workers if w.worker_id == f"{of}-0"] for workers in (plain, slow))
        assert its.seconds(step) == 2.0 * one.seconds(step)


@pytest.mark.parametrize("role", Role)
def test_the_other_role_serves_alone_without_workers_of_one(role: Role) -> None:
    plan, limits = planned(splits="1P1D"), SLO({"ttft": 1000.0, "itl": 1000.0})
    pair = plan.site.candidates()[-1]
    whole, half = (plan._search(pair, change, limits, lambda steps: None) for change in (Change(), Change(lost=role)))
    assert whole["at_rate"]["exposed_ms"]["mean"] > 0
    assert half["rate"] > 0
    assert half["at_rate"]["exposed_ms"] is None


def test_a_thin_link_makes_disaggregation_lose() -> None:
    plan, slo = planned(wan="0.5:20", slo="ttft_decode=200,itl=60"), SLO({"ttft_decode": 200.0, "itl": 60.0})
    alone, *_, pair = (plan._search(each, Change(), slo, lambda steps: None) for each in plan.site.candidates())
    assert (alone["mode"], pair["mode"]) == ("colocated", "pd")
    assert pair["rate"] == 0.0  # not even one at a time
    assert alone["rate"] > 1.0
    assert pair["binds"].startswith("TTFT_DECODE")


def test_a_load_that_only_queues_binds_by_its_queue() -> None:
    plan = planned(splits="1P1D")
    limits = SLO({"ttft": 1e6})
    found = plan._search(plan.site.candidates()[-1], Change(), limits, lambda steps: None)
    assert found["points"][-1]["attainment"] == 1.0
    assert found["binds"].startswith("a growing queue; decode workers ")
