"""The warm-up: it reaches every worker, or says which it did not reach."""

from __future__ import annotations

import itertools

import pytest

from experiments.experiment import Bench, Cell
from experiments.modes import COLOCATED, PD, PairOptions, send_pairs
from experiments.run_folder import RequestRow
from experiments.warm_up import NOT_REACHED, not_reached_texts, requests_of, warm_up
from experiments.workloads.synthetic import Fixed, Synthetic
from pdserve import AsyncClient
from pdserve.core.errors import CapacityExceeded
from tests.local_cluster import local_cluster
from tests.pdserve.scripted_service import ScriptedService


def bench_of(target: str, rows: list[RequestRow], told: list[str]) -> Bench:
    return Bench(Cell("x", {}, work=0), target, rows.append, lambda steps: None, tell=told.append)


async def test_every_worker_of_a_larger_split_is_reached() -> None:
    rows: list[RequestRow] = []
    with local_cluster({}, prefill=2, decode=2) as cluster:
        bench = bench_of(cluster.target, rows, [])
        async with AsyncClient(cluster.target) as client:
            vocab_size = (await client.status()).vocab_size
            requests = requests_of(Synthetic(Fixed(32), Fixed(4)), 0, vocab_size)
            await send_pairs(bench, client, requests, PairOptions(pairs_s=0))
            workers = (await client.status()).workers
    assert {worker.worker_id for worker in workers if worker.prompt_tokens_looked_up} == {
        "prefill-0", "prefill-1", "decode-0", "decode-1"
    }  # fmt: skip
    assert bench.facts == {}
    assert rows == []


async def test_a_worker_that_is_never_reached_is_named(service: ScriptedService) -> None:
    told: list[str] = []
    bench = bench_of(service.target, [], told)
    async with AsyncClient(service.target) as client:
        requests = requests_of(Synthetic(Fixed(8), Fixed(1)), 0, 100)
        await warm_up(bench, client, requests, (PD, COLOCATED))
    # The scripted service computes all colocated requests on prefill-0.
    assert bench.facts == {NOT_REACHED: [{"mode": "colocated", "worker": "decode-0"}]}
    assert told == ["the warm-up did not reach decode-0 with a request of mode colocated"]
    assert not_reached_texts(bench.facts[NOT_REACHED])[0].startswith(
        "No request of mode colocated of the warm-up reached decode-0"
    )
    assert len(service.servicer.requests) == 1 + 5 * 2
    assert all(request.sampling.max_tokens == 2 for request in service.servicer.requests)  # else nothing is handed off
    assert len({request.salt for request in service.servicer.requests}) == len(service.servicer.requests)


async def test_a_warm_up_that_fails_raises_the_error(service: ScriptedService) -> None:
    service.servicer.refuse_ms = "100"
    async with AsyncClient(service.target) as client:
        with pytest.raises(CapacityExceeded, match="the queue is full"):
            await warm_up(bench_of(service.target, [], []), client, itertools.repeat(([1, 2], 2)), (PD,))
