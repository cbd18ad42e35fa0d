"""Chunks of prompts by FlashInfer, or on CPU tensors by its stand-in, beside decodes by our kernels."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels import cuda_attention, cuda_flashinfer
from engine.kernels.cuda_attention import CUDAAttention, check_attention
from engine.kernels.cuda_flashinfer import (
    FlashInferPrefill,
    MakeWrapper,
    PrefillAttention,
    capability_of,
    installed_version,
    make_wrappers,
    obstacle,
)
from engine.kernels.cuda_paged_attention import attend_decodes
from engine.model.decoder import Decoder
from engine.model.kv_pool import KVPool
from engine.scheduling.batch import ScheduledSeq
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KVLayout
from tests.engine.cuda.conftest import INTERPRETED
from tests.engine.cuda.test_decoder import BASE, make_engine
from tests.engine.cuda.test_kernels import NUM_BLOCKS, PRODUCTION, Shape, make_pool
from tests.engine.harness import GREEDY
from tests.engine.strict_flashinfer import StrictWrapper
from tests.random_models import save_random

SHAPES = [Shape(8, 2, 64, 16), Shape(6, 2, 128, 64, window=40), Shape(4, 1, 64, 16, window=1, softcap=3.0), PRODUCTION]


@pytest.fixture
def wrapper(device: torch.device) -> MakeWrapper:
    """Makes FlashInfer's wrappers on a GPU that can run it, else its stand-in's."""
    if device.type == "cpu":
        return StrictWrapper
    if (why := obstacle(installed_version(), capability_of(device), "float16", 64)) is not None:
        pytest.skip(why)
    return make_wrappers(device)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mixed_step_is_that_of_our_kernels(shape: Shape, device: torch.device, wrapper: MakeWrapper) -> None:
    torch.manual_seed(6)
    pool = make_pool(shape, "float16", device)
    scale = shape.head_dim**-0.5
    size = shape.block_size
    windows = {shape.window, None}
    chunks = FlashInferPrefill(wrapper, pool, shape.heads, windows, scale, shape.softcap)
    ours = CUDAAttention(pool, shape.softcap)
    theirs = CUDAAttention(pool, shape.softcap, chunks)
    seqs = [
        ScheduledSeq("decode", [0], size + 3, [5, 6], True, GREEDY),
        ScheduledSeq("whole", [0] * (size + 2), 0, [9, 2], True, GREEDY),
        ScheduledSeq("later", [0] * 7, 2 * size - 4, [11, 30, 12], True, GREEDY),
        ScheduledSeq("fills", [0] * 3, size - 3, [7, 1], True, GREEDY),  # one more block is allocated
    ]
    rows = sum(len(seq.token_ids) for seq in seqs)
    query = torch.randn(rows, shape.heads, shape.head_dim).to(device, torch.float16)
    for window in windows:
        for kv in pool.layers:
            expected = ours.plan(seqs).attend(query, kv, window, scale)
            step = theirs.plan(seqs)
            assert step.tiles is None
            torch.testing.assert_close(step.attend(query, kv, window, scale), expected, atol=4e-3, rtol=4e-3)
    assert theirs.plan(seqs[:1]).chunks is None, "decodes stay with our kernels"


@pytest.mark.parametrize("broken", ["", "FlashInfer", "decodes"])
def test_kernels_that_disagree_on_a_gpu_keep_an_engine_from_starting(
    device: torch.device, wrapper: MakeWrapper, broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_random(tmp_path, BASE | {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2}, seed=1)
    model_shape = make_engine(tmp_path, device, 16)[0]._model.shape
    layout = KVLayout.uniform("m", "float16", 16, 2, model_shape.num_kv_heads, 64)
    flat = torch.zeros(NUM_BLOCKS * layout.block_bytes // 2, dtype=torch.float16, device=device)
    pool = KVPool(layout, NUM_BLOCKS, flat, {})

    def wrong() -> Any:
        made = wrapper()
        whole = made.run

        def run(*arguments: Any, out: torch.Tensor) -> None:
            whole(*arguments, out=out)
            out[-1, 0, 5] += 0.1

        made.run = run
        return made

    if broken == "decodes":

        def halved(*arguments: Any) -> None:
            attend_decodes(*arguments)
            arguments[9].mul_(0.5)

        monkeypatch.setattr(cuda_attention, "attend_decodes", halved)
    make = wrong if broken == "FlashInfer" else wrapper
    chunks = FlashInferPrefill(
        make, pool, model_shape.num_heads, model_shape.layer_windows, model_shape.attention_scale, None
    )
    expected = pytest.raises(ConfigError, match=f"{broken} .* differ by ") if broken else contextlib.nullcontext()
    with expected:
        check_attention(pool, model_shape, chunks)
        assert not pool.tensor.any()


def test_the_choice_is_tried_and_told(device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FlashInfer that is installed and does not work is left, with the reason, unless it was asked for by name."""
    if not INTERPRETED:
        pytest.skip("plays a broken installation")
    save_random(tmp_path, BASE | {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2}, seed=1)
    runner, _ = make_engine(tmp_path, device, 16)
    model: Decoder = runner._model
    layout = KVLayout.uniform("m", "float16", 16, 2, 2, 64)
    pool = KVPool(layout, NUM_BLOCKS, torch.zeros(NUM_BLOCKS * layout.block_bytes // 2, dtype=torch.float16), {})

    def broken(device: torch.device) -> MakeWrapper:
        raise RuntimeError("ninja: nvcc not found")

    monkeypatch.setattr(cuda_flashinfer, "installed_version", lambda: "0.7.2")
    monkeypatch.setattr(cuda_flashinfer, "make_wrappers", lambda device: StrictWrapper)
    working = PrefillAttention("auto")
    assert working.planner(pool, model) is not None
    assert working.notes() == ["prefill attention by flashinfer: flashinfer-python 0.7.2"]
    monkeypatch.setattr(cuda_flashinfer, "make_wrappers", broken)
    left = PrefillAttention("auto")
    assert left.planner(pool, model) is None
    assert left.notes() == ["prefill attention by triton: FlashInfer failed: RuntimeError: ninja: nvcc not found"]
    with pytest.raises(ConfigError, match=r"engine\.prefill_attention: FlashInfer failed.*nvcc"):
        PrefillAttention("flashinfer").planner(pool, model)
    monkeypatch.setattr(cuda_flashinfer, "installed_version", lambda: None)
    missing = PrefillAttention("auto")
    assert missing.planner(pool, model) is None
    assert "not installed" in missing.notes()[0]
