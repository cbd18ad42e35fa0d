"""Traffic of long prompts beside decoding requests: its arithmetic on rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.neighbours import (
    DECODING,
    LONG,
    Traffic,
    WindowData,
    arm_summary,
    best_chunk,
    passes,
    windows_by_arm,
)
from experiments.run_folder import FinishedCell, RequestRow, RunData

WINDOW = {"arm": "pd", "repeat": 0, "begin_s": 10.0, "end_s": 12.0}


def decoding(sent_s: float, ttft_ms: float, itl_ms: tuple[float, ...], **changes: Any) -> RequestRow:
    return RequestRow(**{"cell": "c", "arm": "pd", "repeat": 0, "index": 0, "kind": DECODING, "sent_s": sent_s,
                         "scheduled_s": sent_s, "ttft_ms": ttft_ms, "itl_ms": itl_ms, **changes})  # fmt: skip


def long(scheduled_s: float, ttft_ms: float, late_s: float = 0.0, **changes: Any) -> RequestRow:
    return RequestRow(**{"cell": "c", "arm": "pd", "repeat": 0, "index": 0, "kind": LONG, "scheduled_s": scheduled_s,
                         "sent_s": scheduled_s + late_s, "ttft_ms": ttft_ms, "itl_ms": (20.0,), "prompt_tokens": 100,
                         **changes})  # fmt: skip


def test_only_gaps_that_end_within_the_window_count() -> None:
    # Tokens at 9.9, 9.95 (before), 10.45, 11.45 (within), 12.45 (after).
    window = WindowData.of(WINDOW, [decoding(9.8, 100.0, (50.0, 500.0, 1000.0, 1000.0))])
    assert [at_s for at_s, _ in window.gaps] == pytest.approx([0.45, 1.45])
    assert window.itl_ms == [500.0, 1000.0]
    assert window.output_tokens == 2
    assert window.duration_s == 2.0


def test_gaps_of_long_prompts_are_no_neighbours_gaps_but_their_tokens_count() -> None:
    window = WindowData.of(WINDOW, [long(10.5, 300.0, late_s=0.01)])
    assert window.gaps == ()
    assert window.ttft_ms == pytest.approx((310.0,))  # from when it was due
    assert window.arrivals_s == pytest.approx((0.5,))
    assert (window.output_tokens, window.prompt_tokens) == (2, 100)
    assert window.late_ms == pytest.approx(10.0)


def test_a_stall_is_the_longest_gap_that_overlaps_the_wait_for_token_1() -> None:
    # Gaps from 10.1 to 10.2, 10.2 to 10.9, 10.9 to 11.0; the prompt waits from 10.3 to 10.95.
    neighbour = decoding(10.0, 100.0, (100.0, 700.0, 100.0, 900.0))
    assert WindowData.of(WINDOW, [neighbour, long(10.3, 650.0)]).stalls_ms == (700.0,)
    assert WindowData.of(WINDOW, [neighbour, long(10.92, 50.0)]).stalls_ms == (100.0,)
    assert WindowData.of(WINDOW, [long(10.3, 650.0)]).stalls_ms == ()


def test_a_failed_request_is_an_error_and_nothing_else() -> None:
    failed = RequestRow(cell="c", arm="pd", repeat=0, index=0, kind=LONG, scheduled_s=10.5, sent_s=10.5, error="gone")
    window = WindowData.of(WINDOW, [failed])
    assert window.errors == ("gone",)
    assert (window.ttft_ms, window.output_tokens, window.prompt_tokens) == ((), 0, 0)


def test_windows_take_the_rows_of_their_own_arm_and_repeat() -> None:
    rows = [
        decoding(9.9, 50.0, (100.0,)),
        decoding(9.9, 50.0, (200.0,), repeat=1),
        decoding(9.9, 50.0, (300.0,), arm="x"),
    ]
    cell = FinishedCell("c", {}, 1.0, {"windows": [WINDOW]})
    (window,) = windows_by_arm(RunData("x", {}, {}, (cell,), tuple(rows)))["pd"]
    assert window.itl_ms == [100.0]


def test_an_arm_pools_distributions_and_averages_rates_over_windows() -> None:
    windows = [
        WindowData("a", 0, 2.0, ((0.5, 10.0), (1.0, 20.0)), (100.0,), (20.0,), (0.1,), 10, 90, 1.0, ()),
        WindowData("a", 1, 4.0, ((0.5, 30.0),), (300.0,), (30.0,), (0.1,), 40, 60, 3.0, ("gone",)),
    ]
    summary = arm_summary(windows, seed=0)
    assert summary["windows"] == 2
    assert summary["itl_ms"] == {"mean": 20.0, "p50": 20.0, "p90": 28.0, "p99": 29.8, "max": 30.0, "n": 3}
    assert summary["itl_p99_ms"]["mean"] == pytest.approx((19.9 + 30.0) / 2)
    assert summary["stall_ms"]["p50"] == 25.0
    assert summary["long_ttft_ms"]["p50"] == 200.0
    assert summary["output_tokens_per_s"]["mean"] == pytest.approx((5.0 + 10.0) / 2)
    assert summary["tokens_per_s"]["mean"] == pytest.approx((50.0 + 25.0) / 2)
    assert (summary["late_ms"], summary["errors"]) == (3.0, 1)


def test_an_arm_without_windows_has_no_figures() -> None:
    summary = arm_summary([], seed=0)
    assert summary["itl_ms"] is summary["output_tokens_per_s"] is summary["long_ttft_ms"] is None


def chunk(p99: float, tokens_per_s: float) -> dict[str, Any]:
    return {"itl_ms": {"p99": p99}, "tokens_per_s": {"mean": tokens_per_s}}


def test_the_best_chunk_has_the_lowest_tail_at_enough_throughput() -> None:
    arms = {"64": chunk(10.0, 80.0), "128": chunk(20.0, 96.0), "256": chunk(30.0, 100.0), "off": chunk(1.0, 100.0)}
    assert best_chunk(arms, 0.95) == 128
    assert best_chunk(arms, 0.8) == 64
    assert best_chunk(arms, 1.0) == 256
    assert best_chunk({}, 0.95) is None
    assert best_chunk({"64": chunk(10.0, 100.0), "128": chunk(10.0, 100.0)}, 0.95) == 128


def test_arms_share_times_and_prompts_and_repeats_do_not() -> None:
    traffic = Traffic(2, 5, 3.0, 8, 4, seed=1)
    times_s = traffic.times_s(0)
    assert times_s == Traffic(9, 5, 3.0, 8, 4, seed=1).times_s(0) == sorted(times_s)
    assert times_s != traffic.times_s(1)
    assert len(times_s) == 5
    assert all(0 <= at_s <= 3.0 for at_s in times_s)
    assert traffic.prompt(100, LONG, 0, 0) == traffic.prompt(100, LONG, 0, 0) != traffic.prompt(100, LONG, 0, 1)
    assert len(traffic.prompt(100, LONG, 0, 0)) == 8


def test_passes_split_the_repeats() -> None:
    assert [list(each) for each in passes(5)] == [[0, 1, 2], [3, 4]]
    assert [list(each) for each in passes(1)] == [[0]]
