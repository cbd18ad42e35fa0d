"""FLOPs and bytes of the engine's steps, against counts by hand and by brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoints.arithmetic import Cost, ModelArithmetic, Part
from checkpoints.shape import Experts
from checkpoints.source import resolve_model

# Two layers: W = 100 of which Wqkv = 30, H = 8, K = 4, a head of 1000, numbers of 2 bytes.
MODEL = ModelArithmetic(100, 30, 8, 4, 1000, (None, None), 2)


def test_a_decode_step_counts_each_request() -> None:
    cost = MODEL.decode(batch=3, context=10)
    assert cost.flops == 3 * (2 * (2 * 100 + 1000) + 4 * 8 * 11 * 2)
    assert cost.num_bytes == 2 * (2 * 100 + 1000) + 3 * 2 * (2 * 4) * 11 * 2  # 10 tokens are read, one is written


def test_in_the_last_layer_of_a_prefill_only_the_sampled_row_goes_on() -> None:
    cost = MODEL.prefill(4, chunk=512)
    products = 4 * 100 + 4 * 30 + (100 - 30) + 1000
    pairs = (1 + 2 + 3 + 4) + 4
    assert cost.flops == 2 * products + 4 * 8 * pairs
    assert cost.num_bytes == 2 * (200 + 1000) + 2 * 8 * 4 * 2


def test_chunks_read_the_weights_again_and_the_keys_before_them() -> None:
    cost = MODEL.prefill(4, chunk=2)
    first, second = MODEL.step([Part(0, 2, False)]), MODEL.step([Part(2, 2, True)])
    assert cost == first + second
    assert first.num_bytes == 2 * 200 + 2 * 8 * 2 * 2  # no head
    assert first.flops == 2 * (2 * 100 + 2 * 30) + 4 * 8 * 3  # no attention in the last layer
    assert second.num_bytes == 2 * 1200 + 2 * 8 * (2 + 2) * 2


def test_cached_tokens_are_not_computed() -> None:
    assert MODEL.prefill(6, chunk=2, cached=4) == MODEL.step([Part(4, 2, True)])


@pytest.mark.parametrize("window", [1, 3, 5, 100])
def test_a_window_limits_pairs(window: int) -> None:
    windowed = ModelArithmetic(0, 0, 1, 0, 0, (window, window), 2)
    for start, rows in ((0, 2), (0, 7), (2, 4), (6, 3)):
        first_layer = sum(min(position + 1, window) for position in range(start, start + rows))
        last_layer = min(start + rows, window)
        assert windowed.step([Part(start, rows, True)]).flops == 4 * (first_layer + last_layer)


def test_roofs_and_ridge() -> None:
    cost = Cost(200.0, 50.0)
    assert cost.intensity == 4
    assert cost.roof_s(10.0, 100.0) == 20
    assert cost.roof_s(1000.0, 10.0) == 5
    assert cost.added_s(10.0, 100.0) == 20.5
    assert MODEL.ridge_batch(312e12, 1.5e12) == pytest.approx(208)  # 2-byte numbers
    assert ModelArithmetic(100, 30, 8, 4, 1000, (None,), 4).ridge_batch(312e12, 1.5e12) == pytest.approx(416)


def test_at_the_predicted_doubling_batch_a_step_takes_twice_as_long() -> None:
    flops_per_s, bytes_per_s, context = 2e3, 100.0, 5
    batch = MODEL.doubling_batch(context, flops_per_s, bytes_per_s)
    one, two = (MODEL.decode(each, context).added_s(flops_per_s, bytes_per_s) for each in (1, 2))
    assert one + (batch - 1) * (two - one) == pytest.approx(2 * one)


def test_the_shapes_weights_are_what_a_step_reads() -> None:
    shape = resolve_model("dummy:135m").shape
    arithmetic = ModelArithmetic.of(shape, "bfloat16")
    assert arithmetic.weight_bytes == pytest.approx(shape.weight_bytes("bfloat16"), rel=1e-3)  # less the norms
    one = arithmetic.decode(1, 1000).num_bytes - arithmetic.decode(1, 0).num_bytes
    assert one == 1000 * shape.kv_bytes_per_token("bfloat16")
    assert ModelArithmetic.from_dict(arithmetic.to_dict()) == arithmetic


def test_experts_that_do_not_compute_a_token_cost_no_flops() -> None:
    shape = resolve_model("dummy:135m").shape
    two, four = (replace(shape, experts=Experts(8, used, 1536)) for used in (2, 4))
    costs = [ModelArithmetic.of(each, "bfloat16").decode(1, 10) for each in (two, four)]
    assert costs[1].flops - costs[0].flops == 30 * 2 * 2 * 3 * 576 * 1536
    assert costs[0].num_bytes == costs[1].num_bytes  # others of the batch may use them
