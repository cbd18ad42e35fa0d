"""FlashInfer's prefill: when it is chosen, and how it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kernels.cuda_flashinfer import FlashInferPrefill, obstacle
from engine.model.kv_pool import KVPool
from engine.scheduling.batch import ScheduledSeq
from pdserve.core.kv_layout import KVLayout
from tests.engine.harness import GREEDY
from tests.engine.strict_flashinfer import StrictWrapper

LLAMA: dict[str, Any] = {"capability": (9, 0), "dtype": "bfloat16", "head_dim": 128}
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS, NUM_BLOCKS = 6, 2, 16, 8, 3, 20


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dtype": "float16", "capability": (8, 0)},
        {"head_dim": 64, "capability": (8, 9)},
        {"head_dim": 256, "capability": (10, 0)},
    ],
)
def test_flashinfer_is_chosen_where_it_can_compute(shape: dict[str, Any]) -> None:
    assert obstacle("0.7.2.post1", **LLAMA | shape) is None


@pytest.mark.parametrize(
    ("shape", "installed", "reason"),
    [
        ({}, None, "not installed (extra cuda)"),
        ({}, "0.5.3", "flashinfer-python 0.5.3 is older than 0.6"),
        ({}, "unknown", "older than 0.6"),
        ({"capability": (7, 5)}, "0.7.2", "compute capability 7.5 is below 8.0"),
        ({"dtype": "float32"}, "0.7.2", "does not compute in float32"),
        ({"head_dim": 96}, "0.7.2", "no heads of 96 (only 64, 128, 256)"),
    ],
)
def test_else_the_reason_is_told(shape: dict[str, Any], installed: str | None, reason: str) -> None:
    why = obstacle(installed, **LLAMA | shape)
    assert why is not None
    assert reason in why


@pytest.fixture
def pool() -> KVPool:
    """A pool full of random numbers."""
    torch.manual_seed(4)
    layout = KVLayout.uniform("m", "bfloat16", BLOCK_SIZE, LAYERS, KV_HEADS, HEAD_DIM)
    flat = torch.randn(NUM_BLOCKS * layout.block_bytes // 2).bfloat16()
    return KVPool(layout, NUM_BLOCKS, flat, {})


def test_steps_in_flight_do_not_share_a_wrapper(pool: KVPool) -> None:
    """The plan of a step is copied from its wrapper's memory when the GPU comes to it."""
    prefill = FlashInferPrefill(StrictWrapper, pool, HEADS, {None, 5}, 0.5, None)
    seq = ScheduledSeq("a", [0] * 4, 0, [0], False, GREEDY)
    before = prefill.plan([seq])
    for _ in range(5):
        for wrapper in before.values():
            wrapper.in_flight = True
        after = prefill.plan([seq])
        for wrapper in before.values():
            wrapper.in_flight = False
        before = after
