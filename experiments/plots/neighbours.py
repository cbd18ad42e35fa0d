"""Pictures and the table of traffic in which long prompts arrive while others decode (`experiments.neighbours`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.neighbours import WindowData
from experiments.plots import style
from experiments.report.page import Picture, TableBlock
from pdserve.core.interval import Interval, interval_text

_APART = {"pd": style.PD, "alone-busy": "#e69f00", "alone-idle": style.FAINT}
_CHUNKED = ("#cc79a7", "#56b4e9", "#0072b2", "#009e73", "#88a020", "#6a3d9a")
_WHOLE = style.INK
_PERCENTS = {"p50": "median", "p99": "p99", "max": "longest"}


def trade(arms: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> Picture:
    """p99 ITL, longest gap beside a long prompt, TTFT of the long prompts, and output rate of every arm, side by
    side."""
    figure = style.canvas(columns=4, width_in=13.0, height_in=0.42 * len(arms) + 1.4, sharey=True)
    gaps, stall, ttft, rate = figure.axes
    colors = colors_of(list(arms))
    for row, (name, arm) in enumerate(arms.items()):
        color = colors[name]
        for axes, key in ((gaps, "itl_p99_ms"), (rate, "output_tokens_per_s")):
            value = Interval.from_dict(arm[key])
            axes.errorbar(value.value, row, xerr=[[each] for each in value.errors], color=color,
                          marker="o", markersize=6, capsize=3)  # fmt: skip
        for axes, tail in ((stall, arm["stall_ms"]), (ttft, arm["long_ttft_ms"])):
            if tail is not None:
                axes.plot([tail["p50"], tail["p99"]], [row, row], color=color, linewidth=1.4)
                axes.plot(tail["p50"], row, color=color, marker="o", markersize=6)
                axes.plot(tail["p99"], row, color=color, marker="|", markersize=10, markeredgewidth=2)
    gaps.set_yticks(range(len(arms)), [labels[name] for name in arms])
    gaps.set_ylim(len(arms) - 0.5, -0.5)
    for axes in (stall, ttft, rate):
        axes.set_xlim(left=0)
    if max(arm["itl_p99_ms"]["mean"] for arm in arms.values()) > 5 * min(
        arm["itl_p99_ms"]["mean"] for arm in arms.values()
    ):
        _log_axis(gaps, [arm["itl_p99_ms"][key] for arm in arms.values() for key in ("lo", "hi")], "x")
    else:
        gaps.set_xlim(left=0)
    style.label(gaps, x="p99 ITL, ms", y="", title="gaps of decoding requests")
    style.label(stall, x="longest gap, ms (dot: median, bar: p99)", y="", title="beside a long prompt")
    style.label(ttft, x="TTFT, ms (dot: median, bar: p99)", y="", title="long prompts")
    style.label(rate, x="output tokens per second", y="", title="throughput")
    return Picture(
        "trade",
        "The trade",
        "From left to right: the 99th percentile of the gaps between tokens, mean over windows with its 95 % interval; "
        "the longest gap of a decoding request while a long prompt waits for its first token; how long the long "
        "prompts wait for it; output tokens per second of all requests, with its interval. Lower is better, and of the "
        "last one higher.",
        figure,
        "Four dot plots that compare the arms by p99 ITL, longest gap, TTFT and throughput",
    )


def gaps_over_time(windows: Mapping[str, Sequence[WindowData]], labels: Mapping[str, str]) -> Picture:
    """Every gap of one window of each arm, and when the long prompts arrived: the first repeat that all arms have."""
    repeat = min(set.intersection(*({window.repeat for window in each} for each in windows.values())), default=0)
    shown = {name: window for name, each in windows.items() for window in each if window.repeat == repeat}
    figure = style.canvas(rows=len(shown), width_in=9.0, height_in=1.55 * len(shown) + 0.7, sharex=True, sharey=True)
    colors = colors_of(list(shown))
    shortest = _shown_from([gap_ms for window in shown.values() for gap_ms in window.itl_ms])
    for axes, (name, window) in zip(figure.axes, shown.items(), strict=True):
        axes.scatter(
            [at_s for at_s, _ in window.gaps],
            np.maximum(window.itl_ms, shortest),
            s=7,
            color=colors[name],
            alpha=0.6,
            linewidth=0,
        )
        for at_s in window.arrivals_s:
            axes.axvline(at_s, color=style.FAINT, linewidth=0.9, linestyle=(0, (3, 3)), zorder=1)
        axes.set_yscale("log")
        style.label(axes, x="", y="gap, ms", title=labels[name])
    longest = max((gap_ms for window in shown.values() for gap_ms in window.itl_ms), default=shortest)
    _log_axis(figure.axes[0], [shortest, longest], "y")
    figure.axes[-1].set_xlim(left=0)
    style.label(figure.axes[-1], x="seconds since the window began", y="gap, ms", title=labels[list(shown)[-1]])
    return Picture(
        "itl_over_time",
        "Gaps between tokens over time",
        f"Each dot is the gap before one token of a decoding request (window {repeat + 1} of each arm; logarithmic). "
        "Gaps of tokens that arrived in a burst are drawn at the lower edge. Dashed lines mark the arrivals of long "
        "prompts, which are the same in all arms.",
        figure,
        "Scatter plots of inter-token latency over time, one per arm",
    )


def distribution(windows: Mapping[str, Sequence[WindowData]], labels: Mapping[str, str]) -> Picture:
    """The distribution of the gaps of every arm, and its tail."""
    figure = style.canvas(columns=2, width_in=10.5, height_in=5.0)
    whole, tail = figure.axes
    colors = colors_of(list(windows))
    lowest = 1.0
    everything: list[float] = []
    for name, each in windows.items():
        values = np.sort([gap_ms for window in each for gap_ms in window.itl_ms])
        if not values.size:
            continue
        everything += [_shown_from(values), float(values[-1])]
        share = np.arange(1, values.size + 1) / values.size
        longer = 1 - np.arange(values.size) / values.size
        lowest = min(lowest, float(longer[-1]))
        dashes: Any = (0, (4, 2)) if name.startswith("alone") else "-"
        whole.step(values, share, where="post", color=colors[name], linewidth=1.6, linestyle=dashes, label=labels[name])
        tail.step(values, longer, where="post", color=colors[name], linewidth=1.6, linestyle=dashes)
    tail.set_yscale("log")
    tail.set_ylim(max(lowest * 0.8, 1e-5), 1.1)
    tail.axhline(0.01, color=style.FAINT, linewidth=0.8, linestyle=(0, (3, 3)))
    tail.annotate("p99", (0, 0.01), xycoords=("axes fraction", "data"), xytext=(4, 3), textcoords="offset points",
                  fontsize=8.5, color=style.FAINT)  # fmt: skip
    for axes in (whole, tail):
        _log_axis(axes, everything, "x")
    whole.set_ylim(0, 1.02)
    style.label(whole, x="gap, ms (logarithmic)", y="share of gaps that are at most as long", title="distribution")
    style.label(tail, x="gap, ms (logarithmic)", y="share of gaps that are longer", title="tail")
    figure.legend(*whole.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return Picture(
        "itl_distribution",
        "Distribution of the gaps",
        "All gaps of the decoding requests in all windows. Left: cumulative distribution. Right: the same from above "
        "with a logarithmic share, which shows the tail; a curve crosses the dashed line at its p99.",
        figure,
        "Cumulative distribution of inter-token latency per arm, and its tail",
    )


def over_chunk(arms: Mapping[str, Mapping[str, Any]]) -> Picture:
    """TTFT of the long prompts, gaps of their neighbours, and throughput over the chunk size; ``off`` comes last."""
    figure = style.canvas(columns=3, width_in=11.0, height_in=3.9)
    ttft, gaps, rate = figure.axes
    places = range(len(arms))
    for axes, key, percents in (
        (ttft, "long_ttft_ms", ("p50", "p99")),
        (gaps, "itl_ms", ("p50", "p99", "max")),
    ):
        for number, percent in enumerate(percents):
            axes.plot(places, [arm[key][percent] for arm in arms.values()], color=style.PALETTE[number],
                      marker=style.MARKERS[number], markersize=5, linewidth=1.6, label=_PERCENTS[percent])  # fmt: skip
        style.legend(axes)
    ttft.set_ylim(bottom=0)
    _log_axis(gaps, [arm["itl_ms"][key] for arm in arms.values() for key in ("p50", "max")], "y")
    for number, (key, name) in enumerate((("tokens_per_s", "prompt and output"), ("output_tokens_per_s", "output"))):
        values = [Interval.from_dict(arm[key]) for arm in arms.values()]
        rate.errorbar(places, **style.vertical(values),
                      color=style.PALETTE[number], marker=style.MARKERS[number], markersize=5, capsize=3,
                      linewidth=1.6, label=name)  # fmt: skip
    rate.set_ylim(bottom=0)
    style.legend(rate, loc="lower left")
    for axes in figure.axes:
        axes.set_xticks(list(places), list(arms))
        axes.tick_params(axis="x", labelsize=8.5)
    style.label(ttft, x="chunk size, tokens", y="TTFT, ms", title="long prompts")
    style.label(gaps, x="chunk size, tokens", y="gap, ms (logarithmic)", title="gaps of neighbours")
    style.label(rate, x="chunk size, tokens", y="tokens per second", title="throughput")
    return Picture(
        "over_chunk",
        "Over the chunk size",
        "Left: how long the long prompts wait for their first token. Middle: the gaps between tokens of the requests "
        "that decode meanwhile. Right: throughput, the mean over windows with its 95 % interval. Off: prompts are "
        "computed whole.",
        figure,
        "Three line plots over the chunk size: TTFT, inter-token latency, throughput",
    )


def figures_table(
    title: str, arms: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str], caption: str
) -> TableBlock:
    """All figures of each arm."""
    header = ("arm", "windows", "ITL p50, ms", "p90", "p99", "max", "p99 by window, ms",
              "longest gap beside a long prompt, p50, ms", "long TTFT p50, ms", "p99", "output tokens/s",
              "prompt + output tokens/s")  # fmt: skip
    rows = []
    for name, arm in arms.items():
        itl, ttft = arm["itl_ms"], arm["long_ttft_ms"]
        rows.append(
            (
                labels[name],
                str(arm["windows"]),
                *(f"{itl[key]:.1f}" for key in ("p50", "p90", "p99", "max")),
                interval_text(arm["itl_p99_ms"], ".1f"),
                f"{arm['stall_ms']['p50']:.1f}" if arm["stall_ms"] else "–",
                *(f"{ttft[key]:.0f}" if ttft else "–" for key in ("p50", "p99")),
                *(interval_text(arm[key], ".1f") for key in ("output_tokens_per_s", "tokens_per_s")),
            )
        )
    return TableBlock(title, header, rows, caption)


def colors_of(arms: Sequence[str]) -> dict[str, str]:
    """A colour for each arm: fixed for whole prompts and for those that run apart, in turn for chunk sizes."""
    chunked = [name for name in arms if name not in _APART and not name.endswith("off")]
    colors = {name: _APART.get(name, _WHOLE) for name in arms}
    colors |= {name: _CHUNKED[number % len(_CHUNKED)] for number, name in enumerate(chunked)}
    if len(chunked) == 1:
        colors[chunked[0]] = style.COLOCATED
    return colors


def _shown_from(values: Any) -> float:
    """The shortest gap for which a logarithmic axis has room: half the 5th percentile. Tokens that arrive in a burst
    have gaps of next to nothing, to which most of the axis would go."""
    return float(np.percentile(values, 5)) / 2 if len(values) else 1.0


def _log_axis(axes: Any, values: Sequence[float], which: str) -> None:
    """A logarithmic axis around positive ``values`` with plain ticks at 1, 2 and 5 times powers of ten."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = max(min(positive) * 0.8, 0.1), max(positive) * 1.25
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    steps = (1, 2, 5) if high / low < 100 else (1, 3) if high / low < 1000 else (1,)
    ticks = [step * 10.0**power for power in range(-2, 7) for step in steps]
    style.plain_ticks(axes, [tick for tick in ticks if low <= tick <= high], which)
