"""The predicted hand-off: the cases that have a closed form, and what no case may break."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.doctor.handoff_prediction import (
    HandoffPart,
    LinkRate,
    Overlap,
    handoff_parts,
    hidden_tokens_per_s,
    hiding_gbs,
    predict,
)
from pdserve.core.kv_layout import KVLayout

LAYOUT = KVLayout.uniform("m", "bfloat16", block_size=64, num_layers=30, num_kv_heads=3, head_dim=64)  # 1.4 MiB a block


def plan(tokens: int, overlap: Overlap, *, chunk: int = 512, groups: int = 8) -> tuple[HandoffPart, ...]:
    return handoff_parts(LAYOUT, tokens, chunk, overlap, groups)


def test_without_overlap_everything_is_exposed() -> None:
    link = LinkRate(0.125, round_trip_s=0.002)
    found = predict(plan(2048, "none"), link, prefill_s=3.6)
    assert found.num_bytes == LAYOUT.expected_bytes(2048) == 32 * LAYOUT.block_bytes
    assert found.wire_s == pytest.approx(found.num_bytes / 0.125e9)
    assert found.exposed_s == pytest.approx(0.001 + found.wire_s)


@pytest.mark.parametrize("overlap", ["none", "chunk", "layer"])
def test_on_an_infinitely_fast_link_only_the_way_there_is_left(overlap: Overlap) -> None:
    found = predict(plan(2048, overlap), LinkRate(1e12, round_trip_s=0.004), prefill_s=1.0)
    assert found.exposed_s == pytest.approx(0.002)


def test_a_link_that_never_idles_exposes_what_the_prefill_does_not_cover() -> None:
    """From the first chunk's end on it is busy to the end."""
    parts, prefill_s = plan(2048, "chunk"), 1.0
    link = LinkRate(0.1 * hiding_gbs(parts, prefill_s))
    found = predict(parts, link, prefill_s)
    assert found.exposed_s == pytest.approx(prefill_s / 4 + found.wire_s - prefill_s)


def test_far_below_phi_the_first_layers_make_the_difference() -> None:
    parts, prefill_s = plan(2048, "layer"), 1.0
    link = LinkRate(0.01 * hiding_gbs(parts, prefill_s))
    found = predict(parts, link, prefill_s)
    first_s = prefill_s / 4 * (30 // 8) / 30
    assert found.exposed_s == pytest.approx(first_s + found.wire_s - prefill_s)


def test_far_above_phi_the_last_part_is_all_that_is_exposed() -> None:
    parts, prefill_s = plan(2048, "layer"), 1.0
    link = LinkRate(50 * hiding_gbs(parts, prefill_s))
    assert predict(parts, link, prefill_s).exposed_s == pytest.approx(parts[-1].num_bytes / link.bytes_per_s)


def test_a_chunk_that_ends_within_a_block_keeps_it_for_the_next() -> None:
    parts = plan(1000, "chunk", chunk=100)
    assert [part.num_bytes // LAYOUT.block_bytes for part in parts] == [1, 2, 1, 2, 1, 2, 1, 2, 2, 2]
    assert [part.ready for part in parts] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])


def test_chunks_smaller_than_a_block_send_when_it_is_full() -> None:
    parts = plan(100, "chunk", chunk=16)
    assert [(part.ready, part.num_bytes) for part in parts] == [
        (0.64, LAYOUT.block_bytes),
        (1.0, LAYOUT.block_bytes),
    ]


def test_groups_of_layers_are_ready_as_they_are_computed() -> None:
    parts = plan(1024, "layer", groups=3)
    assert [part.ready for part in parts] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert {part.num_bytes for part in parts} == {8 * LAYOUT.layer_bytes(range(10))}


def test_the_window_bounds_a_long_fat_link() -> None:
    assert LinkRate(10.0, round_trip_s=0.1, max_inflight_bytes=16 * 2**20).bytes_per_s == pytest.approx(167_772_160)
    assert LinkRate(0.1, round_trip_s=0.1, max_inflight_bytes=16 * 2**20).bytes_per_s == pytest.approx(1e8)


def test_a_dead_link_is_an_error() -> None:
    with pytest.raises(ValueError, match="transfers nothing"):
        predict((HandoffPart(1.0, 10),), LinkRate(0.0), 1.0)


def test_a_prefill_of_no_time_cannot_hide_anything() -> None:
    assert hiding_gbs(plan(512, "layer"), 0.0) == math.inf


def test_the_prefill_rate_that_a_link_hides() -> None:
    assert hidden_tokens_per_s(LAYOUT, LinkRate(0.5)) == pytest.approx(0.5e9 / LAYOUT.token_bytes)


@given(
    tokens=st.integers(1, 4000),
    chunk=st.integers(1, 700),
    groups=st.integers(2, 40),
    gbs=st.floats(0.001, 20),
    prefill_s=st.floats(0, 10),
)
def test_nothing_is_lost_and_more_overlap_never_hurts(
    tokens: int, chunk: int, groups: int, gbs: float, prefill_s: float
) -> None:
    exposed = {}
    overlaps: tuple[Overlap, ...] = ("none", "chunk", "layer")
    for overlap in overlaps:
        parts = plan(tokens, overlap, chunk=chunk, groups=groups)
        found = predict(parts, LinkRate(gbs), prefill_s)
        assert found.num_bytes == LAYOUT.expected_bytes(tokens)
        assert [part.ready for part in parts] == sorted(part.ready for part in parts)
        assert found.exposed_s >= max(0.0, found.wire_s - prefill_s) - 1e-9
        exposed[overlap] = found.exposed_s
    assert exposed["layer"] <= exposed["chunk"] + 1e-9
    assert exposed["chunk"] <= exposed["none"] + 1e-9
