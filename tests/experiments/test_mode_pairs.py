"""Pairs are added until their intervals are narrow, and what other processes use meanwhile is counted."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import psutil
import pytest

from experiments.environment import CpuUse
from experiments.experiment import Bench, Cell
from experiments.modes import PairOptions, send_pairs
from experiments.run_folder import RequestRow
from experiments.warm_up import requests_of
from experiments.workloads.synthetic import Fixed, Synthetic
from pdserve.client.async_client import AsyncClient
from pdserve.core.interval import median_interval
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


def test_what_other_processes_use_is_counted_apart_from_the_measurements_own() -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        without, own = [psutil.Process()], [psutil.Process(), process]
        before, before_own = CpuUse.now(without), CpuUse.now(own)
        while sum(process.cpu_times()[:2]) < 0.45:
            process.is_running()
        after_own, after = CpuUse.now(own), CpuUse.now(without)
        child.communicate(b"\n")
    assert after.others_s(before) - after_own.others_s(before_own) >= 0.3
    assert after.others_cores(before) == pytest.approx(after.others_s(before) / (after.at_s - before.at_s))
