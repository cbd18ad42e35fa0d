"""FlashInfer's prefill: when it is chosen, and how it is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.cuda_flashinfer import FlashInferPrefill, PrefillShape, Wanted, choose_prefill
from engine.model.kv_pool import KVPool
from engine.scheduling.batch import ScheduledSeq
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KVLayout
from tests.engine.harness import GREEDY
from tests.engine.strict_flashinfer import Misuse, StrictWrapper

LLAMA = PrefillShape("bfloat16", 128, 32, 8, (9, 0))
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS, NUM_BLOCKS = 6, 2, 16, 8, 3, 20


@pytest.mark.parametrize(
    "shape",
    [
        LLAMA,
        replace(LLAMA, dtype="float16", capability=(8, 0)),
        replace(LLAMA, head_dim=64, num_heads=9, num_kv_heads=3, capability=(8, 9)),
        replace(LLAMA, head_dim=256, num_heads=8, num_kv_heads=4, capability=(10, 0)),
    ],
)
def test_flashinfer_is_chosen_where_it_can_compute(shape: PrefillShape) -> None:
    for wanted in ("auto", "flashinfer"):
        choice = choose_prefill(wanted, shape, "0.7.2.post1")
        assert choice.backend == "flashinfer"
        assert str(choice) == "prefill attention by flashinfer: flashinfer-python 0.7.2.post1"


@pytest.mark.parametrize(
    ("shape", "installed", "reason"),
    [
        (LLAMA, None, "not installed (extra cuda)"),
        (LLAMA, "0.5.3", "flashinfer-python 0.5.3 is older than 0.6"),
        (LLAMA, "unknown", "older than 0.6"),
        (replace(LLAMA, capability=(7, 5)), "0.7.2", "compute capability 7.5 is below 8.0"),
        (replace(LLAMA, dtype="float32"), "0.7.2", "does not compute in float32"),
        (replace(LLAMA, head_dim=96), "0.7.2", "no heads of 96 (only 64, 128, 256)"),
        (replace(LLAMA, num_heads=10), "0.7.2", "10 query heads are no multiple of 8 KV heads"),
    ],
)
def test_else_triton_is_with_the_reason(shape: PrefillShape, installed: str | None, reason: str) -> None:
    choice = choose_prefill("auto", shape, installed)
    assert choice.backend == "triton"
    assert reason in choice.reason
    with pytest.raises(ConfigError) as raised:
        choose_prefill("flashinfer", shape, installed)
    assert str(raised.value).startswith("engine.prefill_attention: flashinfer cannot be used")
    assert reason in str(raised.value)


@pytest.mark.parametrize("installed", [None, "0.7.2"])
def test_triton_by_name(installed: str | None) -> None:
    wanted: Wanted = "triton"
    assert choose_prefill(wanted, LLAMA, installed).backend == "triton"


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
        for wrapper in before.wrappers.values():
            wrapper.in_flight = True
        after = prefill.plan([seq])
        for wrapper in before.wrappers.values():
            wrapper.in_flight = False
        before = after


def test_what_cannot_be_computed_is_an_error(pool: KVPool) -> None:
    prefill = FlashInferPrefill(StrictWrapper, pool, HEADS, {None}, 0.5, None)
    plan = prefill.plan([ScheduledSeq("a", [0] * 4, 0, [0], False, GREEDY)])
    query = torch.zeros(4, HEADS, HEAD_DIM).bfloat16()
    with pytest.raises(ValueError, match="planned with scale"):
        plan.attend(query, pool.layers[0], None, 1.0, torch.empty_like(query))
    with pytest.raises(Misuse, match="q is"):
        plan.attend(query[:3], pool.layers[0], None, 0.5, torch.empty_like(query[:3]))
    with pytest.raises(Misuse, match="before plan"):
        StrictWrapper().run(query, (pool.layers[0].k, pool.layers[0].v), out=torch.empty_like(query))
    before = pool.tensor.clone()
    prefill.check()
    assert torch.equal(pool.tensor, before)
