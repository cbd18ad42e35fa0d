"""An engine core runs without a process, a device or torch, and takes the time that it is given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.messages import KVRole
from engine.scheduling.scheduler import SchedulerConfig
from tests.engine.simulated import PREFILL_TOKEN_S, STEP_S, TOKEN_KV_S, Simulation, random_load, result

CONFIG = SchedulerConfig(256, 16, 1024, 16, 256)


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_many_requests_under_a_virtual_clock_without_torch(batching: str) -> None:
    arguments = {"num_requests": 200, "seed": 3, "batching": batching}
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.simulated", json.dumps(arguments)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    assert outcome["finished"] == 200
    assert outcome["free_blocks"] == 256
    assert outcome["took_s"] > 4.0
    assert outcome == result(random_load(200, 3, batching)), "the same again, in any process"


def test_static_batches_take_longer() -> None:
    continuous, static = (random_load(200, 5, batching) for batching in ("continuous", "static"))
    assert result(continuous)["tokens"] == result(static)["tokens"]
    assert static.clock.now() > 1.2 * continuous.clock.now()


def test_times_are_those_of_the_model() -> None:
    simulation = Simulation(CONFIG)
    simulation.submit(1.0, "local", 400, 3)
    simulation.submit(5.0, "push", 100, 9, KVRole.PUSH)
    simulation.submit(9.0, "receive", 50, 3, KVRole.RECEIVE)
    simulation.run()
    chunks_s = 2 * STEP_S + (255 + 143) * PREFILL_TOKEN_S
    assert simulation.first_token_s["local"] == pytest.approx(1.0 + chunks_s)
    assert simulation.finished_s["local"] == pytest.approx(1.0 + chunks_s + 2 * STEP_S)
    assert simulation.finished_s["push"] == pytest.approx(5.0 + STEP_S + 99 * PREFILL_TOKEN_S)
    assert simulation.first_token_s["receive"] == pytest.approx(9.0 + 50 * TOKEN_KV_S + STEP_S)
    assert simulation.num_tokens == {"local": 3, "push": 1, "receive": 2}
    assert simulation.core.scheduler.load().free_blocks == 256
