"""Batching: cost model, simulated pools, summary and report on data made by hand, and runs of each part."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.scheduling.scheduler import SchedulerConfig
from experiments.batching import CAPACITY, CONTINUOUS, STATIC, STEPS, Batching, BatchingOptions, _capacity
from experiments.engine_alone.program import Rates, Sample, Task, measure_alone
from experiments.engine_alone.steps import StepCase
from experiments.experiment import Bench, Cell
from experiments.load import Load, Outcome
from experiments.report.page import Report
from experiments.run_folder import FinishedCell, RequestRow, RunData
from experiments.simulated_pool import ARRIVALS, AT_ONCE, POOL, POOL_KINDS, CostModel, PoolLoad, simulate
from pdserve.core.errors import NotReady
from pdserve.core.request import Mode
from tests.experiments.quiet import holds, judged, measured, told
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


OPTIONS = {"decode_batches": (1, 4), "prefill_batches": (1, 4), "pool_seeds": 2, "prefill_tokens": 64, "context": 64}


def experiment(**options: Any) -> Batching:
    return Batching(BatchingOptions.choose({**OPTIONS, **options}))


def found(*cells: FinishedCell, rows: Sequence[RequestRow]) -> tuple[dict[str, Any], Report]:
    return judged(Batching, RunData("batching", {}, {}, cells, tuple(rows)), **OPTIONS)


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
    rows: list[RequestRow] = []
    steps: list[int] = []
    bench = Bench(Cell(POOL, {}, None), "", rows.append, steps.append, earlier={STEPS: steps_cell().facts})
    bench.run(experiment().measure)
    assert sum(steps) == 2 * len(POOL_KINDS)
    kinds = itertools.product(POOL_KINDS, (ARRIVALS, AT_ONCE), (0, 1), ("simulated",))
    assert {(row.arm, row.kind, row.repeat, row.mode) for row in rows} == set(kinds)

    cells, service_rows = service_cells()
    summary, report = found(steps_cell(), FinishedCell(POOL, {}, 1.0, bench.facts), *cells, rows=[*rows, *service_rows])
    assert list(summary["pools"]) == list(POOL_KINDS)
    assert summary["pool_is_simulated"] is True
    of_seed = [each for each in bench.facts["pools"] if (each["pool"], each["kind"]) == ("paged", AT_ONCE)]
    tokens = [sum(r.output_tokens for r in rows if (r.arm, r.kind, r.repeat) == ("paged", AT_ONCE, s)) for s in (0, 1)]
    rates = [count / each["duration_s"] for count, each in zip(tokens, of_seed, strict=True)]
    running = sum(each["running"] for each in of_seed) / 2
    holds(summary["pools"]["paged"], {"output_tokens_per_s.mean": sum(rates) / 2, "running.mean": running}, abs=1e-5)
    page = report.save(tmp_path).read_text(encoding="utf-8")
    assert told([page], "simulat", "Steps over the batch size")
    assert {path.stem for path in tmp_path.glob("*.png")} == {"joining", "pool_over_time", "pools"}


def test_sweeps_and_services_have_their_figures() -> None:
    cells, rows = service_cells()
    summary, _ = found(steps_cell(), *cells, rows=rows)
    four_ms = step_ms(StepCase(4, 1, 64))
    figures = {
        "decode_steps.0.batch": 1,
        "decode_steps.1.batch": 4,
        "decode_steps.1.step_ms.mean": four_ms,
        "decode_steps.1.tokens_per_s.mean": 4e3 / four_ms,
        "prefill_steps.1.tokens": 256,
        "cost_model.median_error": 0.0,
        "batching.continuous.output_tokens_per_s.mean": 100.0,
        "batching.static.output_tokens_per_s.mean": 50.0,
        "batching.continuous.e2e_ms.mean": 105.0,  # 5 ms late
        "batching.continuous.ttft_ms.p99": 55.0,
        "batching.continuous.itl_ms.p50": 15.0,
        "batching.continuous.late_ms": 5.0,
        "static_over_continuous.output_tokens_per_s": 0.5,
        "static_over_continuous.e2e_mean": 305 / 105,
        "static_over_continuous.e2e_p99": 305 / 105,
        "rate_per_s": 6.0,
        "pools": {},
        "failed": [],
    }
    holds(summary, figures, abs=1e-4)


def test_requests_that_failed_are_no_capacity() -> None:
    served, failed = (
        [Outcome(index, 0, Mode.COLOCATED, 0.0, 0.0, ended_s, 20, None, error) for index in range(count)]
        for count, ended_s, error in ((6, 2.0, None), (4, 9.0, NotReady("gone")))
    )
    facts = _capacity(Load([*served, *failed], 9.0))
    assert facts == {"requests_per_s": 3.0, "failed": 4}
    with pytest.raises(NotReady, match="gone"):
        _capacity(Load(failed, 9.0))
    cells, rows = service_cells()
    summary, _ = found(FinishedCell(CAPACITY, {}, 1.0, facts), *cells[1:], rows=rows)
    assert summary["failed"] == ["capacity: 4 requests failed"]


def test_an_arm_of_which_everything_failed_has_no_ratio(tmp_path: Path) -> None:
    cells, rows = service_cells()
    lost = {"error": "NotReady: gone", "ttft_ms": None, "e2e_ms": None, "itl_ms": (), "output_tokens": 0}
    failing = [replace(row, **lost) if row.arm == STATIC else row for row in rows]
    summary, report = found(steps_cell(), *cells, rows=failing)
    assert summary["static_over_continuous"] is None
    assert summary["failed"]
    report.save(tmp_path)


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
