"""The plan of a benchmark, its SLO, its statistics, and its report."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from experiments.bench_plan import BenchPlan, fitted, interleaved, parse_percentiles, run_bench
from experiments.bench_report import distribution, report_of
from experiments.load import Load, Outcome
from experiments.modes import SLO
from experiments.run_folder import RequestRow
from experiments.workloads.arrivals import ClosedLoop
from experiments.workloads.conversation import Room
from experiments.workloads.synthetic import Fixed, Lognormal, Synthetic
from ops.settled import leaked_blocks, settled
from pdserve import AsyncClient, ServiceStatus, ServiceWorker
from pdserve.client.generation import Generation
from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady, WorkerLost
from pdserve.core.request import Mode
from pdserve.pb import inference_pb2 as pb
from tests.experiments.quiet import holds
from tests.ops.made_up import made_up
from tests.pdserve.scripted_service import ScriptedService

RANDOM = Synthetic(Fixed(20), Fixed(3))
STATUS = ServiceStatus.from_proto(pb.GetStatusResponse())


def report(results: Sequence[Any], duration_s: float = 1.0, **plan: Any) -> dict[str, Any]:
    outcomes = []
    for index, result in enumerate(results):
        generation, error = (result, None) if isinstance(result, Generation) else (None, result)
        mode = Mode.COLOCATED if index else Mode.PD
        outcomes.append(Outcome(index, 0, mode, 0.0, 0.0, 1.0, 20, generation, error))
    load = Load(outcomes, duration_s, 0, stopped=not outcomes)
    return report_of(BenchPlan.of(RANDOM, **plan), str(plan.get("mode", "pd")), load, STATUS)


def test_distribution() -> None:
    edges = {"mean": 2.5, "std": 1.2909944, "min": 1.0, "max": 4.0, "p50": 2.5, "p90": 3.7, "p99": 3.97, "count": 4}
    assert distribution([4.0, 1.0, 3.0, 2.0], (50, 90, 99)) == pytest.approx(edges)
    assert distribution([], ()) is None
    single = {"mean": 3.0, "std": 0.0, "min": 3.0, "max": 3.0, "p50": 3.0, "p99.9": 3.0, "count": 1}
    assert distribution([3.0], (50, 99.9)) == single


def test_percentiles_and_objectives_are_parsed() -> None:
    assert parse_percentiles("99,50, 99.9,50") == (50.0, 99.0, 99.9)
    assert SLO.parse("ttft=200, itl=50ms,tpot=0.05s").limits_ms == {"ttft": 200, "itl": 50, "tpot": 50}
    for wrong in ("", "x", "0", "100", "50,", "nan"):
        with pytest.raises(InvalidRequest, match=r"^percentiles: "):
            parse_percentiles(wrong)
    for wrong in ("", "speed=3", "ttft", "ttft=x", "ttft=-1", "ttft=inf"):
        with pytest.raises(InvalidRequest, match=r"^slo: "):
            SLO.parse(wrong)


def test_which_objectives_a_request_meets() -> None:
    row, short = (
        RequestRow.of(generation, None, cell="", arm="", repeat=0, index=0)
        for generation in (made_up(70), made_up(second_token=False))
    )
    assert SLO.parse("ttft=200,ttft_decode=200,e2e=200").met_by(row)
    assert not any(SLO.parse(text).met_by(row) for text in ("ttft=1", "itl=3.5", "e2e=5"))
    assert SLO.parse("itl=1,ttft_decode=1").met_by(short)
    assert row.ttft_ms is not None
    assert SLO.parse(f"ttft={4 * row.ttft_ms},e2e=1e9").factor_for(row) == pytest.approx(0.25)
    failed = RequestRow.of(None, CapacityExceeded("full"), cell="", arm="", repeat=0, index=0)
    assert SLO.parse("ttft=200").factor_for(failed) == math.inf


def test_the_report_counts() -> None:
    pd, colocated = replace(made_up(70), attempts=2), made_up(70, mode="colocated")
    results = [pd, colocated, CapacityExceeded("full")]
    plain = report(results, 2.0, mode="both", requests=2, slo="ttft=200")
    figures = {
        "requests": 3,
        "failed": 1,
        "failures": {"CapacityExceeded": 1},
        "retried": 1,
        "output_tokens_per_s": 3.0,
        "total_tokens_per_s": 73.0,
        "requests_per_s": 1.0,
        "goodput.requests_per_s": 1.0,
        "goodput.share": 2 / 3,
        "itl_ms.count": 4,
        "e2e_ms.max": pd.total_ms,
        "added_ms.ttft_decode.median": 1.5,
        "added_ms.ttft.median": 0.0,
        "added_ms.ttft.lo": None,
        "refused": {"requests": 1, "retry_after_ms": None},
        "partial": False,
        "planned": 4,
        "lag.behind": False,
    }
    holds(plain, figures)
    assert set(plain["by_mode"]) == {"pd", "colocated"}
    holds(report(results), {"added_ms.ttft_decode": None})
    refusals = [CapacityExceeded("full", retry_after_s=0.1), NotReady("none", retry_after_s=0.3), NotReady("none")]
    holds(report([*refusals, WorkerLost("gone")]), {"refused.requests": 3, "refused.retry_after_ms": 200.0})
    nothing = {"partial": True, "planned": 4, "requests": 0, "goodput": {"requests_per_s": 0.0, "share": None},
               "leaked_blocks": None, "lag": None}  # fmt: skip
    holds(report([], 0.0, requests=4, slo="ttft=1"), nothing)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"requests": 0}, "requests"),
        ({"duration": 0.0}, "duration"),
        ({"warmup": -1}, "warmup"),
        ({"mode": "no"}, "mode"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 1, "rate": 1.0}, "concurrency"),
        ({"rate": 1.0, "ramp": "1:2"}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"ramp": "0:0"}, "ramp"),
        ({"burstiness": 1.0}, "burstiness"),
        ({"rate": 1.0, "burstiness": 0.0}, "burstiness"),
        ({"rate": 1.0, "max_concurrency": 0}, "max_concurrency"),
        ({"concurrency": 1, "max_concurrency": 1}, "max_concurrency"),
        ({"speed": 1.0}, "speed"),
        ({"rate": float("inf"), "duration": 1.0}, "requests"),
    ],
)
def test_wrong_plans_are_refused(options: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{named}: "):
        BenchPlan.of(RANDOM, **options)


@pytest.mark.parametrize(
    ("options", "comes_to"),
    [
        ({}, {"schedule": ClosedLoop(8), "planned": 64, "loads": 1, "scheduled": False}),
        ({"duration": 1.0}, {"planned": None}),
        ({"mode": "both", "requests": 5}, {"paired": True, "schedule": ClosedLoop(1), "planned": 10, "loads": 1}),
        (
            {"mode": "both", "requests": 5, "concurrency": 4},
            {"paired": False, "schedule": ClosedLoop(4), "planned": 5, "loads": 2},
        ),
        ({"mode": "both", "rate": 1.0}, {"paired": False}),
        ({"rate": 1.0, "max_concurrency": 2}, {"scheduled": True}),
        ({"rate": float("inf")}, {"scheduled": True}),
        ({"rate": float("inf"), "max_concurrency": 2}, {"scheduled": False}),
    ],
)
def test_what_a_plan_comes_to(options: Any, comes_to: Any) -> None:
    plan = BenchPlan.of(RANDOM, **options)
    assert {name: plan.schedule() if name == "schedule" else getattr(plan, name) for name in comes_to} == comes_to


def test_neither_mode_is_always_first() -> None:
    assert [interleaved(index) for index in range(4)] == [Mode.PD, Mode.COLOCATED, Mode.COLOCATED, Mode.PD]


async def run(service: ScriptedService, plan: BenchPlan) -> list[dict[str, Any]]:
    async with AsyncClient(service.target) as client:
        status = await client.status()
        plan = await fitted(client, plan, status)
        loads = await run_bench(client, plan, status, lambda outcome: None, asyncio.Event())
        return [{**report_of(plan, *load), "load": load[1]} for load in loads]


async def test_pairs_are_sent_one_request_at_a_time(service: ScriptedService) -> None:
    (pairs,) = await run(service, BenchPlan.of(RANDOM, requests=3, mode="both"))
    requests = service.servicer.requests
    modes = [pb.MODE_PD, pb.MODE_COLOCATED, pb.MODE_COLOCATED, pb.MODE_PD, pb.MODE_PD, pb.MODE_COLOCATED]
    assert [request.mode for request in requests] == modes
    prompts = [tuple(request.token_ids.ids) for request in requests]
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 3
    ends = [(outcome.sent_s, outcome.ended_s) for outcome in pairs["load"].outcomes]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
    assert pairs["added_ms"]["ttft"] is not None


@pytest.mark.parametrize("pace", [{"concurrency": 3}, {"rate": 200.0}])
async def test_under_load_each_mode_has_the_service_to_itself(service: ScriptedService, pace: Any) -> None:
    reports = await run(service, BenchPlan.of(RANDOM, requests=6, mode="both", warmup=2, **pace))
    requests = service.servicer.requests
    assert [request.mode for request in requests] == (
        [pb.MODE_PD] * 2 + [pb.MODE_COLOCATED] * 2 + [pb.MODE_PD] * 6 + [pb.MODE_COLOCATED] * 6
    )
    prompts = [tuple(request.token_ids.ids) for request in requests]
    assert set(prompts[4:10]) == set(prompts[10:])
    assert not set(prompts[:4]) & set(prompts[4:]), "the warm-up has prompts of its own"
    assert [(each["mode"], each["requests"], each["partial"]) for each in reports] == [
        ("pd", 6, False),
        ("colocated", 6, False),
    ]
    assert all(each["added_ms"]["ttft"] is None for each in reports)


async def test_a_warm_up_that_fails_is_an_error(service: ScriptedService) -> None:
    service.servicer.refuse_ms = "100"
    with pytest.raises(CapacityExceeded):
        await run(service, BenchPlan.of(RANDOM, requests=3, warmup=1))
    assert len(service.servicer.requests) == 1


async def test_a_load_is_limited_to_what_fits(service: ScriptedService) -> None:
    async with AsyncClient(service.target) as client:
        status = await client.status()
        plan = BenchPlan.of(Synthetic(Lognormal(4.0, 1.0), Fixed(24)))
        limited = (await fitted(client, plan, status)).workload
    assert isinstance(limited, Synthetic)
    assert limited.inputs.longest == 1000
    with pytest.raises(NotReady, match="no worker has registered"):
        Room.of(replace(status, vocab_size=0, context_length=0, block_size=0, workers=()))


def test_the_smallest_worker_that_is_there_bounds_a_request() -> None:
    def worker(state: str, num_blocks: int) -> ServiceWorker:
        return ServiceWorker.from_proto(pb.WorkerStatus(worker_id="w", state=state, num_blocks=num_blocks))

    status = ServiceStatus.from_proto(pb.GetStatusResponse(block_size=16))
    assert status.pool_tokens == 0
    workers = (worker("ready", 8), worker("starting", 6), worker("lost", 2), worker("awaited", 0))
    assert replace(status, workers=workers).pool_tokens == 6 * 16
    assert replace(status, workers=workers[2:]).pool_tokens == 2 * 16


async def test_leaked_blocks_waits_for_them_to_come_back(service: ScriptedService) -> None:
    async with AsyncClient(service.target) as client:
        before = await settled(client)
        service.servicer.free_blocks = 60
        timer = threading.Timer(0.3, setattr, (service.servicer, "free_blocks", 64))
        timer.start()
        assert await leaked_blocks(client, before, timeout_s=5) == 0
        timer.join()
        service.servicer.free_blocks = 61
        assert await leaked_blocks(client, before, timeout_s=0.3) == 6
