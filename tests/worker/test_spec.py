"""A worker's spec survives the trip, and each slot has its own cores."""

from __future__ import annotations

import os
from dataclasses import replace

from core.config import PdserveConfig
from core.worker import Role
from worker.spec import WorkerSpec

SPEC = WorkerSpec("decode-0", Role.DECODE, "127.0.0.1", "127.0.0.1", "cpu", "127.0.0.1:1", "0.1.0", slot=1)


def test_round_trip() -> None:
    config = PdserveConfig.parse({"cluster": {"cores_per_worker": 2}, "testing": {"delay_ms": {"prefill": 5}}})
    spec = replace(SPEC, config=config)
    assert WorkerSpec.from_wire(spec.to_wire()) == spec


def test_slots_take_turns_over_the_cores() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cores = [replace(SPEC, slot=slot).cores for slot in range(len(allowed) + 1)]
    assert [c for (c,) in cores[:-1]] == allowed
    assert cores[-1] == cores[0]  # more slots than cores only if they may be shared


def test_a_gpu_worker_is_not_bound_to_cores() -> None:
    assert replace(SPEC, device="cuda").cores == ()
