"""Pictures that any run may have, from one or several runs: ``pdserve plot``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.plots import style
from experiments.report.page import Picture
from experiments.run_folder import RunData
from experiments.statistics import mean_interval
from pdserve.core.interval import Interval
from pdserve.core.timeline import STAGE_NAMES, Figure

_MOST_STAGES = 6


@dataclass(frozen=True, slots=True)
class Source:
    """A run. ``label`` names it among several; it is empty if there is only one."""

    label: str
    run: RunData
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture and its data as a table: the first columns name the series."""

    stem: str
    title: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    draw: Callable[[], Any]

    def picture(self) -> Picture:
        """It, drawn."""
        return Picture(self.stem, self.title, self.caption, self.draw())


def drawings(sources: Sequence[Source]) -> list[Drawing]:
    """Everything that the runs have data for."""
    return [each for make in (_exposed, _goodput, _stages) if (each := make(sources)) is not None]


def _exposed(sources: Sequence[Source]) -> Drawing | None:
    points: list[tuple[str, int, float, float, float, int]] = []
    for source in sources:
        values: dict[tuple[str, int], list[float]] = {}
        for cell in source.run.cells:
            what = cell.parameters
            if "prompt_len" not in what or what.get("load") != "idle" or "width" in what or "first_token" in what:
                continue
            keys = ("workers", "transport", "overlap")
            name = " · ".join(filter(None, (source.label, *(str(what[key]) for key in keys if key in what))))
            found = [
                float(row.transfer["exposed_ms"])
                for row in source.run.rows_of(cell.cell, "pd")
                if row.error is None and "exposed_ms" in row.transfer
            ]
            values.setdefault((name, int(what["prompt_len"])), []).extend(found)
        for (name, length), measured in sorted(values.items()):
            interval = mean_interval(measured)
            if interval is not None:
                points.append((name, length, interval.value, interval.lo, interval.hi, interval.n))
    if not points:
        return None

    def draw() -> Any:
        figure = style.canvas(width_in=8.0, height_in=4.4)
        axes = figure.axes[0]
        _lines(axes, [(name, length, (mean, lo, hi)) for name, length, mean, lo, hi, _ in points])
        axes.set_xscale("log", base=2)
        style.plain_ticks(axes, sorted({point[1] for point in points}))
        axes.set_ylim(bottom=0)
        style.label(axes, x="prompt length, tokens", y="exposed transfer, ms")
        _outside_legend(axes)
        return figure

    return Drawing(
        "exposed_over_length",
        "Exposed transfer over prompt length",
        "Mean time that a disaggregated request on an idle service waits for its KV after the prompt is computed, with "
        "95 % intervals.",
        ("series", "prompt_len", "exposed_ms", "lo", "hi", "n"),
        points,
        draw,
    )


def _goodput(sources: Sequence[Source]) -> Drawing | None:
    """A panel per combination of parameters, in it a line per arm and run."""
    points: list[tuple[str, str, str, float, float, float, float]] = []
    for source in sources:
        for cell in source.summary.get("cells", ()):
            if not isinstance(cell, Mapping) or not isinstance(cell.get("goodput_rps"), Mapping):
                continue
            rate = cell["rate"] if "rate" in cell else cell["rate_per_device"] * cell["devices"]
            where = [str(cell[key]) for key in ("workers", "split", "transport", "overlap") if key in cell]
            where += [f"{cell['prompt_len']} tokens"] if "prompt_len" in cell else []
            for arm, good in cell["goodput_rps"].items():
                if good is not None:
                    name = " · ".join(where)
                    interval = Interval.from_dict(good)
                    points.append((name, source.label, arm, float(rate), interval.value, interval.lo, interval.hi))
    if not points:
        return None

    def draw() -> Any:
        panels = list(dict.fromkeys(point[0] for point in points))
        runs = list(dict.fromkeys(point[1] for point in points))
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure = style.canvas(
            columns, rows, width_in=max(6.4, 3.5 * columns), height_in=2.7 * rows + 0.9, sharey=True, sharex=True
        )
        rates = sorted({point[3] for point in points})
        for place, (axes, panel) in enumerate(zip(figure.axes, panels, strict=False)):
            for run, arm in dict.fromkeys((point[1], point[2]) for point in points if point[0] == panel):
                own = sorted(point[3:] for point in points if point[:3] == (panel, run, arm))
                at = runs.index(run)
                axes.errorbar(
                    [rate for rate, *_ in own],
                    [mean for _, mean, _, _ in own],
                    yerr=[[mean - lo for _, mean, lo, _ in own], [hi - mean for _, mean, _, hi in own]],
                    color=style.PD if arm == "pd" else style.COLOCATED, marker=style.MARKERS[at % len(style.MARKERS)],
                    linestyle=("-", (0, (5, 2)), (0, (1, 1.5)))[at % 3], markersize=4, capsize=2, linewidth=1.5,
                    label=" · ".join(filter(None, (run, arm))),
                )  # fmt: skip
            axes.plot([0, rates[-1]], [0, rates[-1]], color=style.FAINT, linewidth=0.9, linestyle=(0, (2, 3)))
            axes.set_xlim(0, rates[-1] * 1.06)
            axes.set_ylim(bottom=-0.02 * rates[-1])
            style.plain_ticks(axes, rates)
            lowest = place + columns >= len(panels)
            axes.tick_params(labelbottom=lowest)
            style.label(
                axes,
                x="offered load, requests/s" if lowest else "",
                y="goodput, requests/s" if place % columns == 0 else "",
            )
            axes.set_title(panel, loc="left", fontsize=9, color=style.INK)
        _common_legend(figure, len(panels))
        return figure

    return Drawing(
        "goodput_over_rate",
        "Goodput over rate",
        "Requests per second that meet the SLO, with 95 % intervals. On the dotted line every request meets it.",
        ("parameters", "run", "arm", "rate", "goodput_rps", "lo", "hi"),
        points,
        draw,
    )


def _stages(sources: Sequence[Source]) -> Drawing | None:
    values: dict[str, dict[str, list[float]]] = {}
    for source in sources:
        for row in source.run.rows:
            for name, value in row.stages_ms.get(Figure.TTFT_DECODE.value, {}).items():
                if name in STAGE_NAMES:
                    series = " · ".join(filter(None, (source.label, row.arm)))
                    values.setdefault(name, {}).setdefault(series, []).append(float(value))
    means = {name: max(float(np.mean(each)) for each in series.values()) for name, series in values.items()}
    chosen = [name for name in STAGE_NAMES if name in sorted(means, key=lambda n: -means[n])[:_MOST_STAGES]]
    if not chosen:
        return None
    rows = [
        (name, series, value, place / len(measured))
        for name in chosen
        for series, measured in values[name].items()
        for place, value in enumerate(sorted(measured), 1)
    ]

    def draw() -> Any:
        columns = min(3, len(chosen))
        height = -(-len(chosen) // columns)
        figure = style.canvas(columns, height, width_in=3.6 * columns, height_in=2.7 * height + 0.5, sharey=True)
        names = list(dict.fromkeys(series for name in chosen for series in values[name]))
        for axes, name in zip(figure.axes, chosen, strict=False):
            for series, measured in values[name].items():
                ordered = np.sort(np.asarray(measured, float))
                share = np.arange(1, ordered.size + 1) / ordered.size * 100
                axes.step(ordered, share, where="post", color=_color(series, names), linewidth=1.6, label=series)
            axes.set_ylim(0, 101)
            style.label(axes, x="ms", y="requests, %" if axes.get_subplotspec().is_first_col() else "", title=name)
        _common_legend(figure, len(chosen))
        return figure

    return Drawing(
        "stage_cdfs",
        "Distributions of the stages",
        "The longest stages of ttft_decode: the share of the requests of all cells whose stage took at most so long.",
        ("stage", "series", "ms", "share"),
        rows,
        draw,
    )


def _lines(axes: Any, points: Sequence[tuple[str, float, tuple[float, float, float]]]) -> None:
    """One line with intervals per series; ``points`` are series, x, and mean, lo, hi."""
    names = list(dict.fromkeys(name for name, _, _ in points))
    for number, name in enumerate(names):
        own = sorted((x, each) for series, x, each in points if series == name)
        axes.errorbar(
            [x for x, _ in own],
            [mean for _, (mean, _, _) in own],
            yerr=[[mean - lo for _, (mean, lo, _) in own], [hi - mean for _, (mean, _, hi) in own]],
            color=style.PALETTE[number % len(style.PALETTE)],
            marker=style.MARKERS[number % len(style.MARKERS)],
            linestyle=("-", (0, (5, 2)), (0, (1, 1.5)))[number // len(style.PALETTE) % 3],
            markersize=5, capsize=3, linewidth=1.5, label=name,
        )  # fmt: skip


def _common_legend(figure: Any, used: int) -> None:
    """One legend below all axes, of which those after the first ``used`` are hidden."""
    for axes in figure.axes[used:]:
        axes.set_visible(False)
    found: dict[str, Any] = {}
    for axes in figure.axes[:used]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    longest = max(map(len, found), default=0)
    figure.legend(
        list(found.values()), list(found), frameon=False, fontsize=9, ncols=4 if longest < 20 else 2,
        loc="outside lower center",
    )  # fmt: skip


def _outside_legend(axes: Any) -> None:
    """A legend above the axes, which covers no line."""
    axes.legend(frameon=False, fontsize=8.5, ncols=2, labelcolor=style.INK, loc="lower left", bbox_to_anchor=(0, 1.0))


def _color(series: str, names: Sequence[str]) -> str:
    fixed = {"pd": style.PD, "colocated": style.COLOCATED}
    return fixed.get(series) or style.PALETTE[names.index(series) % len(style.PALETTE)]
