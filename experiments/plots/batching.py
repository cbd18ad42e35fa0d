"""Pictures of `experiments.batching`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.plots import style
from experiments.report.page import Picture
from pdserve.core.interval import Interval

_POOLS = {
    "paged": ("paged", style.PALETTE[2]),
    "contiguous-request": ("contiguous: prompt + limit", style.PALETTE[4]),
    "contiguous-context": ("contiguous: longest request", style.PALETTE[3]),
}
_ARMS = {"continuous": style.PALETTE[2], "static": style.PALETTE[6], "as-configured": style.PALETTE[0]}


def sweeps(decode: Sequence[Mapping[str, Any]], prefill: Sequence[Mapping[str, Any]], context: int) -> Picture:
    """Step time and tokens per second over the batch size, for decode and for prefill."""
    figure = style.canvas(columns=2, rows=2, width_in=10.0, height_in=6.2)
    for column, (name, points) in enumerate((("decode", decode), ("prefill", prefill))):
        batches = [point["batch"] for point in points]
        for row, (key, unit) in enumerate((("step_ms", "step time, ms"), ("tokens_per_s", "tokens per second"))):
            axes = figure.axes[2 * row + column]
            values = [Interval.from_dict(point[key]) for point in points]
            axes.errorbar(batches, **style.vertical(values),
                          color=style.PALETTE[column], marker=style.MARKERS[column], markersize=5, capsize=3,
                          linewidth=1.6)  # fmt: skip
            axes.set_xscale("log", base=2)
            style.plain_ticks(axes, batches)
            axes.set_ylim(bottom=0)
            style.label(axes, x="requests in the step" if row else "", y=unit, title="" if row else name)
    per_prompt = prefill[0]["tokens"] // prefill[0]["batch"]
    return Picture(
        "sweeps",
        "Batch size",
        f"One engine step over the number of requests in it, with 95 % intervals. Left: decode, one token each after a "
        f"context of {context}. Right: prefill, a prompt of {per_prompt} tokens each. A decode step reads all weights, "
        "however few requests it has; a prefill step has enough tokens for the arithmetic to take longer than that.",
        figure,
        "Four line plots of step time and tokens per second over the batch size",
    )


def joining(arms: Mapping[str, Mapping[str, Any]], e2e_ms: Mapping[str, Sequence[float]]) -> Picture:
    """Throughput of the kinds of batching, and the distribution of the time per request."""
    figure = style.canvas(columns=2, width_in=10.0, height_in=3.8)
    rate, whole = figure.axes
    for row, (name, arm) in enumerate(arms.items()):
        value = Interval.from_dict(arm["output_tokens_per_s"])
        rate.barh(row, value.value, height=0.5, color=_ARMS[name],
                  xerr=[[each] for each in value.errors], error_kw={"capsize": 4})  # fmt: skip
        values = np.sort(list(e2e_ms[name])) / 1e3
        whole.step(values, np.arange(1, values.size + 1) / values.size, where="post", color=_ARMS[name],
                   linewidth=1.8, label=name)  # fmt: skip
    rate.set_yticks(range(len(arms)), list(arms))
    rate.set_ylim(len(arms) - 0.4, -0.6)
    whole.set_xlim(left=0)
    whole.set_ylim(0, 1.02)
    style.label(rate, x="output tokens per second, all requests at once", y="", title="throughput")
    style.label(whole, x="time from arrival to last token, s", y="share of requests", title="open-loop arrivals")
    style.legend(whole, loc="lower right")
    return Picture(
        "joining",
        "Static and continuous batching",
        "Left: throughput when all requests are there at the same time, mean over repeats with its 95 % interval. "
        "Right: cumulative distribution of the time per request when they arrive one by one; further left is better. "
        "A static batch lasts as long as its longest output, and who arrives meanwhile waits for its end.",
        figure,
        "Bars of throughput, and cumulative distributions of request time",
    )


def pool_over_time(timelines: Mapping[str, Sequence[Sequence[float]]]) -> Picture:
    """What the pool holds over virtual time, for each way to give out memory."""
    from matplotlib.patches import Patch

    figure = style.canvas(columns=len(timelines), width_in=11.0, height_in=3.8, sharex=True, sharey=True)
    for number, (name, points) in enumerate(timelines.items()):
        axes = figure.axes[number]
        label, color = _POOLS[name]
        times_s = [point[0] for point in points]
        axes.fill_between(times_s, [100 * p[2] for p in points], color=color, alpha=0.3, linewidth=0)
        axes.fill_between(times_s, [100 * p[1] for p in points], color=color, linewidth=0)
        axes.set_ylim(0, 100)
        style.label(axes, x="virtual time, s", y="" if number else "share of the pool, %", title=label)
    figure.axes[0].set_xlim(0, max((point[0] for points in timelines.values() for point in points), default=1.0))
    figure.legend(
        handles=[Patch(color=style.FAINT, label="computed KV"), Patch(color=style.FAINT, alpha=0.3, label="reserved")],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    return Picture(
        "pool_over_time",
        "What the pool holds (simulated)",
        "All requests are there at the start. Dark: tokens whose KV is computed. Light: reserved for requests, but "
        "empty. White: free. Contiguous reservation keeps room for outputs that mostly end earlier.",
        figure,
        "Area plots of live and reserved shares of the KV pool over time",
    )


def pools(summary: Mapping[str, Mapping[str, Any]]) -> Picture:
    """Throughput, requests at a time, and time per request of each way to give out memory."""
    figure = style.canvas(columns=3, width_in=11.0, height_in=2.9, sharey=True)
    for row, (name, pool) in enumerate(summary.items()):
        _, color = _POOLS[name]
        for axes, key in zip(figure.axes, ("output_tokens_per_s", "running"), strict=False):
            value = Interval.from_dict(pool[key])
            axes.errorbar(value.value, row, xerr=[[each] for each in value.errors], color=color,
                          marker="o", markersize=6, capsize=3)  # fmt: skip
        e2e = pool["e2e_ms"]
        figure.axes[2].plot([e2e["p50"] / 1e3, e2e["p99"] / 1e3], [row, row], color=color, linewidth=1.4)
        figure.axes[2].plot(e2e["p50"] / 1e3, row, color=color, marker="o", markersize=6)
        figure.axes[2].plot(e2e["p99"] / 1e3, row, color=color, marker="|", markersize=10, markeredgewidth=2)
    figure.axes[0].set_yticks(range(len(summary)), [_POOLS[name][0] for name in summary])
    figure.axes[0].set_ylim(len(summary) - 0.5, -0.5)
    for axes, label, title in zip(
        figure.axes,
        ("output tokens per second", "requests at a time", "s (dot: median, bar: p99)"),
        ("throughput", "batch", "time per request"),
        strict=True,
    ):
        axes.set_xlim(left=0)
        style.label(axes, x=label, y="", title=title)
    return Picture(
        "pools",
        "Paged against contiguous (simulated)",
        "Throughput and requests at a time when all requests are there at the start, means over seeds with 95 % "
        "intervals; time per request with open-loop arrivals.",
        figure,
        "Three dot plots that compare paged and contiguous pools",
    )
