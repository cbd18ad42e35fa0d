"""Pairs are added until their intervals are narrow, and what other processes use meanwhile is counted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from experiments.experiment import Bench, Cell
from experiments.modes import MARGINS, PairOptions, send_pairs
from experiments.run_folder import RequestRow
from experiments.warm_up import requests_of
from experiments.workloads.synthetic import Fixed, Synthetic
from pdserve.client.async_client import AsyncClient
from pdserve.core.interval import median_interval
from pdserve.pb import inference_pb2 as pb
from tests.pdserve.scripted_service import ScriptedService


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"pairs_s": 0.0}, 6, 6),
        ({"pairs_s": 60.0, "narrow_ms": 1e6}, 8, 8),  # checked every four pairs
        ({"pairs_s": 2.0, "narrow_ms": 1e-9}, 7, 10_000),  # never narrow: until the time is over
    ],
)
async def test_pairs_are_added_until_narrow_or_the_time_is_over(
    service: ScriptedService, options: dict[str, float], least: int, most: int
) -> None:
    rows: list[RequestRow] = []
    steps: list[int] = []
    bench = Bench(Cell("x", {}, work=6), service.target, rows.append, steps.append)
    async with AsyncClient(service.target) as client:
        requests = requests_of(Synthetic(Fixed(8), Fixed(4)), 0, 100)
        await send_pairs(bench, client, requests, PairOptions.choose(options))
    assert least <= len(rows) // 2 <= most
    assert [(row.index, row.arm) for row in rows[:4]] == [(0, "pd"), (0, "colocated"), (1, "colocated"), (1, "pd")]
    assert sum(steps) == 6
    assert all(row.others_cpu_s is not None and row.others_cpu_s >= 0 for row in rows)


async def test_margins_of_pairs_whose_tokens_differ_are_noted(service: ScriptedService) -> None:
    rows: list[RequestRow] = []
    bench = Bench(Cell("x", {}, work=3), service.target, rows.append, lambda steps: None)
    async with AsyncClient(service.target) as client:
        requests, options = requests_of(Synthetic(Fixed(8), Fixed(4)), 0, 100), PairOptions.choose({"pairs_s": 0.0})
        await send_pairs(bench, client, requests, options)
        assert MARGINS not in bench.facts
        service.servicer.token_shift[pb.MODE_PD] = 1
        await send_pairs(bench, client, requests, options)
    assert bench.facts[MARGINS] == {"0": 1.0, "1": 1.0, "2": 1.0}
    assert len(rows) == 12


async def test_pairs_end_with_a_service_that_serves_no_more(service: ScriptedService) -> None:
    rows: list[RequestRow] = []
    bench = Bench(Cell("x", {}, work=6), service.target, rows.append, lambda steps: None)
    first = itertools.islice(requests_of(Synthetic(Fixed(8), Fixed(4)), 0, 100), 40)  # some are the warm-up
    requests = itertools.chain(first, itertools.repeat(("fail INVALID_ARGUMENT it ends", 4)))
    async with AsyncClient(service.target) as client:
        await send_pairs(bench, client, requests, PairOptions.choose({"pairs_s": 60.0, "narrow_ms": 1e-9}))
    served = len(rows) - 10
    assert [row.error is None for row in rows] == [True] * served + [False] * 10
    assert served > 0


async def test_what_a_cell_does_not_need_of_its_time_the_next_ones_have(service: ScriptedService) -> None:
    facts: dict[str, Mapping[str, Any]] = {}
    counts = []
    async with AsyncClient(service.target) as client:
        for name, narrow_ms in (("easy", 1e9), ("hard", 1e-9)):
            rows: list[RequestRow] = []
            bench = Bench(Cell(name, {}, work=6), service.target, rows.append, lambda steps: None, earlier=facts)
            options = PairOptions.choose({"pairs_s": 1.0, "narrow_ms": narrow_ms})
            begun_s = bench.elapsed_s
            await send_pairs(bench, client, requests_of(Synthetic(Fixed(8), Fixed(4)), 0, 100), options)
            facts[name] = bench.facts
            counts.append((len(rows) // 2, bench.elapsed_s - begun_s))
    assert 0 < facts["easy"]["spare_pairs_s"] < 1.0
    assert facts["hard"]["spare_pairs_s"] == 0
    assert counts[1][1] >= 1.0 + facts["easy"]["spare_pairs_s"]
    assert counts[0][0] < counts[1][0]


@pytest.mark.parametrize("spread_ms", [2.0, 4.0, 6.0])
def test_intervals_hold_the_true_value_although_pairs_stop_once_they_are_narrow(spread_ms: float) -> None:
    """By simulation: of differences with heavy tails, up to 60 pairs. Stopping early costs a few percent at most."""
    draw, options, runs, hits, stopped = np.random.default_rng(7), PairOptions(), 1000, 0, 0
    for _ in range(runs):
        drawn, pairs = 5.0 + spread_ms * draw.standard_t(3, 60), 0
        while pairs < drawn.size and not options.enough(pairs, 12, [list(drawn[:pairs])]):
            pairs += 1
        interval = median_interval(list(drawn[:pairs]))
        assert interval is not None
        hits += interval.lo <= 5.0 <= interval.hi
        stopped += pairs < drawn.size
    assert stopped > runs / 5
    assert 0.9 <= hits / runs <= 0.97
