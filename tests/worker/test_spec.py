"""A worker's spec is equal after `to_wire` and `from_wire`."""

from __future__ import annotations

from dataclasses import replace

from pdserve.core.config import PdserveConfig
from pdserve.core.worker import Role
from worker.spec import WorkerSpec

SPEC = WorkerSpec("decode-0", Role.DECODE, "127.0.0.1", "127.0.0.1", "cpu", "127.0.0.1:1", "0.1.0")


def test_round_trip() -> None:
    config = PdserveConfig.parse({"cluster": {"cores_per_worker": 2}})
    spec = replace(SPEC, config=config, num_slots=3, cores=(1, 4), engine_module="another.engine")
    assert WorkerSpec.from_wire(spec.to_wire()) == spec


def test_ports_follow_the_first() -> None:
    assert replace(SPEC, port=20_001).kv_port == 20_002
    assert SPEC.kv_port == 0
