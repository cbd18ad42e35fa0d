"""The predicted hand-off on a link of a known rate."""

from __future__ import annotations

import pytest

from ops.doctor.handoff_prediction import LinkRate, hidden_tokens_per_s, predict
from pdserve.core.kv_layout import KVLayout

LAYOUT = KVLayout.uniform("m", "bfloat16", block_size=64, num_layers=30, num_kv_heads=3, head_dim=64)  # 1.4 MiB a block


@pytest.mark.parametrize(("tokens", "blocks"), [(2048, 32), (2047, 32), (1, 1)])
def test_without_overlap_everything_is_exposed(tokens: int, blocks: int) -> None:
    found = predict(LAYOUT, tokens, LinkRate(0.125, round_trip_s=0.002))
    assert found.num_bytes == LAYOUT.expected_bytes(tokens) == blocks * LAYOUT.block_bytes
    assert found.wire_ms == pytest.approx(found.num_bytes / 0.125e9 * 1e3)
    assert found.exposed_none_ms == pytest.approx(1 + found.wire_ms)


def test_on_an_infinitely_fast_link_only_the_latency_is_left() -> None:
    assert predict(LAYOUT, 2048, LinkRate(1e12, round_trip_s=0.004)).exposed_none_ms == pytest.approx(2)


def test_the_window_bounds_a_long_fat_link() -> None:
    assert LinkRate(10.0, round_trip_s=0.1, max_inflight_bytes=16 * 2**20).bytes_per_s == pytest.approx(167_772_160)
    assert LinkRate(0.1, round_trip_s=0.1, max_inflight_bytes=16 * 2**20).bytes_per_s == pytest.approx(1e8)


def test_the_prefill_rate_that_a_link_hides() -> None:
    assert hidden_tokens_per_s(LAYOUT, LinkRate(0.5)) == pytest.approx(0.5e9 / LAYOUT.token_bytes)
