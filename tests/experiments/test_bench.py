"""The load, the statistics, the SLO and the report."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
from dataclasses import replace
from typing import Any

import pytest
from ops.bench.load import BenchLoad, Outcome, arrivals, leaked_blocks, run_load, settled, token_ids
from ops.bench.report import SLO, BenchReport, Distribution

from pdserve import AsyncClient, ServiceStatus, ServiceWorker
from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady, PdserveError, WorkerLost
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure
from pdserve.pb import inference_pb2 as pb
from tests.ops.made_up import made_up
from tests.pdserve.scripted_service import ScriptedService


def test_distribution() -> None:
    distribution = Distribution.of([4.0, 1.0, 3.0, 2.0])
    assert distribution is not None
    assert (distribution.mean, distribution.p50, distribution.count) == (2.5, 2.5, 4)
    assert Distribution.of([]) is None
    tenths = Distribution.of(float(value) for value in range(10, 0, -1))
    assert tenths is not None
    assert tenths.p50 == 5.5
    assert tenths.p90 == pytest.approx(9.1)
    assert Distribution.of([3.0]) == Distribution(3.0, 3.0, 3.0, 3.0, 1)


def test_arrivals_are_poisson_and_repeatable() -> None:
    times = list(arrivals(50.0, 2000, seed=3))
    assert times == list(arrivals(50.0, 2000, seed=3))
    assert times != list(arrivals(50.0, 2000, seed=4))
    assert times[0] == 0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.15)


def test_prompts_depend_on_seed_and_index_alone() -> None:
    assert token_ids(1, 2, 50, 1000) == token_ids(1, 2, 50, 1000)
    assert token_ids(1, 2, 50, 1000) != token_ids(1, 3, 50, 1000)
    assert set(token_ids(0, 0, 500, 7)) == set(range(7))


def test_both_modes_share_prompts_and_alternate() -> None:
    load = BenchLoad(requests=4, input_len=1, output_len=1, concurrency=1, mode="both")
    assert [load.prompt_of(i) for i in range(4)] == [0, 0, 1, 1]
    assert [load.mode_of(i) for i in range(4)] == [Mode.PD, Mode.COLOCATED, Mode.COLOCATED, Mode.PD]


@pytest.mark.parametrize(
    "change",
    [
        {"requests": 0},
        {"input_len": 0},
        {"concurrency": 0},
        {"concurrency": None},
        {"rate": 1.0},
        {"concurrency": None, "rate": -1.0},
        {"mode": "no"},
        {"timeout_s": 0.0},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
    ],
)
def test_wrong_loads_are_refused(change: Any) -> None:
    load = replace(BenchLoad(requests=1, input_len=1, output_len=1, concurrency=1), **change)
    with pytest.raises(InvalidRequest):
        load.validate()


def test_slo() -> None:
    generation = made_up(70)
    assert SLO.parse("ttft=200, itl=50ms,tpot=0.05s").limits_ms == {"ttft": 200, "itl": 50, "tpot": 50}
    assert SLO.parse("ttft=200,ttft_decode=200").met_by(generation)
    assert not SLO.parse("ttft=1").met_by(generation)
    assert not SLO.parse("itl=3.5").met_by(generation)
    assert SLO.parse("itl=1,ttft_decode=1").met_by(made_up(second_token=False))
    for wrong in ("", "speed=3", "ttft", "ttft=x", "ttft=-1", "ttft=inf"):
        with pytest.raises(InvalidRequest, match=r"^slo: "):
            SLO.parse(wrong)


def test_the_report_counts() -> None:
    pd, colocated = made_up(70), made_up(70, mode="colocated")
    outcomes = [
        Outcome(0, 0, Mode.PD, pd),
        Outcome(1, 0, Mode.COLOCATED, colocated),
        Outcome(2, 1, Mode.PD, None, CapacityExceeded("full")),
    ]
    report = BenchReport(outcomes, 2.0, SLO.parse("ttft=200"), leaked_blocks=0)
    plain = report.to_dict()
    assert (plain["requests"], plain["failed"], plain["failures"]) == (3, 1, {"CapacityExceeded": 1})
    assert plain["output_tokens_per_s"] == 3.0
    assert plain["total_tokens_per_s"] == 73.0
    assert plain["requests_per_s"] == 1.0
    assert plain["goodput"] == {"requests_per_s": 1.0, "share": pytest.approx(2 / 3)}
    assert set(plain["by_mode"]) == {"pd", "colocated"}
    assert plain["itl_ms"]["count"] == 4
    assert plain["added_ms"]["ttft"] == 0
    assert pd.ttft_decode_ms is not None
    assert colocated.ttft_decode_ms is not None
    assert report.added_ms(Figure.TTFT_DECODE) == pd.ttft_decode_ms - colocated.ttft_decode_ms == 1.5
    assert plain["refused"] == {"requests": 1, "retry_after_ms": None}
    assert (plain["partial"], plain["planned"]) == (False, 3)


def test_the_report_counts_refusals() -> None:
    errors = [
        CapacityExceeded("full", retry_after_s=0.1),
        NotReady("none ready", retry_after_s=0.3),
        NotReady("none ready"),
        WorkerLost("gone"),
    ]
    outcomes = [Outcome(index, index, Mode.PD, None, error) for index, error in enumerate(errors)]
    report = BenchReport(outcomes, 1.0, None, leaked_blocks=0)
    assert report.to_dict()["refused"] == {"requests": 3, "retry_after_ms": pytest.approx(200)}


def test_a_report_of_nothing() -> None:
    report = BenchReport([], 0.0, SLO.parse("ttft=1"), leaked_blocks=None, planned=4)
    plain = report.to_dict()
    assert (plain["partial"], plain["planned"], plain["requests"]) == (True, 4, 0)
    assert plain["goodput"] == {"requests_per_s": 0.0, "share": None}
    assert plain["leaked_blocks"] is None


@pytest.mark.parametrize(
    ("input_len", "output_len", "kind", "message"),
    [
        (2048, 1, InvalidRequest, "input_len: .* use at most 2047"),
        (2000, 49, InvalidRequest, "output_len: .* use at most 48"),
        (1000, 25, CapacityExceeded, "exceed the 1024 that the KV pool"),
    ],
)
async def test_a_load_that_cannot_fit_is_refused_before_it_starts(
    service: ScriptedService, input_len: int, output_len: int, kind: type[PdserveError], message: str
) -> None:
    load = BenchLoad(requests=1, input_len=input_len, output_len=output_len, concurrency=1)
    async with AsyncClient(service.target) as client:
        status = await client.status()
    with pytest.raises(kind, match=message):
        load.check_fits(status)
    replace(load, input_len=1000, output_len=24).check_fits(status)
    without = replace(status, vocab_size=0, context_length=0, block_size=0, workers=())
    with pytest.raises(NotReady, match="no worker has registered"):
        load.check_fits(without)


def test_the_smallest_worker_that_is_there_bounds_a_request() -> None:
    def worker(state: str, num_blocks: int) -> ServiceWorker:
        return ServiceWorker.from_proto(pb.WorkerStatus(worker_id="w", state=state, num_blocks=num_blocks))

    status = ServiceStatus.from_proto(pb.GetStatusResponse(block_size=16))
    assert status.pool_tokens == 0
    workers = (worker("ready", 8), worker("starting", 6), worker("lost", 2), worker("awaited", 0))
    assert replace(status, workers=workers).pool_tokens == 6 * 16
    assert replace(status, workers=workers[2:]).pool_tokens == 2 * 16


@pytest.mark.parametrize("pace", [{"concurrency": 3}, {"rate": 100.0}])
async def test_run_load_against_a_service(service: ScriptedService, pace: Any) -> None:
    load = BenchLoad(requests=10, input_len=20, output_len=3, seed=5, mode="both", **pace)
    done: list[Outcome] = []
    async with AsyncClient(service.target) as client:
        outcomes, duration_s = await run_load(client, load, 1000, done.append)
    assert [outcome.index for outcome in outcomes] == list(range(10))
    assert len(done) == 10
    assert duration_s > 0
    by_index = {outcome.index: outcome.generation for outcome in outcomes}
    for index, generation in by_index.items():
        assert generation is not None
        assert generation.mode == load.mode_of(index)
    assert {len(request.token_ids.ids) for request in service.servicer.requests} == {20}
    assert all(request.sampling.ignore_eos for request in service.servicer.requests)
    assert len({request.salt for request in service.servicer.requests} - {""}) == 10, "each must find a cold cache"


@pytest.mark.parametrize("pace", [{"concurrency": 3}, {"rate": 100.0}])
async def test_a_load_that_is_stopped_returns_what_had_finished(service: ScriptedService, pace: Any) -> None:
    load = BenchLoad(requests=10_000, input_len=20, output_len=50, **pace)
    done: list[Outcome] = []
    stop = asyncio.Event()

    def on_done(outcome: Outcome) -> None:
        done.append(outcome)
        if len(done) == 5:
            stop.set()

    async with AsyncClient(service.target) as client:
        outcomes, _ = await run_load(client, load, 1000, on_done, stop)
        assert sorted(done, key=lambda outcome: outcome.index) == outcomes
        assert 5 <= len(outcomes) < load.requests
        assert all(outcome.generation is not None for outcome in outcomes)
        await asyncio.sleep(1.0)  # what was on its way is there
        asked = len(service.servicer.requests)
        await asyncio.sleep(0.5)
        assert len(service.servicer.requests) == asked


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
