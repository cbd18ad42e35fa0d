"""The service in a simulated world (docs/correctness.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.mutants import MUTANTS, Mutant, seeds_until_found

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 500
QUICK_MUTANTS = (MUTANTS[1], MUTANTS[5])


def pdserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``pdserve simulate``."""
    command = [sys.executable, "-P", "-m", "ops.command", "simulate", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(1500)
def test_nothing_is_lost() -> None:
    """Under `SEEDS` seeds."""
    done = pdserve("--seeds", str(SEEDS), "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["seeds"] == SEEDS
    assert figures["failed"] == []


def test_a_seed_gives_the_same_run() -> None:
    """Line by line, in two processes."""
    first, second = (pdserve("--seed", "17", "--trace") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert "FAULT" in first.stdout
    assert first.stdout == second.stdout


@pytest.mark.parametrize("mutant", QUICK_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_found(mutant: Mutant) -> None:
    """Two that few seeds find; `make soak` plants all."""
    seeds, _ = seeds_until_found(mutant, 300)
    assert seeds > 0


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_planted_fault_is_found(mutant: Mutant) -> None:
    """Within the seeds that are promised."""
    seeds, _ = seeds_until_found(mutant)
    assert seeds > 0
