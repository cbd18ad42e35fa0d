"""Pictures of `experiments.added_ttft`, drawn from the cells of its summary."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.machine_load import beside_text
from experiments.plots import style
from experiments.report.page import Picture
from ops.waterfall.bars import COLORS
from pdserve.core.interval import Interval
from pdserve.core.timeline import UNATTRIBUTED, Figure

Cell = Mapping[str, Any]
_UNEXPLAINED = "unexplained"
"""What is unattributed and, of pairs, the distance of the middle half's mean from the median."""


def waterfall_of_causes(cell: Cell) -> Picture:
    """The colocated ``ttft_decode``, what each stage adds to it, and the disaggregated one, which is both together."""
    idle = cell["load"] == "idle"
    plain = cell["added_ttft_ms"][Figure.TTFT_DECODE.value]
    added = Interval.from_dict(plain)
    colocated_ms = cell["middle_colocated_ms" if idle else "arms_ms"]
    if not idle:
        colocated_ms = colocated_ms["colocated"][Figure.TTFT_DECODE.value]
    pd_ms = colocated_ms + added.value
    causes = [(name, value) for name, value in cell["causes_ms"].items() if abs(value) >= 0.005]
    causes.append((_UNEXPLAINED, cell["unexplained_ms"]))
    figure = style.canvas(height_in=0.36 * (len(causes) + 2) + 1.3)
    axes = figure.axes[0]
    names = ["colocated", *(name for name, _ in causes), "disaggregated"]
    axes.barh(0, colocated_ms, color=style.COLOCATED, height=0.68)
    at_ms = colocated_ms
    for row, (name, value) in enumerate(causes, 1):
        axes.barh(row, value, left=at_ms, color=COLORS.get(name, COLORS[UNATTRIBUTED]), height=0.68)
        axes.plot([at_ms, at_ms], [row - 0.66, row + 0.34], color=style.FAINT, linewidth=0.7)
        right = max(at_ms, at_ms + value)
        axes.annotate(
            f"{value:+.2f}", (right, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5
        )
        at_ms += value
    axes.barh(len(causes) + 1, pd_ms, color=style.PD, height=0.68)
    for row, value in ((0, colocated_ms), (len(causes) + 1, pd_ms)):
        axes.annotate(
            f"{value:.2f}", (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    edges = [*itertools.accumulate((value for _, value in causes), initial=colocated_ms), pd_ms]
    margin = max(0.5 * (max(edges) - min(edges)), 0.5)
    low = max(0.0, min(edges) - margin)
    axes.set_xlim(low, max(edges) + margin)
    cut = " (axis starts later than 0)" if low else ""
    style.label(axes, x=f"ms until token 2 is at the client{cut}", y="")
    where = [f"{cell['prompt_len']} tokens", cell["transport"], *([] if idle else [f"{cell['rate']:g} requests/s"])]
    where += filter(None, (beside_text(cell),))
    means = f"Means over {cell['n']} requests of each arm"
    if idle:
        means = (
            f"Means over the middle half of {cell['n']} pairs, whose differences lie around the median; disaggregated "
            "is colocated and the median difference"
        )
    return Picture(
        "causes" if idle else "causes_under_load",
        f"From colocated to disaggregated, stage by stage ({', '.join(where)})",
        f"{means}. Each bar is the difference of one stage between the arms. Together they are the added ttft_decode "
        f"of {added.text()}, except for {cell['unexplained_ms']:+.2f} ms that no stage explains." + _claim(added),
        figure,
        "Waterfall of the differences between colocated and disaggregated requests by stage",
    )


def _claim(added: Interval) -> str:
    """What a picture of causes says where there may be nothing to explain."""
    return "" if added.sign else " As no difference could be measured, its causes may be chance."


def over_length(cells: Sequence[Cell]) -> Picture:
    """Added ``ttft`` and ``ttft_decode`` over the prompt length, one line per transport and overlap."""
    figure = style.canvas(columns=2, width_in=10.0, sharey=False)
    lengths = sorted({cell["prompt_len"] for cell in cells})
    for axes, key in zip(figure.axes, Figure, strict=True):
        for number, (name, series) in enumerate(_series(cells).items()):
            points = [Interval.from_dict(cell["added_ttft_ms"][key.value]) for cell in series]
            for cell in series:
                _differences(axes, cell, key, number)
            axes.errorbar(
                [cell["prompt_len"] for cell in series],
                **style.vertical(points),
                color=style.PALETTE[number % len(style.PALETTE)],
                marker=style.MARKERS[number % len(style.MARKERS)],
                markersize=5, capsize=3, linewidth=1.6, label=name,
            )  # fmt: skip
        axes.axhline(0, color=style.FAINT, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
        style.plain_ticks(axes, lengths)
        style.label(axes, x="prompt length, tokens", y="added, ms", title=f"added {key.value}")
    style.legend(figure.axes[0])
    return Picture(
        "added_over_length",
        "Added latency over prompt length",
        "Median of the paired differences, disaggregated minus colocated, with 95 % intervals. Faint points are the "
        "pairs, hollow ones those beside which other processes used the machine; triangles at the edge stand for pairs "
        "beyond it. Left: token 1, which does not wait for the hand-off. Right: token 2, which does.",
        figure,
        "Two line plots of added latency over prompt length",
    )


def predicted_and_achieved(cells: Sequence[Cell]) -> Picture:
    """Exposed transfer time: what arithmetic gives, and what was measured."""
    figure = style.canvas(width_in=5.6, height_in=4.6)
    axes = figure.axes[0]
    known = [cell for cell in cells if cell["predicted_ms"] is not None]
    for number, (name, series) in enumerate(_series(known).items()):
        axes.scatter(
            [cell["predicted_ms"] for cell in series],
            [cell["achieved_ms"] for cell in series],
            color=style.PALETTE[number % len(style.PALETTE)],
            marker=style.MARKERS[number % len(style.MARKERS)],
            s=34, label=name, zorder=3,
        )  # fmt: skip
    limit = 1.1 * max(max(cell["predicted_ms"], cell["achieved_ms"]) for cell in known)
    axes.plot([0, limit], [0, limit], color=style.FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, limit)
    axes.set_ylim(0, limit)
    style.label(axes, x="predicted exposed time, ms", y="measured exposed time, ms")
    style.legend(axes)
    return Picture(
        "predicted",
        "Predicted against measured",
        "The prediction is the prompt's bytes over the link's measured ceiling, in the parts of the overlap mode, plus "
        "the fixed cost of a hand-off measured with one block. Points on the dashed line are explained by arithmetic; "
        "points above it waited for something else.",
        figure,
        "Scatter plot of predicted and measured exposed transfer time",
    )


def three_times(cells: Sequence[Cell]) -> Picture:
    """Exposed, wire and request-to-ready time of every cell: three figures that are easily confused."""
    figure = style.canvas(height_in=0.34 * len(cells) + 1.6)
    axes = figure.axes[0]
    kinds = (("achieved_ms", "exposed"), ("wire_ms", "on the wire"), ("request_to_ready_ms", "request to ready"))
    for number, (key, name) in enumerate(kinds):
        axes.scatter([cell[key] for cell in cells], range(len(cells)), color=style.PALETTE[number],
                     marker=style.MARKERS[number], s=34, label=name, zorder=3)  # fmt: skip
    axes.set_yticks(range(len(cells)), [f"{c['prompt_len']} · {c['transport']} · {c['overlap']}" for c in cells])
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=0)
    style.label(axes, x="ms (logarithmic above 1)", y="")
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return Picture(
        "three_times",
        "Exposed, wire, and request-to-ready time",
        "Exposed is what the request waits for after its prompt is computed. The wire time is spent on moving bytes, "
        "most of it hidden behind the prefill. Request-to-ready spans from decode's allocation to the last block, and "
        "so contains the prefill.",
        figure,
        "Dot plot of three transfer times per cell",
    )


def over_width(cells: Sequence[Cell]) -> Picture:
    """Added ``ttft_decode`` over the bytes of KV that a request moves."""
    figure = style.canvas(width_in=6.4)
    axes = figure.axes[0]
    for number, cell in enumerate(cells):
        added = Interval.from_dict(cell["added_ttft_ms"][Figure.TTFT_DECODE.value])
        megabytes = cell["kv_bytes"] / cell["n"] / 1e6
        axes.errorbar(
            megabytes, added.value, yerr=[[each] for each in added.errors],
            color=style.PALETTE[number % len(style.PALETTE)], marker=style.MARKERS[number % len(style.MARKERS)],
            markersize=6, capsize=3,
        )  # fmt: skip
        axes.annotate(cell["width"].upper(), (megabytes, added.value), xytext=(7, 5), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_xlim(*(factor * cell for factor, cell in zip(
        (0.6, 1.8), (f(c["kv_bytes"] / c["n"] / 1e6 for c in cells) for f in (min, max)), strict=True)))  # fmt: skip
    style.label(axes, x="KV per request, MB", y="added ttft_decode, ms")
    return Picture(
        "over_width",
        f"KV width ({cells[0]['prompt_len']} tokens, {cells[0]['transport']})",
        "The same model with as many KV heads as heads (MHA), a third (GQA), the size of a latent cache (MLA), and one "
        "(MQA).",
        figure,
        "Added latency over the size of the KV cache",
    )


def first_tokens(usual: Cell, late: Cell) -> Picture:
    """Added ``ttft`` and ``ttft_decode`` with both settings of ``router.first_token``."""
    figure = style.canvas(width_in=6.4, height_in=3.6)
    axes = figure.axes[0]
    for number, (name, cell) in enumerate((("prefill", usual), ("decode", late))):
        points = [Interval.from_dict(cell["added_ttft_ms"][each.value]) for each in Figure]
        axes.errorbar(
            [row + 0.14 * (2 * number - 1) for row in range(len(points))],
            **style.vertical(points),
            color=style.PALETTE[number], marker=style.MARKERS[number], markersize=7, capsize=4, linestyle="none",
            label=f"router.first_token: {name}",
        )  # fmt: skip
    axes.axhline(0, color=style.FAINT, linewidth=0.8)
    axes.set_xticks(range(len(Figure)), ["token 1 (ttft)", "token 2 (ttft_decode)"])
    axes.set_xlim(-0.5, len(Figure) - 0.5)
    style.label(axes, x="", y="added, ms")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return Picture(
        "first_tokens",
        f"Who sends token 1 ({usual['prompt_len']} tokens, {usual['transport']})",
        "With prefill, the client gets token 1 as soon as it is sampled. With decode, it gets token 1 once the KV has "
        "arrived, as in services that discard prefill's token: then token 1 pays for the hand-off.",
        figure,
        "Added latency of token 1 and token 2 with both settings",
    )


def attainment_over_rate(cells: Sequence[Cell]) -> Picture:
    """The share of requests that met the SLO over the rate, both arms: a column per prompt length, a row per transport
    and overlap."""
    lengths = sorted({cell["prompt_len"] for cell in cells})
    places = _series(cells)
    figure = style.canvas(columns=len(lengths), rows=len(places), width_in=max(6.0, 4.2 * len(lengths)),
                          height_in=0.6 + 3.2 * len(places), sharey=True)  # fmt: skip
    for axes, (place, length) in zip(figure.axes, itertools.product(places, lengths), strict=True):
        series = sorted((c for c in places[place] if c["prompt_len"] == length), key=lambda cell: cell["rate"])
        rates = [cell["rate"] for cell in series]
        style.attainment(axes, rates, {
            name: [cell["attainment"][arm] for cell in series]
            for arm, name in (("pd", "disaggregated"), ("colocated", "colocated"))
        })  # fmt: skip
        style.label(
            axes, x="offered load, requests/s", y="requests that meet the SLO, %" if length == lengths[0] else "",
            title=f"{length} tokens" + (f" · {place}" if len(places) > 1 else ""),
        )  # fmt: skip
    style.legend(figure.axes[0])
    return Picture(
        "attainment",
        "How many requests meet the SLO under load",
        "Share of all requests, with 95 % intervals; failed requests miss the SLO. The dashed line is the 90 % above "
        "which an arm sustains the load.",
        figure,
        "Line plots of attainment over the offered load",
    )


def _series(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    series: dict[str, list[Cell]] = {}
    for cell in cells:
        series.setdefault(f"{cell['transport']} · {cell['overlap']}", []).append(cell)
    return series


def _differences(axes: Any, cell: Cell, figure: Figure, number: int) -> None:
    """The single differences behind a median, a little to its right; hollow where the pair was disturbed. Those more
    than eight times as far from the median as the middle half are drawn at that distance, as triangles."""
    added = cell["added_ttft_ms"][figure.value]
    differences_ms, hollow = added["differences_ms"], added["disturbed"] or ()
    lower, upper = np.percentile(differences_ms, (25, 75))
    reach = 8 * max(float(upper - lower), 0.5)
    low, high = added["median"] - reach, added["median"] + reach
    color = style.PALETTE[number % len(style.PALETTE)]
    for place, ms in enumerate(differences_ms):
        marker = "^" if ms > high else "v" if ms < low else "o"
        axes.plot(cell["prompt_len"] * 1.06, min(max(ms, low), high), marker=marker, markersize=3.2, alpha=0.45,
                  color=color, markerfacecolor="none" if place in hollow else color, zorder=1)  # fmt: skip
