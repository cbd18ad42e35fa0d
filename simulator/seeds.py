"""Runs many seeds, on all cores, and makes the faults of a failing one few."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from pdserve.core.errors import InvalidRequest
from runtime.process import end_with_parent
from simulator.plan import Plan
from simulator.simulation import Result, simulate

HASH_SEED = "PYTHONHASHSEED"
"""The order of sets of texts follows from this variable of the environment. A trace is the same in all runs only if it
is the same in all."""
_BATCH = 10


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that failed, and what was wrong."""

    seed: int
    violations: list[str]


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of some seeds. ``cpu_s``: the processor time that they took."""

    seeds: int
    requests: int
    virtual_s: float
    cpu_s: float
    failures: list[Failure]


def run_batch(seeds: range, num_requests: int) -> Batch:
    """Run some seeds in this process."""
    began_s, virtual_s, failures = time.process_time(), 0.0, list[Failure]()
    for seed in seeds:
        result = simulate(Plan.draw(seed, num_requests))
        virtual_s += result.virtual_s
        if result.violations:
            failures.append(Failure(seed, result.violations))
    return Batch(len(seeds), len(seeds) * num_requests, virtual_s, time.process_time() - began_s, failures)


def run_seeds(first: int, count: int, *, num_requests: int = 50, jobs: int | None = None) -> Iterator[Batch]:
    """Run ``count`` seeds from ``first`` on, in ``jobs`` processes (None: one per core). Gives batches as they end."""
    check_hash_seed()
    batches = [range(start, min(start + _BATCH, first + count)) for start in range(first, first + count, _BATCH)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=context, initializer=end_with_parent) as pool:
        running = [pool.submit(run_batch, batch, num_requests) for batch in batches]
        try:
            for done in as_completed(running):
                yield done.result()
        finally:
            for each in running:
                each.cancel()


def shrink(result: Result) -> Result:
    """The same failing seed with as few faults as still fail."""
    faults = list(result.plan.faults)
    for fault in list(faults):
        fewer = tuple(each for each in faults if each is not fault)
        attempt = simulate(result.plan.with_faults(fewer))
        if attempt.violations:
            faults, result = list(fewer), attempt
    return result


def check_hash_seed() -> None:
    """InvalidRequest unless `HASH_SEED` is 0 in this process."""
    if os.environ.get(HASH_SEED) != "0":
        raise InvalidRequest(f"{HASH_SEED}: set it to 0, so that the same seed gives the same run")
