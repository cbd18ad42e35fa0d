"""The plan of a benchmark, its SLO, its statistics, and its report."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest

from experiments.bench_plan import BenchPlan, Pace, fitted, interleaved, run_bench
from experiments.bench_report import distribution, parse_percentiles, report_of
from experiments.load import Load, Outcome
from experiments.modes import SLO
from experiments.run_folder import RequestRow
from experiments.workloads.arrivals import ClosedLoop
from experiments.workloads.conversation import Room
from experiments.workloads.synthetic import Fixed, Lognormal, Synthetic
from ops.settled import leaked_blocks, settled
from pdserve import AsyncClient, ServiceStatus, ServiceWorker
from pdserve.client.generation import Generation
from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady, PdserveError, WorkerLost
from pdserve.core.request import Mode
from pdserve.pb import inference_pb2 as pb
from tests.ops.made_up import made_up
from tests.pdserve.scripted_service import ScriptedService

RANDOM = Synthetic(Fixed(20), Fixed(3))


def outcome(index: int, mode: Mode, result: Generation | PdserveError) -> Outcome:
    generation = result if isinstance(result, Generation) else None
    error = result if isinstance(result, PdserveError) else None
    return Outcome(index, 0, mode, 0.0, 0.0, 1.0, 20, generation, error)


STATUS = ServiceStatus.from_proto(pb.GetStatusResponse())


def report(outcomes: list[Outcome], duration_s: float = 1.0, unsent: int = 0, **plan: Any) -> dict[str, Any]:
    load = Load(outcomes, duration_s, unsent, stopped=not outcomes)
    return report_of(BenchPlan(RANDOM, Pace(), **plan), str(plan.get("mode", "pd")), load, STATUS)


def test_distribution() -> None:
    assert distribution([4.0, 1.0, 3.0, 2.0]) == {
        "mean": 2.5, "std": pytest.approx(1.2909944), "min": 1.0, "max": 4.0, "p50": 2.5, "p90": pytest.approx(3.7),
        "p99": pytest.approx(3.97), "count": 4,
    }  # fmt: skip
    assert distribution([]) is None
    single = distribution([3.0], (50, 99.9))
    assert single == {"mean": 3.0, "std": 0.0, "min": 3.0, "max": 3.0, "p50": 3.0, "p99.9": 3.0, "count": 1}


def test_percentiles_are_parsed() -> None:
    assert parse_percentiles("99,50, 99.9,50") == (50.0, 99.0, 99.9)
    for wrong in ("", "x", "0", "100", "50,", "nan"):
        with pytest.raises(InvalidRequest, match=r"^percentiles: "):
            parse_percentiles(wrong)


def test_slo() -> None:
    row = RequestRow.of(made_up(70), None, cell="", arm="", repeat=0, index=0)
    assert SLO.parse("ttft=200, itl=50ms,tpot=0.05s").limits_ms == {"ttft": 200, "itl": 50, "tpot": 50}
    assert SLO.parse("ttft=200,ttft_decode=200,e2e=200").met_by(row)
    assert not any(SLO.parse(text).met_by(row) for text in ("ttft=1", "itl=3.5", "e2e=5"))
    short = RequestRow.of(made_up(second_token=False), None, cell="", arm="", repeat=0, index=0)
    assert SLO.parse("itl=1,ttft_decode=1").met_by(short)
    for wrong in ("", "speed=3", "ttft", "ttft=x", "ttft=-1", "ttft=inf"):
        with pytest.raises(InvalidRequest, match=r"^slo: "):
            SLO.parse(wrong)


def test_the_report_counts() -> None:
    pd, colocated = made_up(70), made_up(70, mode="colocated")
    outcomes = [
        outcome(0, Mode.PD, pd),
        outcome(1, Mode.COLOCATED, colocated),
        outcome(2, Mode.COLOCATED, CapacityExceeded("full")),
    ]
    plain = report(outcomes, 2.0, mode="both", requests=2, slo=SLO.parse("ttft=200"))
    assert (plain["requests"], plain["failed"], plain["failures"]) == (3, 1, {"CapacityExceeded": 1})
    assert plain["output_tokens_per_s"] == 3.0
    assert plain["total_tokens_per_s"] == 73.0
    assert plain["requests_per_s"] == 1.0
    assert plain["goodput"] == {"requests_per_s": 1.0, "share": pytest.approx(2 / 3)}
    assert set(plain["by_mode"]) == {"pd", "colocated"}
    assert plain["itl_ms"]["count"] == 4
    assert plain["e2e_ms"]["max"] == pd.total_ms
    assert plain["added_ms"]["ttft"].items() >= {"median": 0.0, "lo": None, "hi": None, "n": 1}.items()
    assert plain["added_ms"]["ttft_decode"]["median"] == 1.5
    assert report(outcomes)["added_ms"]["ttft_decode"] is None
    assert plain["refused"] == {"requests": 1, "retry_after_ms": None}
    assert (plain["partial"], plain["planned"]) == (False, 4)
    assert plain["lag"]["behind"] is False


def test_the_report_counts_refusals() -> None:
    errors = [
        CapacityExceeded("full", retry_after_s=0.1),
        NotReady("none ready", retry_after_s=0.3),
        NotReady("none ready"),
        WorkerLost("gone"),
    ]
    plain = report([outcome(index, Mode.PD, error) for index, error in enumerate(errors)])
    assert plain["refused"] == {"requests": 3, "retry_after_ms": pytest.approx(200)}


def test_a_report_of_nothing() -> None:
    plain = report([], 0.0, requests=4, slo=SLO.parse("ttft=1"))
    assert (plain["partial"], plain["planned"], plain["requests"]) == (True, 4, 0)
    assert plain["goodput"] == {"requests_per_s": 0.0, "share": None}
    assert (plain["leaked_blocks"], plain["lag"]) == (None, None)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"requests": 0}, "requests"),
        ({"duration_s": 0.0}, "duration"),
        ({"warmup": -1}, "warmup"),
        ({"mode": "no"}, "mode"),
        ({"timeout_s": 0.0}, "timeout"),
        ({"timeout_s": -1.0}, "timeout"),
        ({"timeout_s": float("nan")}, "timeout"),
        ({"pace": Pace(concurrency=0)}, "concurrency"),
        ({"pace": Pace(concurrency=1, rate=1.0)}, "concurrency"),
        ({"pace": Pace(rate=1.0, ramp=(1.0, 2.0))}, "rate"),
        ({"pace": Pace(rate=-1.0)}, "rate"),
        ({"pace": Pace(ramp=(0.0, 0.0))}, "ramp"),
        ({"pace": Pace(burstiness=1.0)}, "burstiness"),
        ({"pace": Pace(rate=1.0, burstiness=0.0)}, "burstiness"),
        ({"pace": Pace(rate=1.0, max_concurrency=0)}, "max_concurrency"),
        ({"pace": Pace(concurrency=1, max_concurrency=1)}, "max_concurrency"),
        ({"pace": Pace(speed=1.0)}, "speed"),
        ({"pace": Pace(rate=float("inf")), "duration_s": 1.0}, "requests"),
    ],
)
def test_wrong_plans_are_refused(change: Any, option: str) -> None:
    plan = BenchPlan(RANDOM, Pace())
    plan.validate()
    with pytest.raises(InvalidRequest, match=f"^{option}: "):
        replace(plan, **change).validate()


def test_what_a_plan_comes_to() -> None:
    plan = BenchPlan(RANDOM, Pace())
    assert (plan.schedule(), plan.planned, plan.loads) == (ClosedLoop(8), 64, 1)
    assert replace(plan, duration_s=1.0).planned is None
    both = replace(plan, mode="both", requests=5)
    assert (both.paired, both.schedule(), both.planned, both.loads) == (True, ClosedLoop(1), 10, 1)
    loaded = replace(both, pace=Pace(concurrency=4))
    assert (loaded.paired, loaded.schedule(), loaded.planned, loaded.loads) == (False, ClosedLoop(4), 5, 2)
    assert not replace(both, pace=Pace(rate=1.0)).paired
    at_once = Pace(rate=float("inf"))
    assert [replace(plan, pace=pace).scheduled for pace in (Pace(), Pace(rate=1.0, max_concurrency=2), at_once)] == [
        False, True, True
    ]  # fmt: skip
    assert not replace(plan, pace=replace(at_once, max_concurrency=2)).scheduled
    assert [interleaved(index) for index in range(4)] == [Mode.PD, Mode.COLOCATED, Mode.COLOCATED, Mode.PD]


async def run(service: ScriptedService, plan: BenchPlan) -> list[dict[str, Any]]:
    plan.validate()
    async with AsyncClient(service.target) as client:
        status = await client.status()
        plan = await fitted(client, plan, status)
        loads = await run_bench(client, plan, status, lambda outcome: None, asyncio.Event())
        return [{**report_of(plan, *load), "load": load[1]} for load in loads]


async def test_pairs_are_sent_one_request_at_a_time(service: ScriptedService) -> None:
    (pairs,) = await run(service, BenchPlan(RANDOM, Pace(), requests=3, mode="both"))
    requests = service.servicer.requests
    modes = [pb.MODE_PD, pb.MODE_COLOCATED, pb.MODE_COLOCATED, pb.MODE_PD, pb.MODE_PD, pb.MODE_COLOCATED]
    assert [request.mode for request in requests] == modes
    prompts = [tuple(request.token_ids.ids) for request in requests]
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 3
    ends = [(outcome.sent_s, outcome.ended_s) for outcome in pairs["load"].outcomes]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
    assert pairs["added_ms"]["ttft"] is not None


@pytest.mark.parametrize("pace", [Pace(concurrency=3), Pace(rate=200.0)])
async def test_under_load_each_mode_has_the_service_to_itself(service: ScriptedService, pace: Pace) -> None:
    reports = await run(service, BenchPlan(RANDOM, pace, requests=6, mode="both", warmup=2))
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
        await run(service, BenchPlan(RANDOM, Pace(), requests=3, warmup=1))
    assert len(service.servicer.requests) == 1


async def test_a_load_is_limited_to_what_fits(service: ScriptedService) -> None:
    async with AsyncClient(service.target) as client:
        status = await client.status()
        plan = BenchPlan(Synthetic(Lognormal(4.0, 1.0), Fixed(24)), Pace())
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
