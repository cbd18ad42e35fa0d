"""Traffic of long prompts beside decoding requests: its arithmetic on rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.neighbours import (
    DECODING,
    LONG,
    NeighbourOptions,
    WindowData,
    arm_summary,
    best_chunk,
    passes,
    windows_by_arm,
)
from experiments.run_folder import FinishedCell, RequestRow, RunData
from tests.experiments.quiet import holds

WINDOW = {"arm": "pd", "repeat": 0, "begin_s": 10.0, "end_s": 12.0}


def decoding(sent_s: float, ttft_ms: float, itl_ms: tuple[float, ...], **changes: Any) -> RequestRow:
    return RequestRow(**{"cell": "c", "arm": "pd", "repeat": 0, "index": 0, "kind": DECODING, "sent_s": sent_s,
                         "scheduled_s": sent_s, "ttft_ms": ttft_ms, "itl_ms": itl_ms, **changes})  # fmt: skip


def long(scheduled_s: float, ttft_ms: float, late_s: float = 0.0, **changes: Any) -> RequestRow:
    return RequestRow(**{"cell": "c", "arm": "pd", "repeat": 0, "index": 0, "kind": LONG, "scheduled_s": scheduled_s,
                         "sent_s": scheduled_s + late_s, "ttft_ms": ttft_ms, "itl_ms": (20.0,), "prompt_tokens": 100,
                         **changes})  # fmt: skip


NEIGHBOUR = decoding(10.0, 100.0, (100.0, 700.0, 100.0, 900.0))
"""Gaps from 10.1 to 10.2, 10.2 to 10.9, 10.9 to 11.0."""
FAILED = RequestRow(cell="c", arm="pd", repeat=0, index=0, kind=LONG, scheduled_s=10.5, sent_s=10.5, error="gone")


@pytest.mark.parametrize(
    ("rows", "figures"),
    [
        # Tokens at 9.9, 9.95 (before), 10.45, 11.45 (within), 12.45 (after): only gaps that end within count.
        (
            [decoding(9.8, 100.0, (50.0, 500.0, 1000.0, 1000.0))],
            {"itl_ms": [500.0, 1000.0], "output_tokens": 2, "duration_s": 2.0},
        ),
        # Gaps of long prompts are no neighbours' gaps, but their tokens count; TTFT is from when it was due.
        (
            [long(10.5, 300.0, late_s=0.01)],
            {"gaps": (), "ttft_ms": (310.0,), "arrivals_s": (0.5,), "output_tokens": 2, "prompt_tokens": 100,
             "late_ms": 10.0, "stalls_ms": ()},
        ),
        # A stall is the longest gap that overlaps the wait for token 1: from 10.3 to 10.95.
        ([NEIGHBOUR, long(10.3, 650.0)], {"stalls_ms": (700.0,)}),
        ([NEIGHBOUR, long(10.92, 50.0)], {"stalls_ms": (100.0,)}),
        ([FAILED], {"errors": ("gone",), "ttft_ms": (), "output_tokens": 0, "prompt_tokens": 0}),
    ],
)  # fmt: skip
def test_what_counts_of_a_window(rows: list[RequestRow], figures: dict[str, Any]) -> None:
    window = WindowData.of(WINDOW, rows)
    for name, value in figures.items():
        got = getattr(window, name)
        assert got == (value if name == "errors" else pytest.approx(value)), name


def test_windows_take_the_rows_of_their_own_arm_and_repeat() -> None:
    rows = [decoding(9.9, 50.0, (gap_ms,), **place)
            for gap_ms, place in ((100.0, {}), (200.0, {"repeat": 1}), (300.0, {"arm": "x"}))]  # fmt: skip
    cell = FinishedCell("c", {}, 1.0, {"windows": [WINDOW]})
    (window,) = windows_by_arm(RunData("x", {}, {}, (cell,), tuple(rows)))["pd"]
    assert window.itl_ms == [100.0]


def test_an_arm_pools_distributions_and_averages_rates_over_windows() -> None:
    windows = [
        WindowData("a", 0, 2.0, ((0.5, 10.0), (1.0, 20.0)), (100.0,), (20.0,), (0.1,), 10, 90, 1.0, ()),
        WindowData("a", 1, 4.0, ((0.5, 30.0),), (300.0,), (30.0,), (0.1,), 40, 60, 3.0, ("gone",)),
    ]
    figures = {
        "windows": 2,
        "itl_ms": {"mean": 20.0, "p50": 20.0, "p90": 28.0, "p99": 29.8, "max": 30.0, "n": 3},
        "itl_p99_ms.mean": (19.9 + 30.0) / 2,
        "stall_ms.p50": 25.0,
        "long_ttft_ms.p50": 200.0,
        "output_tokens_per_s.mean": (5.0 + 10.0) / 2,
        "tokens_per_s.mean": (50.0 + 25.0) / 2,
        "late_ms": 3.0,
        "errors": 1,
    }
    holds(arm_summary(windows, seed=0), figures)
    holds(arm_summary([], seed=0), dict.fromkeys(("itl_ms", "output_tokens_per_s", "long_ttft_ms")))


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
    options = NeighbourOptions(prompt_len=8, chunk_sizes=(), arrive_s=3.0, seed=1)
    times_s = options.times_s(0, 5)
    assert times_s == options.times_s(0, 5) == sorted(times_s) != options.times_s(1, 5)
    assert len(times_s) == 5
    assert all(0 <= at_s <= 3.0 for at_s in times_s)
    prompt = options.prompt(100, LONG, 0, 0)
    assert prompt == options.prompt(100, LONG, 0, 0) != options.prompt(100, LONG, 0, 1)
    assert len(prompt) == 8


def test_passes_split_the_repeats() -> None:
    assert [list(each) for each in passes(5)] == [[0, 1, 2], [3, 4]]
    assert [list(each) for each in passes(1)] == [[0]]
