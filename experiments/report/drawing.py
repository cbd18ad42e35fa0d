"""The one way in which experiments draw: tables and pictures are declared over data frames, and drawn when a report is
saved. All pictures have one visual language: the waterfall's colours for stages, a colour-blind-safe palette else."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pdserve.core.interval import interval_text

if TYPE_CHECKING:
    import pandas

INK, FAINT, GRID = "#1d2733", "#5f6b7a", "#e6e8eb"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
"""Okabe and Ito's colours, which remain distinct with any common colour vision deficiency."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHED, DOTTED = (0, (5, 2)), (0, (2, 3))
_DPI = 140

Records = Sequence[Mapping[str, Any]]
Look = Mapping[str, Any]
"""Properties of matplotlib's lines or bars."""
Looks = Mapping[Any, Look]
"""The look of each series by its name."""
ARM_LOOKS: Looks = {
    "pd": {"label": "disaggregated", "color": PALETTE[1], "marker": "o"},
    "colocated": {"label": "colocated", "color": PALETTE[0], "marker": "s", "linestyle": DASHED},
}
"""Disaggregated and colocated look the same in every picture."""


def frame_of(records: Records) -> pandas.DataFrame:
    """A row per record. What is nested has dotted columns: the interval ``gbs`` of a summary becomes ``gbs.mean``,
    ``gbs.lo``, ``gbs.hi`` and ``gbs.n``. What a record lacks is nan; other values stay what they are."""
    import pandas  # takes long

    return pandas.DataFrame([dict(_flat(record)) for record in records], dtype=object)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flat(each, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def cumulative(values: Mapping[str, Sequence[float]], *, percent: bool = False, longer: bool = False) -> Records:
    """The cumulative distribution of each series as records of ``series``, ``value`` and ``share``: of values that are
    at most as large, or ``longer``: at least as large."""
    found = []
    for series, each in values.items():
        n = len(each)
        for place, value in enumerate(sorted(each)):
            share = (n - place if longer else place + 1) / n
            found.append({"series": series, "value": float(value), "share": share * (100 if percent else 1)})
    return found


@dataclass(frozen=True, slots=True)
class Mark:
    """What a panel shows of records: column ``y`` over column ``x``, with error bars where a column is an interval."""

    data: Records
    x: str
    y: str
    by: str = ""
    """The column whose values are the series."""
    looks: Looks = field(default_factory=dict)
    """How the series with a value of ``by`` looks; others have a colour and a marker each, in turn."""
    look: Look = field(default_factory=dict)
    """How all of them look."""
    kind: Literal["line", "points", "steps", "bars", "area", "span"] = "line"
    """bars: horizontal, from column ``to`` or 0. area: from 0. span: horizontal, until column ``to``."""
    to: str = ""
    text: str = ""
    """The column with a note on each point, at ``note`` points from it."""
    note: tuple[float, float] = (4, 0)
    factor: float = 1.0
    """Times which ``y`` is drawn."""

    def draw(self, axes: Any, panel: Panel) -> None:
        """Draw it."""
        frame = frame_of(self.data)
        x, y = (_estimate(frame, key) for key in (self.x, self.y))
        if not {x, y} <= {*frame.columns}:
            return  # no record has it
        groups = frame.groupby(self.by, sort=False) if self.by else [(None, frame)]
        for color, marker, (name, rows) in zip(cycle(PALETTE), cycle(MARKERS), groups, strict=False):
            label = {} if name is None else {"label": str(name)}
            look = {"color": color, "marker": marker, **label, **self.look, **self.looks.get(name, {})}
            rows = rows.dropna(subset=[x, y])
            if self.kind in ("line", "steps") and not panel.rows:
                rows = rows.sort_values(x, kind="stable")
            self._draw_series(axes, panel, rows, look, x, y)

    def _draw_series(self, axes: Any, panel: Panel, rows: Any, look: Look, x: str, y: str) -> None:
        xerr, yerr = _errors(rows, self.x, 1.0), _errors(rows, self.y, self.factor)
        ys = [panel.rows.index(value) if panel.rows else value * self.factor for value in rows[y]]
        xs, to = list(rows[x]), list(rows[self.to]) if self.to else [0.0] * len(rows)
        drawn: Any = {"color": look["color"], "label": look.get("label")}
        if self.kind == "bars":
            height = look.get("height", 0.6)
            axes.barh(ys, xs, left=to, height=height, xerr=xerr, error_kw={"capsize": 4}, **drawn)
            above = [0.0] * len(rows) if xerr is None else np.nan_to_num(xerr[1])  # notes are right of the intervals
            xs = [max(start, start + x + more) for start, x, more in zip(to, xs, above, strict=True)]
        elif self.kind == "area":
            axes.fill_between(xs, ys, linewidth=0, step=look.get("step"), alpha=look.get("alpha"), **drawn)
        elif self.kind == "span":
            axes.hlines(ys, xs, to, linewidth=1.4, **drawn)
        else:
            usual = {"capsize": 3, "elinewidth": 1.2, "linewidth": 1.6, "markersize": 5}
            points = {"linestyle": "", "zorder": 3} if self.kind == "points" else {}
            steps = {"drawstyle": "steps-post", "marker": ""} if self.kind == "steps" else {}
            axes.errorbar(xs, ys, xerr=xerr, yerr=yerr, **{**usual, **look, **points, **steps})
        for text, *place in zip(rows[self.text], xs, ys, strict=True) if self.text else ():
            axes.annotate(text, place, xytext=self.note, textcoords="offset points",
                          va="bottom" if self.note[1] else "center", ha="center" if not self.note[0] else "left",
                          fontsize=8.5, color=INK, zorder=5)  # fmt: skip


def _estimate(frame: pandas.DataFrame, key: str) -> str:
    """The column ``key``, or that of its estimate if it is an interval."""
    return next((name for name in (f"{key}.median", f"{key}.mean") if f"{key}.lo" in frame and name in frame), key)


def _errors(frame: pandas.DataFrame, key: str, factor: float) -> Any:
    """How far an interval reaches below and above its estimate; None for other columns."""
    if f"{key}.lo" not in frame:
        return None
    edges = frame[[f"{key}.lo", _estimate(frame, key), f"{key}.hi"]].to_numpy(float)
    return np.diff(factor * edges, axis=1).T


def rows_picture(
    stem: str, title: str, caption: str, records: Records, row: str, looks: Looks, figures: Mapping[str, str]
) -> Picture:
    """A panel for each of ``figures`` (``title | unit`` by column), in which each record has a row: a dot with its
    interval, or of a distribution a dot at the median, a bar at p99, and a line between them."""
    ends = {name: {**look, "marker": "|", "markersize": 10, "markeredgewidth": 2} for name, look in looks.items()}
    panels = []
    for key, named in figures.items():
        name, _, unit = named.partition(" | ")
        marks: list[Mark | Rule] = [Mark(records, key, row, row, looks, kind="points")]
        if any("p99" in (record[key] or ()) for record in records):
            unit += " (dot: median, bar: p99)"
            marks = [
                Mark(records, f"{key}.p50", row, row, looks, kind="span", to=f"{key}.p99"),
                Mark(records, f"{key}.p50", row, row, looks, kind="points"),
                Mark(records, f"{key}.p99", row, row, ends, kind="points"),
            ]
        marks.append(Rule("x"))  # 0 is in the range whose share the margin is, so that no dot is cut off
        panels.append(Panel(marks, unit, title=name, rows=[record[row] for record in records], xlim=(0, None)))
    return Picture(stem, title, caption, panels, len(panels), share={"sharey": True})


@dataclass(frozen=True, slots=True)
class Rule:
    """A line across a panel: at ``at`` on the axis ``x`` or ``y``, or (``diagonal``) where both are equal."""

    axis: Literal["x", "y", "diagonal"]
    at: float = 0.0
    text: str = ""
    look: Look = field(default_factory=dict)

    def draw(self, axes: Any, panel: Panel) -> None:
        """Draw it."""
        dashes: Any = (0, (3, 3)) if self.at or self.axis == "diagonal" else "-"
        look = {"color": FAINT, "linewidth": 0.9, "linestyle": dashes, "zorder": 1, **self.look}
        text: Any = {"text": self.text, "textcoords": "offset points", "fontsize": 8.5, "color": look["color"]}
        if self.axis == "diagonal":
            axes.axline((0, 0), slope=1, **look)
        elif self.axis == "x":
            axes.axvline(self.at, **look)
            axes.annotate(**text, xy=(self.at, 0.98), xycoords=axes.get_xaxis_transform(), xytext=(-3, 0), rotation=90,
                          va="top", ha="right")  # fmt: skip
        else:
            axes.axhline(self.at, **look)
            axes.annotate(**text, xy=(0.01, self.at), xycoords=axes.get_yaxis_transform(), xytext=(0, 3))


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: what it shows, and how its axes are named."""

    marks: Sequence[Mark | Rule]
    x: str = ""
    y: str = ""
    title: str = ""
    log: str = ""
    """The logarithmic axes: ``x``, ``y``, ``xy``."""
    ticks: Sequence[float] = ()
    """Places of the ticks of the x axis; else matplotlib's, or 1, 2, 5, 10, … of a logarithmic one."""
    tick_text: Callable[[float], str] = "{:g}".format
    rows: Sequence[str] = ()
    """The values of ``y`` in the marks, from the top: the y axis has a row for each."""
    xlim: tuple[float | None, float | None] = (None, None)
    ylim: tuple[float | None, float | None] = (None, None)
    legend: str = ""
    """Where matplotlib is to put a legend; ``above`` or ``right``: outside the axes."""

    def show(self, axes: Any) -> None:
        """Draw the marks."""
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, labelcolor=INK, labelsize=9)
        for side, spine in axes.spines.items():
            spine.set(color="#c9ced6", visible=side in ("left", "bottom"))
        for mark in self.marks:
            mark.draw(axes, self)
        for axis in self.log:
            axes.set(**{f"{axis}scale": "log"})

    def finish(self, axes: Any) -> None:
        """Name and limit the axes, once panels that share them have their marks too."""
        from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

        axes.set(xlim=self.xlim, ylim=self.ylim)
        for name in self.log:
            axis, (low, high) = getattr(axes, f"{name}axis"), getattr(axes, f"get_{name}lim")()
            decades = math.log10(high / low)
            subs = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
            axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=30))
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if self.ticks:
            axes.xaxis.set_major_locator(FixedLocator(sorted(set(self.ticks))))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: self.tick_text(value)))
        if self.rows:
            axes.set_yticks(range(len(self.rows)), self.rows)
            axes.set_ylim(len(self.rows) - 0.4, -0.6)
        axes.set_xlabel(self.x, fontsize=9.5, color=FAINT)
        axes.set_ylabel(self.y, fontsize=9.5, color=FAINT)
        axes.set_title(self.title, loc="left", fontsize=11, fontweight="bold", color=INK)
        if self.legend:
            outside = {"above": {"loc": "lower left", "bbox_to_anchor": (0, 1.06 if self.title else 1), "ncols": 4},
                       "right": {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}}  # fmt: skip
            place: Any = outside.get(self.legend, {"loc": self.legend})
            axes.legend(frameon=False, fontsize=9, labelcolor=INK, **place)


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels in a grid, saved as ``stem.png``."""

    stem: str
    title: str
    caption: str
    panels: Sequence[Panel]
    columns: int = 1
    height_in: float | None = None
    """By default what its panels need."""
    share: Mapping[str, Any] = field(default_factory=dict)
    """``sharex`` and ``sharey`` of matplotlib's subplots."""
    legend: bool = False
    """Whether one legend below all panels names their series."""

    @property
    def alt(self) -> str:
        """What it shows, to readers who cannot see it."""
        axes = dict.fromkeys(f"{panel.y or 'rows'} over {panel.x}" for panel in self.panels if panel.x)
        return f"{self.title}: {'; '.join(axes)}"

    def draw(self) -> Any:
        """The matplotlib figure, without pyplot's global state."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = -(-len(self.panels) // self.columns)
        most = max(len(panel.rows) for panel in self.panels)
        height_in = self.height_in or rows * (0.4 * most + 1.4 if most else 4.2 if rows == 1 else 3.0)
        figure = Figure((7.0 + 1.5 * self.columns, height_in), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        grid = [*figure.subplots(rows, self.columns, squeeze=False, **self.share).flat]
        for panel, axes in zip(self.panels, grid, strict=False):
            panel.show(axes)
        for panel, axes in zip(self.panels, grid, strict=False):
            panel.finish(axes)
        for axes in grid[len(self.panels) :]:
            axes.set_visible(False)
        if self.legend:
            named: dict[str, Any] = {}
            for axes in grid[: len(self.panels)]:
                named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) | named
            columns = 4 if max(map(len, named), default=0) < 20 else 2
            figure.legend(named.values(), named, frameon=False, fontsize=9, ncols=columns, loc="outside lower center")
        return figure

    def file(self, kind: str = "png") -> bytes:
        """The content of a file with the picture: png, svg or pdf."""
        buffer = io.BytesIO()
        self.draw().savefig(buffer, format=kind, dpi=_DPI)
        return buffer.getvalue()

    def frame(self) -> pandas.DataFrame:
        """What the marks show. An interval has the column of its estimate, and ``lo``, ``hi`` and ``n``."""
        import pandas

        marks = [mark for panel in self.panels for mark in panel.marks if isinstance(mark, Mark)]
        joined = pandas.concat([frame_of(mark.data) for mark in marks])
        return joined.rename(columns=lambda name: re.sub(r"\.(mean|median)$|^.*\.(?=(lo|hi|n)$)", "", name))


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table of text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def table(title: str, records: Records, columns: Sequence[str], caption: str = "") -> TableBlock:
    """A row per record. Each of ``columns`` is ``header | column:format``, where the format is that of the column's
    numbers, after a factor if any: ``TTFT, ms | ttft.mean:.1f``, ``hits, % | hit_rate*100:.0f``. Several columns with
    `` / `` or a comma between them share a cell. What is missing is written –, and an interval with its edges."""
    split = [column.partition(" | ") for column in columns]
    rows = [[_cell(row, spec or header) for header, _, spec in split] for row in frame_of(records).to_dict("records")]
    return TableBlock(title, [header for header, *_ in split], rows, caption)


def _cell(row: Mapping[Any, Any], spec: str) -> str:
    between = " / " if " / " in spec else ", "
    parts = [_value(row, part) for part in spec.split(between)]
    return "–" if set(parts) == {"–"} else between.join(parts)


def _value(row: Mapping[Any, Any], spec: str) -> str:
    key, _, form = spec.partition(":")
    key, _, factor = key.partition("*")
    columns = {part: f"{key}.{part}" for part in ("median", "mean", "lo", "hi", "n")}
    known = {part: row[column] for part, column in columns.items() if not _missing(row.get(column))}
    if columns["lo"] in row and known.keys() & {"median", "mean"}:
        plain = {"lo": None, "hi": None, **known}
        return interval_text(plain, short if form == "short" else form, factor=float(factor or 1))
    value: Any = row.get(key)
    if _missing(value):
        return "–"
    if isinstance(value, bool):
        yes, no = form.split("|") if form else ("yes", "NO")
        return yes if value else no
    if isinstance(value, str):
        return value
    value *= float(factor) if factor else 1
    return short(value) if form == "short" else f"{value:{form}}"


def short(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _missing(value: Any) -> bool:
    return value is None or value != value  # nan
