"""Pictures of `experiments.primer`, drawn from its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.plots import style
from experiments.report.page import Picture
from pdserve.core.interval import Interval

Plain = Mapping[str, Any]

_DASHED = (0, (4, 3))
_PUBLISHED = "published (T4 GPU)"


def with_and_without(cache: Plain) -> Picture:
    """Seconds of the whole generation beside the published ones, and the time of each token."""
    figure = style.canvas(columns=2, width_in=10.0, height_in=3.8)
    left, right = figure.axes
    arms = (("without", "without KV cache", style.PALETTE[1]), ("with", "with KV cache", style.PALETTE[0]))
    _totals(left, [(name, color, cache["total_s"][arm], cache["published_s"][arm]) for arm, name, color in arms])
    for number, (arm, name, color) in enumerate(arms):
        times = cache["token_ms"][arm]
        first = cache["prompt_len"]
        right.plot(
            [first + at for at in range(len(times))], times,
            color=color, linewidth=1.6, label=name, marker=style.MARKERS[number], markersize=3.5,
            markevery=max(1, len(times) // 8),
        )  # fmt: skip
    right.set_ylim(0, 1.3 * max(max(times) for times in cache["token_ms"].values()))
    style.label(right, x="tokens before this one", y="time of one token, ms", title="each token")
    style.legend(right)
    return Picture(
        "kv_cache",
        f"Generation with and without a KV cache ({cache['prompt_len']} + {cache['output_len']} tokens)",
        "Left: the whole generation, mean of the repeats with 95 % intervals (often smaller than the mark), beside the "
        "published figures. Right: mean time of each token. Without a cache every token computes the whole sequence "
        f"before it; with a cache only the first one does. Together {cache['gflop']['without']:.1f} GFLOP against "
        f"{cache['gflop']['with']:.1f}.",
        figure,
        "Total time and time per token, with and without a KV cache",
    )


def phases(profile: Plain) -> Picture:
    """Seconds of prefill and decode beside the published ones, and the time per token of each."""
    figure = style.canvas(columns=2, width_in=10.0, height_in=3.6)
    left, right = figure.axes
    names = {
        "prefill": f"prefill of {profile['prompt_len']} tokens",
        "decode": f"decode of {profile['output_len'] - 1} tokens",
    }
    colors = {"prefill": style.PALETTE[2], "decode": style.PALETTE[3]}
    _totals(
        left,
        [(names[phase], colors[phase], profile["total_s"][phase], profile["published_s"][phase]) for phase in names],
    )
    for row, phase in enumerate(names):
        _dot(right, row, profile["token_ms"][phase], colors[phase])
        right.annotate(
            f"{profile['token_ms'][phase]['mean']:.3g} ms", (profile["token_ms"][phase]["mean"], row),
            xytext=(0, 9), textcoords="offset points", ha="center", fontsize=9, color=style.INK,
        )  # fmt: skip
    right.set_yticks(range(len(names)), ["prefill", "decode"])
    right.set_ylim(len(names) - 0.5, -0.5)
    _decades(right, [profile["token_ms"][phase]["mean"] for phase in names])
    style.label(right, x="time per token, ms (logarithmic)", y="", title="per token")
    return Picture(
        "phases",
        f"Prefill and decode of one request ({profile['prompt_len']} + {profile['output_len']} tokens)",
        "Mean with 95 % intervals (often smaller than the mark). Left: both phases beside the published figures. "
        "Right: the same per token. Prefill computes many tokens with each weight that it reads; decode reads all "
        "weights for one token.",
        figure,
        "Total time and time per token of prefill and decode",
    )


def step_time(summary: Plain) -> Picture:
    """Time of a decode step over batch size and over context."""
    figure = style.canvas(columns=2, width_in=10.0, height_in=4.2, sharey=True)
    left, right = figure.axes
    points = summary["decode"]
    contexts, batches = _values(points, "context"), _values(points, "batch")
    for number, context in enumerate(contexts):
        series = _where(points, "context", context)
        _line(left, [p["batch"] for p in series], [p["time_ms"] for p in series], number, f"context {context}")
        left.plot([p["batch"] for p in series], [p["roof_ms"] for p in series],
                  color=style.PALETTE[number], linewidth=1, linestyle=_DASHED)  # fmt: skip
        ridge = next(each for each in summary["ridge"] if each["context"] == context)
        if ridge["doubling_batch"] is not None:
            left.plot([ridge["doubling_batch"]["mean"]], [2 * series[0]["time_ms"]["mean"]], marker="*",
                      markersize=13, color=style.PALETTE[number], markeredgecolor="white", zorder=4)  # fmt: skip
    left.plot([], [], color=style.FAINT, linewidth=1, linestyle=_DASHED, label="least time (roofline)")
    left.plot([], [], color=style.FAINT, marker="*", markersize=11, linestyle="", label="twice batch 1")
    shown = batches if len(batches) <= 4 else batches[:: math.ceil(len(batches) / 4)]
    for number, batch in enumerate(shown):
        series = _where(points, "batch", batch)
        _line(right, [p["context"] for p in series], [p["time_ms"] for p in series], number, f"batch {batch}")
    for axes, values, name in ((left, batches, "batch size, requests"), (right, contexts, "context, tokens")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        style.plain_ticks(axes, values)
        if len(values) == 1:
            axes.set_xlim(values[0] / 2, values[0] * 2)
        style.label(axes, x=f"{name} (logarithmic)", y="time of a decode step, ms" if axes is left else "")
    _plain_decades(
        left, [p[key] if key == "roof_ms" else p[key]["mean"] for p in points for key in ("time_ms", "roof_ms")]
    )
    style.legend(left)
    style.legend(right)
    return Picture(
        "step_time",
        "Time of a decode step over batch size and context",
        "Mean of the repeats (each the median of several steps) with 95 % intervals. Left: as long as reading the "
        "weights takes longest, a further request costs little; stars mark where the step takes twice as long as with "
        "one request. Dashed: the least time that the measured product and read rates allow. Right: the same points "
        "over the context, whose keys and values every step reads.",
        figure,
        "Two line plots of the time of a decode step",
    )


def saturation(summary: Plain) -> Picture:
    """Tokens per second over batch size, with what they approach."""
    figure = style.canvas(width_in=7.0, height_in=4.4)
    axes = figure.axes[0]
    points = summary["decode"]
    batches = _values(points, "batch")
    for number, context in enumerate(_values(points, "context")):
        series = _where(points, "context", context)
        _line(axes, [p["batch"] for p in series], [p["tokens_per_s"] for p in series], number, f"context {context}")
        ridge = next(each for each in summary["ridge"] if each["context"] == context)
        if ridge["saturated_tokens_per_s"] is not None:
            axes.axhline(ridge["saturated_tokens_per_s"]["mean"], color=style.PALETTE[number], linewidth=1,
                         linestyle=_DASHED)  # fmt: skip
    axes.axvline(summary["machine"]["ridge_batch"], color=style.FAINT, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        f"ridge by formula: {summary['machine']['ridge_batch']:.1f}", (summary["machine"]["ridge_batch"], 0.02),
        xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points", fontsize=8.5, color=style.FAINT,
    )  # fmt: skip
    axes.plot([], [], color=style.FAINT, linewidth=1, linestyle=_DASHED, label="1 ÷ time per further request")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    style.plain_ticks(axes, batches)
    style.label(axes, x="batch size, requests (logarithmic)", y="tokens per second")
    style.legend(axes, 2, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    return Picture(
        "saturation",
        "Tokens per second over batch size",
        "Mean with 95 % intervals. Dashed: what the rate approaches by the line time = fixed + each · batch. Dotted: "
        "the ridge batch by the formula, product rate ÷ read rate × bytes of a number ÷ 2.",
        figure,
        "Line plot of tokens per second over batch size",
    )


def roofline(summary: Plain) -> Picture:
    """Reached FLOP/s over intensity, below the roofs of the device."""
    figure = style.canvas(width_in=8.0, height_in=5.0)
    axes = figure.axes[0]
    machine = summary["machine"]
    peak, read, ridge = machine["peak_gflops"], machine["read_gbs"], machine["ridge_flops_per_byte"]
    points = [*summary["prefill"], *summary["decode"]]
    low = min([ridge, *(p["intensity"] for p in points)]) / 2
    high = max([ridge, *(p["intensity"] for p in points)]) * 2
    axes.plot([low, ridge, high], [low * read["mean"], peak["mean"], peak["mean"]], color=style.INK, linewidth=1.6)
    if peak["lo"] is not None and read["lo"] is not None:
        lower, upper = ([low * read[edge], peak[edge], peak[edge]] for edge in ("lo", "hi"))
        corner = peak["lo"] / read["lo"]
        axes.fill_between([low, corner, high], lower, upper, color=style.INK, alpha=0.12, linewidth=0)
    axes.annotate(f"products: {peak['mean']:.0f} GFLOP/s", (high, peak["mean"]), xytext=(-4, 5),
                  textcoords="offset points", ha="right", fontsize=9, color=style.INK)  # fmt: skip
    middle = math.sqrt(low * ridge)
    axes.annotate(f"reading: {read['mean']:.1f} GB/s", (middle, middle * read["mean"]), xytext=(-10, 8),
                  textcoords="offset points", ha="right", fontsize=9, color=style.INK)  # fmt: skip
    axes.plot([ridge, ridge], [0, peak["mean"]], color=style.FAINT, linewidth=1, linestyle=(0, (1, 2)))
    contexts = _values(summary["decode"], "context")
    for number, context in enumerate(contexts):
        series = _where(summary["decode"], "context", context)
        _cloud(axes, series, number, f"decode, context {context}")
        if number == 0:
            _name(axes, series, "batch", (6, -11))
    if summary["prefill"]:
        _cloud(axes, summary["prefill"], len(contexts), "prefill")
        _name(axes, summary["prefill"], "tokens", (-6, 7))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    reached = [p["reached_gflops"] for p in points]
    axes.set_ylim(min([*reached, low * read["mean"]]) / 2, peak["mean"] * 2)
    axes.annotate(f"ridge {ridge:.1f}", (ridge, 0.02), xycoords=("data", "axes fraction"), xytext=(4, 0),
                  textcoords="offset points", fontsize=8.5, color=style.FAINT)  # fmt: skip
    _plain_decades(axes, axes.get_ylim())
    _plain_decades(axes, (low, high), "x")
    style.label(axes, x="intensity, FLOP per byte (logarithmic)", y="reached, GFLOP/s (logarithmic)")
    style.legend(axes, loc="lower right")
    return Picture(
        "roofline",
        "Roofline",
        "Points are steps of the engine: FLOPs and bytes from the model's shape, the time measured. Numbers are the "
        f"batch of a decode step (at context {contexts[0] if contexts else '–'}) and the tokens of a prefill. No step "
        "can be above the roofs, which are the device's measured read rate times the intensity, and its measured "
        "product rate (shaded: 95 % intervals).",
        figure,
        "Roofline plot with points for prefill and decode",
    )


def _totals(axes: Any, rows: Sequence[tuple[str, str, Plain, float]]) -> None:
    """Measured and published seconds of each row, as dots on a logarithmic axis."""
    for row, (_, color, total, published_s) in enumerate(rows):
        _dot(axes, row, total, color)
        axes.annotate(
            f"{total['mean']:.3g} s", (total["mean"], row), xytext=(0, 9), textcoords="offset points", ha="center",
            fontsize=9, color=style.INK, zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
        axes.plot([published_s, published_s], [row - 0.3, row + 0.3], color=style.FAINT, linewidth=1.4,
                  linestyle=_DASHED, label=_PUBLISHED if row == 0 else None)  # fmt: skip
        axes.annotate(
            f"{published_s:g} s", (published_s, row + 0.3), xytext=(0, -10), textcoords="offset points", ha="center",
            fontsize=8.5, color=style.FAINT,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _decades(axes, [seconds for row in rows for seconds in (row[2]["mean"], row[3])])
    style.label(axes, x="seconds (logarithmic)", y="", title="in all")
    style.legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _dot(axes: Any, row: int, plain: Plain, color: str) -> None:
    point = Interval.from_dict(plain)
    axes.errorbar(
        [point.value], [row], xerr=[[each] for each in point.errors], color=color, marker="o",
        markersize=8, capsize=4, linestyle="",
    )  # fmt: skip


def _line(axes: Any, xs: Sequence[float], plain: Sequence[Plain], number: int, name: str) -> None:
    points = [Interval.from_dict(each) for each in plain]
    axes.errorbar(
        xs, **style.vertical(points),
        color=style.PALETTE[number % len(style.PALETTE)], marker=style.MARKERS[number % len(style.MARKERS)],
        markersize=5, capsize=3, linewidth=1.6, label=name,
    )  # fmt: skip


def _cloud(axes: Any, points: Sequence[Plain], number: int, name: str) -> None:
    axes.scatter(
        [p["intensity"] for p in points], [p["reached_gflops"] for p in points],
        color=style.PALETTE[number % len(style.PALETTE)], marker=style.MARKERS[number % len(style.MARKERS)],
        s=34, label=name, zorder=3,
    )  # fmt: skip


def _name(axes: Any, points: Sequence[Plain], key: str, offset: tuple[int, int]) -> None:
    for point in points:
        axes.annotate(
            str(point[key]), (point["intensity"], point["reached_gflops"]), xytext=offset,
            textcoords="offset points", fontsize=8, color=style.FAINT,
        )  # fmt: skip


def _values(points: Sequence[Plain], key: str) -> list[int]:
    return sorted({point[key] for point in points})


def _where(points: Sequence[Plain], key: str, value: int) -> list[Plain]:
    return [point for point in points if point[key] == value]


def _decades(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic x axis with room around ``values`` and plain ticks."""
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * 3)
    _plain_decades(axes, (min(values) / 3, max(values) * 3), "x")


def _plain_decades(axes: Any, values: Sequence[float], which: str = "y") -> None:
    """Ticks of a logarithmic axis over the range of ``values``: powers of ten, and between them as many as fit."""
    low, high = math.log10(min(values)), math.log10(max(values))
    steps = (1, 2, 5) if high - low < 2 else (1, 3) if high - low < 3 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    style.plain_ticks(axes, [tick for tick in ticks if 10**low <= tick <= 10**high], which)
