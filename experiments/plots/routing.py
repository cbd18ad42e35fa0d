"""Pictures of `experiments.routing`, drawn from its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.plots import style
from experiments.report.page import Picture
from pdserve.core.interval import Interval


def ttft_by_policy(policies: Sequence[Mapping[str, Any]]) -> Picture:
    """Mean, median and 99th percentile of the TTFT of each policy, and its share of cached tokens."""
    in_order = sorted(policies, key=lambda each: float(each["ttft_ms"]["mean"]), reverse=True)
    places = range(len(in_order))
    figure = style.canvas(columns=2, width_in=10.0, height_in=1.6 + 0.45 * len(in_order), sharey=True)
    left, right = figure.axes
    means = [Interval.from_dict(each["ttft_ms"]) for each in in_order]
    left.barh(places, [each.value for each in means], height=0.55, color=style.PALETTE[0], label="mean", zorder=2)
    left.errorbar(
        [each.value for each in means], places, xerr=list(zip(*(each.errors for each in means), strict=True)),
        color=style.INK, linestyle="", capsize=3, linewidth=1.2, zorder=3,
    )  # fmt: skip
    for key, name, number in (("ttft_p50_ms", "median", 1), ("ttft_p99_ms", "99th percentile", 4)):
        left.plot(
            [each[key] for each in in_order], places,
            color=style.PALETTE[number], marker=style.MARKERS[number], linestyle="", markersize=6, label=name, zorder=4,
        )  # fmt: skip
    right.barh(places, [100 * each["hit_rate"] for each in in_order], height=0.55, color=style.PALETTE[2], zorder=2)
    left.set_yticks(list(places), [each["policy"] for each in in_order])
    left.set_xlim(left=0)
    right.set_xlim(0, 100)
    style.label(left, x="TTFT from when the request was due, ms", y="", title="time to first token")
    style.label(right, x="prompt tokens found in the worker's cache, %", y="", title="cached tokens")
    style.legend(left, loc="upper right")
    return Picture(
        "ttft_by_policy",
        "TTFT by policy",
        "Bars: means with 95 % intervals. What is cached need not be computed, so requests also wait less for those "
        "before them.",
        figure,
        "Bars of the time to first token and of the share of cached tokens for each policy",
    )
