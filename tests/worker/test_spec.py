"""A worker's spec survives the trip, and each slot has its own cores."""

from __future__ import annotations

import os
from dataclasses import replace

from core.config import PdserveConfig
from core.worker import Role
from worker.cores import claim_slot, leave_engine_cores
from worker.spec import WorkerSpec

SPEC = WorkerSpec("decode-0", Role.DECODE, "127.0.0.1", "127.0.0.1", "cpu", "127.0.0.1:1", "0.1.0", slot=1)


def test_round_trip() -> None:
    config = PdserveConfig.parse({"cluster": {"cores_per_worker": 2}, "testing": {"delay_ms": {"prefill": 5}}})
    spec = replace(SPEC, config=config, num_slots=3, allowed_cores=(1, 4))
    assert WorkerSpec.from_wire(spec.to_wire()) == spec


def test_slots_take_turns_over_the_cores() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cores = [replace(SPEC, slot=slot).cores for slot in range(len(allowed) + 1)]
    assert [c for (c,) in cores[:-1]] == allowed
    assert cores[-1] == cores[0]  # more slots than cores only if they may be shared


def test_a_worker_leaves_the_engines_their_cores() -> None:
    spec = replace(SPEC, slot=0, num_slots=2, allowed_cores=(3, 5, 8, 9))
    assert (spec.cores, spec.spare_cores) == ((3,), (8, 9))
    assert replace(spec, slot=1).spare_cores == (8, 9)
    assert replace(spec, num_slots=4).spare_cores == ()
    assert replace(spec, slot=3).spare_cores == ()  # it has joined after the others were counted
    wide = replace(spec, config=PdserveConfig.parse({"cluster": {"cores_per_worker": 2}}), num_slots=1)
    assert (wide.cores, wide.spare_cores) == ((3, 5), (8, 9))
    assert replace(spec, device="cuda").spare_cores == ()


def test_binding_remembers_which_cores_there_were() -> None:
    before = os.sched_getaffinity(0)
    try:
        bound = leave_engine_cores(replace(SPEC, slot=0))
        spare = set(before) - set(bound.cores)
        assert os.sched_getaffinity(0) == (spare or before)
        assert bound.cores == (min(before),)
        assert leave_engine_cores(replace(SPEC, slot=0, num_slots=len(before))).spare_cores == ()
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)


def test_each_worker_of_a_host_claims_a_slot_of_its_own() -> None:
    wide = PdserveConfig.parse({"cluster": {"cores_per_worker": 977}})  # nobody else's
    free = replace(SPEC, slot=None, config=wide)
    first, first_claim = claim_slot(free)
    second, second_claim = claim_slot(free)
    assert (first.slot, second.slot) == (0, 1)
    assert claim_slot(SPEC) == (SPEC, None)
    assert first_claim is not None
    assert second_claim is not None
    first_claim.close()
    third, third_claim = claim_slot(free)
    assert third.slot == 0, "a slot is free again once its worker has ended"
    assert third_claim is not None
    third_claim.close()
    second_claim.close()


def test_ports_follow_the_first() -> None:
    assert replace(SPEC, port=20_001).kv_port == 20_002
    assert SPEC.kv_port == 0


def test_a_gpu_worker_is_not_bound_to_cores() -> None:
    assert replace(SPEC, device="cuda").cores == ()
