"""A worker's spec is equal after `to_wire` and `from_wire`."""

from __future__ import annotations

from dataclasses import replace

from pdserve.core.config import PdserveConfig
from pdserve.core.worker import Role
from worker.spec import WorkerSpec

SPEC = WorkerSpec("decode-0", Role.DECODE, "127.0.0.1", "127.0.0.1", "cpu", ("127.0.0.1:1", "127.0.0.1:2"), "0.1.0")


def test_round_trip() -> None:
    config = PdserveConfig.parse({"cluster": {"cores_per_worker": 2}})
    spec = replace(SPEC, config=config, num_slots=3, cores=(1, 4), engine_module="another.engine")
    assert WorkerSpec.from_wire(spec.to_wire()) == spec


def test_ports_follow_the_first() -> None:
    assert replace(SPEC, port=20_001).kv_port == 20_002
    assert SPEC.kv_port == 0


def test_a_role_taken_later_has_at_most_the_budget_that_the_engine_is_prepared_for() -> None:
    prefill, decode = (replace(SPEC, role=role, device="cuda") for role in Role)
    assert [prefill.token_budget_as(role) for role in Role] == [8192, 2048]
    assert [decode.token_budget_as(role) for role in Role] == [2048, 2048]
    assert [SPEC.token_budget_as(role) for role in Role] == [512, 512]
