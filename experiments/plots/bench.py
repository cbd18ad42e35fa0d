"""Pictures of a run of `pdserve bench`, drawn from its rows and summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.plots import style
from experiments.report.page import Picture
from experiments.request_row import RequestRow
from ops.waterfall.bars import COLORS
from pdserve.core.timeline import Figure

_MOST_BARS = 400

Arms = Mapping[str, Sequence[RequestRow]]


def latency_cdfs(arms: Arms) -> Picture:
    """The cumulative distributions of TTFT, ITL and E2E, a line per mode."""
    figure = style.canvas(columns=3, width_in=11.0, height_in=3.6, sharey=True)
    for axes, (key, name) in zip(figure.axes, (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "E2E")), strict=True):
        for arm, rows in arms.items():
            values = [
                value
                for row in rows
                if row.error is None and (found := getattr(row, key)) is not None
                for value in (found if key == "itl_ms" else (found,))
            ]
            if values:
                ordered = np.sort(np.asarray(values, float))
                share = np.arange(1, ordered.size + 1) / ordered.size * 100
                axes.step(ordered, share, where="post", color=_color(arm), linewidth=1.7, label=arm)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 101)
        style.label(axes, x="ms", y="share, %" if axes is figure.axes[0] else "", title=name)
    style.legend(figure.axes[0], loc="lower right")
    return Picture(
        "cdf",
        "Distributions of the latencies",
        "Share of the requests (ITL: of the gaps) that were at most so long.",
        figure,
        "Cumulative distributions of TTFT, ITL and E2E",
    )


def stage_means(arms: Mapping[str, Mapping[str, Any]]) -> Picture:
    """The mean breakdown of each figure, one bar per mode and figure."""
    bars = [
        (arm, figure.value, each["stages_ms"][figure.value])
        for figure in Figure
        for arm, each in arms.items()
        if figure.value in each["stages_ms"]
    ]
    figure = style.canvas(width_in=9.0, height_in=0.55 * len(bars) + 2.2)
    axes = figure.axes[0]
    shown: set[str] = set()
    for row, (_, _, stages) in enumerate(bars):
        at_ms = 0.0
        for name, value in stages.items():
            if value <= 0:
                continue
            axes.barh(row, value, left=at_ms, color=COLORS.get(name, style.FAINT), height=0.6,
                      label=None if name in shown else name)  # fmt: skip
            shown.add(name)
            at_ms += value
    axes.set_yticks(range(len(bars)), [f"{key} · {arm}" for arm, key, _ in bars])
    axes.invert_yaxis()
    style.label(axes, x="ms from the client's call, mean", y="")
    axes.legend(frameon=False, fontsize=8.5, ncols=5, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    return Picture(
        "stages",
        "Where the time goes",
        "Mean of every stage of the breakdown of token 1 (ttft) and token 2 (ttft_decode). Stages with a negative "
        "mean, which clock offsets can cause, are in the summary only.",
        figure,
        "Stacked bars of the mean stages",
    )


def over_time(arms: Arms) -> Picture:
    """Above, each request from sending to its end, with token 1 marked; below, generated tokens per second."""
    figure = style.canvas(columns=len(arms), rows=2, width_in=max(7.0, 5.5 * len(arms)), height_in=5.6, sharex="col",
                          sharey="row")  # fmt: skip
    count = len(arms)
    for column, (arm, rows) in enumerate(arms.items()):
        top, below = figure.axes[column], figure.axes[count + column]
        ordered = sorted(rows, key=lambda row: row.sent_s)
        begun_s = ordered[0].scheduled_s
        step = -(-len(ordered) // _MOST_BARS)
        for number, row in enumerate(ordered):
            if number % step:
                continue
            sent_s = row.sent_s - begun_s
            if row.error is not None or row.e2e_ms is None or row.ttft_ms is None:
                top.plot([sent_s], [number], marker="x", color=style.INK, markersize=4)
                continue
            first_s, end_s = sent_s + row.ttft_ms / 1e3, sent_s + row.e2e_ms / 1e3
            top.plot([sent_s, first_s], [number, number], color="#c9ced6", linewidth=1.4, solid_capstyle="butt")
            top.plot([first_s, end_s], [number, number], color=_color(arm), linewidth=1.4, solid_capstyle="butt")
        if column == 0:
            top.invert_yaxis()
        times_s = np.asarray([at_s - begun_s for row in rows for at_s in _token_times_s(row)], float)
        if times_s.size:
            width_s = max(0.25, float(times_s.max()) / 60)
            edges = np.arange(0.0, float(times_s.max()) + width_s, width_s)
            counts, edges = np.histogram(times_s, edges if edges.size > 1 else 2)
            below.stairs(counts / width_s, edges, color=_color(arm), fill=True, alpha=0.75)
        style.label(top, x="", y="request" if column == 0 else "", title=arm)
        style.label(below, x="s since the load began", y="output tokens/s" if column == 0 else "")
    return Picture(
        "over_time",
        "Over time",
        "Above: each request, grey until token 1 and coloured from there to its end; × is a failed request"
        f"{'' if all(len(rows) <= _MOST_BARS for rows in arms.values()) else ' (a sample of the requests)'}. Below: "
        "generated tokens per second.",
        figure,
        "Requests as bars over time, and the throughput over time",
    )


def _token_times_s(row: RequestRow) -> list[float]:
    if row.error is not None or row.ttft_ms is None or not row.output_tokens:
        return []
    return list(row.sent_s + np.cumsum([row.ttft_ms, *row.itl_ms]) / 1e3)


def _color(arm: str) -> str:
    return {"pd": style.PD, "colocated": style.COLOCATED}.get(arm, style.PALETTE[2])
