"""Batching: cost model, simulated pools, summary and report on data made by hand, and runs of each part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.scheduling.scheduler import SchedulerConfig
from experiments.batching import CAPACITY, CONTINUOUS, STATIC, STEPS, Batching, BatchingOptions, _capacity
from experiments.engine_alone.program import Rates, Sample, Task, measure_alone
from experiments.engine_alone.steps import StepCase
from experiments.experiment import Bench, Cell
from experiments.load import Load, Outcome
from experiments.run_folder import FinishedCell, RequestRow, RunData
from experiments.simulated_pool import ARRIVALS, AT_ONCE, POOL, POOL_KINDS, CostModel, PoolLoad, simulate
from pdserve.core.errors import NotReady
from pdserve.core.request import Mode
from tests.experiments.quiet import measured
from tests.local_cluster import local_cluster

COST = CostModel(step=10.0, decode_token=0.5, decode_context=0.001, prompt_token=0.25, prompt_pair=0.0005)
CASES = [StepCase(batch, 1, context) for batch in (1, 4, 16) for context in (64, 1024)]
CASES += [StepCase(batch, tokens, start) for batch in (1, 4) for tokens in (64, 256) for start in (0, 512)]
LOAD = PoolLoad(requests=40, prompt_lens=(16, 128), output_mean=24.0, max_tokens=128)
CONFIG = SchedulerConfig(256, 16, 512, 16, 64, eos_token_ids=(1,))


def step_ms(case: StepCase) -> float:
    if case.kind == "decode":
        return COST.step + case.rows * COST.decode_token + case.pairs * COST.decode_context
    return COST.step + case.rows * COST.prompt_token + case.pairs * COST.prompt_pair


def experiment(**options: Any) -> Batching:
    return Batching(BatchingOptions.choose({"decode_batches": (1, 4), "prefill_batches": (1, 4), "pool_seeds": 2,
                                            "prefill_tokens": 64, "context": 64, **options}))  # fmt: skip


def steps_cell(rounds: int = 5) -> FinishedCell:
    cases = dict.fromkeys([*CASES, StepCase(1, 64, 0), StepCase(4, 64, 0)])
    steps = [
        {"batch": case.batch, "tokens": case.tokens, "context": case.context, "step_ms": [step_ms(case)] * rounds}
        for case in cases
    ]
    return FinishedCell(STEPS, {}, 1.0, {"steps": steps, "device": "cpu", "dtype": "bfloat16", "core": 0})


def service_cells(repeats: int = 5) -> tuple[list[FinishedCell], list[RequestRow]]:
    """Continuous: 100 tokens in 1 s; static: in 2 s, and every request takes three times as long."""
    cells, rows = [FinishedCell(CAPACITY, {}, 1.0, {"requests_per_s": 10.0})], []
    for arm, duration_s, e2e_ms in ((CONTINUOUS, 1.0, 100.0), (STATIC, 2.0, 300.0)):
        runs = []
        for repeat in range(repeats):
            for kind in (ARRIVALS, AT_ONCE):
                runs.append({"arm": arm, "kind": kind, "repeat": repeat, "duration_s": duration_s})
                rows.append(RequestRow(cell=f"{arm}/pass-1", arm=arm, repeat=repeat, index=0, kind=kind,
                                       scheduled_s=1.0, sent_s=1.005, ttft_ms=50.0, e2e_ms=e2e_ms, output_tokens=100,
                                       itl_ms=(10.0, 20.0)))  # fmt: skip
        cells.append(FinishedCell(f"{arm}/pass-1", {"batching": arm}, 1.0, {"runs": runs, "rate": 6.0}))
    return cells, rows


def test_the_cost_model_is_recovered_from_steps_that_follow_it() -> None:
    measured = [(case, step_ms(case)) for case in CASES]
    model = CostModel.fit(measured)
    assert model.step == pytest.approx(COST.step)
    assert model.decode_context == pytest.approx(COST.decode_context)
    assert model.prompt_pair == pytest.approx(COST.prompt_pair)
    assert max(abs(error) for error in model.errors(measured)) < 1e-9


def test_no_cost_is_negative() -> None:
    model = CostModel.fit([(case, 10.0 - 0.001 * case.pairs) for case in CASES if case.kind == "decode"])
    assert model.decode_context == 0.0
    assert model.step > 0


def test_pools_serve_the_same_tokens_and_paging_holds_more_requests() -> None:
    results = {kind: simulate(kind, CONFIG, COST, LOAD, None, seed=3) for kind in POOL_KINDS}
    lengths = LOAD.lengths(3)
    for rows, facts in results.values():
        assert [(each.prompt_tokens, each.output_tokens) for each in rows] == lengths
        assert all(0 < (each.ttft_ms or 0) <= (each.e2e_ms or 0) for each in rows)
        assert 0 < facts["live"] <= facts["reserved"] <= 1
        assert facts["timeline"][0][0] == 0.0
    paged, run, context = (results[kind][1] for kind in POOL_KINDS)
    for figure in ("running", "live"):
        assert paged[figure] > run[figure] > context[figure]
    assert run["preemptions"] == context["preemptions"] == 0
    assert paged["scattered"] == 0


def test_equal_seeds_give_equal_simulations_and_arrivals_are_kept() -> None:
    first, again = (simulate("paged", CONFIG, COST, LOAD, 5.0, seed=1) for _ in range(2))
    assert first == again
    arrivals_s = [each.scheduled_s for each in first[0]]
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[-1] > 0
    assert first != simulate("paged", CONFIG, COST, LOAD, 5.0, seed=2)


def test_the_pool_cell_is_simulated_from_the_measured_steps(tmp_path: Path) -> None:
    meter = experiment()
    rows: list[RequestRow] = []
    steps = 0

    def advance(by: int) -> None:
        nonlocal steps
        steps += by

    cell = Cell(POOL, {}, None)
    bench = Bench(cell, "", rows.append, advance, earlier={STEPS: steps_cell().facts})
    bench.run(meter.measure)
    assert steps == 2 * len(POOL_KINDS)
    assert {(row.arm, row.kind, row.repeat) for row in rows} == {
        (kind, part, seed) for kind in POOL_KINDS for part in (ARRIVALS, AT_ONCE) for seed in (0, 1)
    }
    assert {row.mode for row in rows} == {"simulated"}

    cells, service_rows = service_cells()
    pool = FinishedCell(POOL, {}, 1.0, bench.facts)
    run = RunData("batching", {}, {}, (steps_cell(), pool, *cells), (*rows, *service_rows))
    summary = meter.summarise(run)
    assert list(summary["pools"]) == list(POOL_KINDS)
    assert summary["pool_is_simulated"] is True
    paged = summary["pools"]["paged"]
    of_seed = [each for each in bench.facts["pools"] if (each["pool"], each["kind"]) == ("paged", AT_ONCE)]
    tokens = [sum(r.output_tokens for r in rows if (r.arm, r.kind, r.repeat) == ("paged", AT_ONCE, s)) for s in (0, 1)]
    rates = [count / each["duration_s"] for count, each in zip(tokens, of_seed, strict=True)]
    assert paged["output_tokens_per_s"]["mean"] == pytest.approx(sum(rates) / 2, abs=1e-5)
    assert paged["running"]["mean"] == pytest.approx(sum(each["running"] for each in of_seed) / 2, abs=1e-5)
    report = meter.report(run, summary)
    page = report.save(tmp_path).read_text(encoding="utf-8")
    assert "simulat" in page
    assert {path.stem for path in tmp_path.glob("*.png")} == {"sweeps", "joining", "pool_over_time", "pools"}


def test_sweeps_and_services_have_their_figures() -> None:
    cells, rows = service_cells()
    summary = experiment().summarise(RunData("batching", {}, {}, (steps_cell(), *cells), tuple(rows)))
    assert [step["batch"] for step in summary["decode_steps"]] == [1, 4]
    four = summary["decode_steps"][1]
    assert four["step_ms"]["mean"] == pytest.approx(step_ms(StepCase(4, 1, 64)), abs=1e-5)
    assert four["tokens_per_s"]["mean"] == pytest.approx(4e3 / step_ms(StepCase(4, 1, 64)), abs=1e-5)
    assert summary["prefill_steps"][1]["tokens"] == 256
    assert summary["cost_model"]["median_error"] == 0
    continuous, static = summary["batching"][CONTINUOUS], summary["batching"][STATIC]
    assert continuous["output_tokens_per_s"]["mean"] == pytest.approx(100.0)
    assert static["output_tokens_per_s"]["mean"] == pytest.approx(50.0)
    assert continuous["e2e_ms"]["mean"] == pytest.approx(105.0)  # 5 ms late
    assert continuous["ttft_ms"]["p99"] == pytest.approx(55.0)
    assert continuous["itl_ms"]["p50"] == 15.0
    assert continuous["late_ms"] == pytest.approx(5.0)
    assert summary["static_over_continuous"] == pytest.approx(
        {"output_tokens_per_s": 0.5, "e2e_mean": 305 / 105, "e2e_p99": 305 / 105}, abs=1e-4
    )
    assert summary["rate_per_s"] == 6.0
    assert summary["pools"] == {}
    assert summary["failed"] == []


def test_requests_that_failed_are_no_capacity() -> None:
    def outcome(index: int, ended_s: float, error: NotReady | None) -> Outcome:
        return Outcome(index, 0, Mode.COLOCATED, 0.0, 0.0, ended_s, 20, None, error)

    served = [outcome(index, 2.0, None) for index in range(6)]
    failed = [outcome(6 + index, 9.0, NotReady("gone")) for index in range(4)]
    facts = _capacity(Load([*served, *failed], 9.0))
    assert facts == {"requests_per_s": 3.0, "failed": 4}
    with pytest.raises(NotReady, match="gone"):
        _capacity(Load(failed, 9.0))

    cells, rows = service_cells()
    cells[0] = FinishedCell(CAPACITY, {}, 1.0, facts)
    summary = experiment().summarise(RunData("batching", {}, {}, tuple(cells), tuple(rows)))
    assert summary["failed"] == ["capacity: 4 requests failed"]


def test_an_arm_of_which_everything_failed_has_no_ratio(tmp_path: Path) -> None:
    cells, rows = service_cells()
    failing = [
        RequestRow(
            cell=row.cell, arm=row.arm, repeat=row.repeat, index=row.index, kind=row.kind, error="NotReady: gone"
        )
        if row.arm == STATIC
        else row
        for row in rows
    ]
    run = RunData("batching", {}, {}, (steps_cell(), *cells), tuple(failing))
    summary = experiment().summarise(run)
    assert summary["static_over_continuous"] is None
    assert summary["failed"]
    experiment().report(run, summary).save(tmp_path)


def test_cells_need_no_service_for_steps_and_pools_and_services_go_there_and_back() -> None:
    cells = experiment(repeats=2).cells(None)
    assert [cell.name for cell in cells[:3]] == [STEPS, POOL, CAPACITY]
    assert cells[0].service is cells[1].service is None
    assert [(cell.service or {})["engine.batching"] for cell in cells[2:]] == [
        CONTINUOUS, CONTINUOUS, STATIC, STATIC, CONTINUOUS,
    ]  # fmt: skip


async def test_steps_are_measured_in_a_process_of_their_own() -> None:
    cases = (StepCase(1, 1, 16), StepCase(3, 1, 70), StepCase(2, 32, 0), StepCase(1, 32, 64))
    core = min(os.sched_getaffinity(0))
    task = Task(model="tiny", device="cpu", core=core, repeats=2, seed=0, cases=cases)
    messages: list[Rates | Sample] = []
    built = await measure_alone(task, messages.append)
    assert built.core == core
    times = [message for message in messages if isinstance(message, Sample)]
    assert [each.repeat for each in times] == [-1, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert [each.values["case"] for each in times] == [3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0]
    assert all(each.values["time_s"] > 0 for each in times)


def test_the_steps_cell_has_every_round_of_every_step() -> None:
    meter = experiment(model="tiny", rounds=2)
    (cell,) = (cell for cell in meter.cells(None) if cell.name == STEPS)
    advanced: list[int] = []
    bench = Bench(cell, "", lambda row: None, advanced.append)
    bench.run(meter.measure)
    assert all(len(step["step_ms"]) == 2 for step in bench.facts["steps"])
    assert sum(advanced) == cell.work == 3 * len(bench.facts["steps"])  # with the warm-up
    assert bench.facts["device"] == "cpu"


def test_a_run_against_a_service(tmp_path: Path) -> None:
    options = BatchingOptions.choose({"model": "tiny", "requests": 6, "output_median": 3, "repeats": 2})
    with local_cluster({"model": {"path": "tiny"}, "engine": {"batching": "static"}}, decode=0) as cluster:
        summary, _, progress = measured(Batching(options), tmp_path, cluster.target)
    assert [cell.name for cell in progress.cells] == [CAPACITY, "as-configured/pass-1", "as-configured/pass-2"]
    arm = summary["batching"]["as-configured"]
    assert arm["repeats"] == 2
    assert arm["e2e_ms"]["n"] == 12
    assert arm["output_tokens_per_s"]["mean"] > 0
