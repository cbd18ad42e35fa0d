"""The figures of ``pdserve bench``, and its run folder (``--output``), which has the files of an experiment.

Rows are written while requests end, so that they outlive an interruption. There is one cell, `CELL`; its arms are the
modes that were asked for. Its facts say how each load went."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from experiments import environment
from experiments.bench_plan import BenchPlan, parse_percentiles
from experiments.environment import BUSY, OtherRequests
from experiments.experiment import Options, RunKind
from experiments.load import Lag, Load, Outcome
from experiments.matrix import PAIRS_CAPTION, pair_points, unclear_text
from experiments.modes import PD, SLO, added_ms, added_text, pairs_of
from experiments.report.drawing import (
    ARM_LOOKS,
    FAINT,
    INK,
    PALETTE,
    Looks,
    Mark,
    Panel,
    Picture,
    Rule,
    TableBlock,
    cumulative,
    table,
)
from experiments.report.page import Report, setup_of
from experiments.run_folder import (
    SETTINGS,
    Figures,
    FinishedCell,
    RequestRow,
    Rows,
    RunData,
    RunFolder,
    faults,
    stages_of,
    values_of,
)
from ops.machine_load import LOAD, beside_text
from ops.waterfall.bars import COLORS
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import CapacityExceeded, NotReady
from pdserve.core.interval import Interval
from pdserve.core.request import counted
from pdserve.core.timeline import Figure

CELL = "load"
_MOST_BARS = 400
_PACE = ("concurrency", "rate", "ramp", "speed", "burstiness", "max_concurrency")
FIGURES = {"ttft_ms": "TTFT", "ttft_decode_ms": "TTFT_DECODE", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


def distribution(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float] | None:
    """Statistics of a figure; None without values. ``std`` is the sample's (0 for a single value); percentiles are
    interpolated linearly and called ``p50``, ``p99.9``."""
    if not values:
        return None
    measured = np.asarray(values, float)
    return {
        "mean": float(measured.mean()),
        "std": float(measured.std(ddof=1)) if measured.size > 1 else 0.0,
        "min": float(measured.min()),
        "max": float(measured.max()),
        **{f"p{percent:g}": float(np.percentile(measured, percent)) for percent in percentiles},
        "count": measured.size,
    }


def row_of(outcome: Outcome, plan: BenchPlan, offset_s: float = 0.0) -> RequestRow:
    """The row of a request, whose times count from ``offset_s`` before its load. Conversations 2k and 2k+1 of pairs are
    the same one."""
    return RequestRow.of(
        outcome.generation,
        outcome.error,
        cell=CELL,
        arm=str(outcome.mode),
        repeat=0,
        index=outcome.index // 2 if plan.paired else outcome.index,
        turn=outcome.turn,
        scheduled_s=offset_s + outcome.scheduled_s,
        sent_s=offset_s + outcome.sent_s,
        others_cpu_s=outcome.others_cpu_s,
    )


def report_of(plan: BenchPlan, mode: str, load: Load, before: ServiceStatus) -> Figures:
    """What ``pdserve bench --json`` prints of a load; leaked blocks are not counted yet. ``planned`` is the number of
    requests that a complete run has at most."""
    rows = [row_of(outcome, plan) for outcome in load.outcomes]
    errors = [each.error for each in load.outcomes if each.error is not None]
    waits_s = [error.retry_after_s for error in errors if isinstance(error, CapacityExceeded | NotReady)]
    known_s = [each for each in waits_s if each is not None]
    others, slo, percentiles = OtherRequests.of(before), plan.objectives, parse_percentiles(plan.percentiles)
    judged = [row.since_due() if plan.scheduled else row for row in rows]
    modes = sorted({row.mode for row in rows} - {""})
    return {
        "workload": plan.workload.describe(),
        "mode": str(mode),
        "partial": load.stopped,
        **arm_figures(rows, {"duration_s": load.duration_s, "unsent": load.unsent}, slo, percentiles, plan.scheduled),
        "planned": len(rows) if plan.planned is None else plan.planned,
        "errors": sorted(set(map(str, errors))),
        "kv_bytes_wrong": sum(row.error is None and row.kv_bytes != row.kv_bytes_expected for row in rows),
        "refused": {"requests": len(waits_s), "retry_after_ms": statistics.median(known_s) * 1e3 if known_s else None},
        "lag": load.lag and asdict(load.lag),
        "scheduled": plan.scheduled,
        "busy": others and asdict(others),
        "slo_ms": slo and dict(slo.limits_ms),
        "leaked_blocks": None,
        LOAD: None,
        "by_mode": {name: _distributions([row for row in judged if row.mode == name], percentiles) for name in modes},
        "added_ms": {figure: added_ms(pairs_of(rows), figure) if plan.paired else None for figure in Figure},
    }


class BenchRecorder:
    """Writes a run of `run_bench` into a folder: environment, a row per request, and finally the cell."""

    def __init__(self, root: Path, plan: BenchPlan, target: str, status: ServiceStatus) -> None:
        """Makes the folder ``root/bench/stamp``; InvalidRequest if it cannot be made. The cell begins now."""
        self._plan = plan
        pace = {name: value for name in _PACE if (value := getattr(plan, name)) is not None}
        options = {
            "target": target,
            "workload": plan.workload.describe(),
            "pace": {name: "inf" if value == math.inf else value for name, value in pace.items()},
            "duration_s": plan.duration,
            "timeout_s": plan.timeout,
            **{name: getattr(plan, name) for name in ("requests", "warmup", "seed", "mode", "slo", "percentiles",
                                                      "paired", "scheduled")},
        }  # fmt: skip
        self.folder = RunFolder.create(root, BenchRun.name, options)
        self.folder.write_environment(
            {"machine": environment.machine(), "service": environment.service(status), "seed": plan.seed}
        )
        self._settings = environment.settings(status)
        self._begun_s = time.monotonic()
        self._load_begun_s: dict[str, float] = {}

    def record(self, outcome: Outcome) -> None:
        """Write the row of a request that has just ended."""
        load = "both" if self._plan.paired else str(outcome.mode)
        offset_s = self._load_begun_s.setdefault(load, time.monotonic() - outcome.ended_s - self._begun_s)
        self.folder.append(row_of(outcome, self._plan, offset_s))

    def finish(self, reports: Sequence[Figures]) -> None:
        """Write the cell; the last report has the leaked blocks and the machine's load."""
        keys = ("mode", "duration_s", "unsent", "partial", "planned")
        facts = {
            "loads": [{key: report[key] for key in keys} for report in reports],
            BUSY: [{"arm": each["mode"], **each["busy"]} for each in reports if each["busy"] is not None],
            "leaked_blocks": reports[-1]["leaked_blocks"],
            "workload": reports[0]["workload"],
            LOAD: reports[-1][LOAD],
            SETTINGS: self._settings,
        }
        duration_s = round(time.monotonic() - self._begun_s, 3)
        self.folder.finish_cell(FinishedCell(CELL, {"mode": self._plan.mode}, duration_s, facts))


class BenchRunOptions(Options):
    """What of a bench's options its summary depends on."""

    slo: str | None = Field(None, description="limits in ms")
    percentiles: str = Field("50,90,99", description="percentiles to report")
    paired: bool = Field(False, description="whether both modes were compared in pairs")
    scheduled: bool = Field(False, description="whether requests had times at which they were due")
    workload: str = Field("", description="what was sent, in one line")


class BenchRun(RunKind):
    """A run of ``pdserve bench``."""

    name = "bench"
    question = "How does the service respond to this load?"
    options_type = BenchRunOptions
    other_options = frozenset({"target", "pace", "requests", "duration_s", "warmup", "mode", "timeout_s"})
    options: BenchRunOptions

    def summarise(self, run: RunData) -> Figures:
        """``arms``, ``added_ms``, ``partial``, ``leaked_blocks``; see docs/bench.md. A run that was ended before its
        cell was written is partial. Latencies count from when requests were due, if they had such times."""
        options, loads, leaked = self.options, run.fact("loads", ()), run.fact("leaked_blocks")
        slo, percentiles = options.slo and SLO.parse(options.slo), parse_percentiles(options.percentiles)
        arms, failed = {}, []
        for arm in sorted({row.arm for row in run.rows}, key=lambda name: (name != PD, name)):
            load: Figures = next((each for each in loads if each["mode"] in (arm, "both")), {})
            rows = [row for row in run.rows if row.arm == arm]
            arms[arm] = arm_figures(rows, load, slo or None, percentiles, options.scheduled)
            failed += faults(arm, rows)
        return {
            "experiment": self.name,
            "workload": run.fact("workload", options.workload),
            "partial": not loads or any(load["partial"] for load in loads),
            "leaked_blocks": leaked,
            LOAD: run.fact(LOAD),
            "slo_ms": dict(slo.limits_ms) if slo else None,
            "arms": arms,
            "added_ms": {each: added_ms(pairs_of(run.rows), each) for each in Figure} if options.paired else None,
            "failed": [*failed, *([f"{leaked} KV blocks did not come back"] if leaked else [])],
        }

    def report(self, run: RunData, summary: Figures) -> Report:
        """CDFs of the latencies, means of the stages, throughput and requests over time, the differences of pairs, and
        the distributions."""
        figures, scheduled = summary["arms"], self.options.scheduled
        arms = {arm: [row for row in run.rows if row.arm == arm] for arm in figures}
        options = {**run.options, **run.options.get("pace", {})}
        how = [
            f"{name} {options[name]}"
            for name in (*_PACE, "duration_s", "warmup", "mode", "seed")
            if options.get(name) is not None
        ]
        late = [arm for arm, each in figures.items() if each["lag"] and each["lag"]["behind"]]
        unsent = sum(each["unsent"] for each in figures.values())
        caveats = [
            summary["partial"] and "The run was interrupted; only the requests that had ended are counted.",
            late != []
            and f"The load generator was behind its schedule ({', '.join(late)}). Latencies count from when a request "
            "was due, so they contain that wait.",
            unsent > 0
            and f"{unsent} requests were due and never sent{', and count as missing the SLO' if scheduled else ''}.",
            len(arms) > 1
            and not self.options.paired
            and "Each mode had the service to itself, one after the other; a drift of the machine is not averaged. "
            "There is a single load of each mode, so their difference has no interval; pairs (--mode both without a "
            "rate) have one.",
        ]
        blocks: list[Picture | TableBlock] = []
        if any(row.error is None for row in run.rows):
            judged = {arm: [row.since_due() if scheduled else row for row in rows] for arm, rows in arms.items()}
            blocks.append(_latency_picture(judged))
            if any(each["stages_ms"] for each in figures.values()):
                blocks.append(_stages_picture(figures))
            blocks.append(_time_picture(arms))
        if added := {figure: each for figure, each in (summary["added_ms"] or {}).items() if each is not None}:
            blocks += [_pairs_picture(added), _pairs_table(added)]
        blocks.append(latency_table(figures))
        setup = [*setup_of(run, ", ".join(how)), ("workload", summary["workload"])]
        return Report("Benchmark", self.question, _answer(summary, run), setup, blocks, caveats, summary["failed"])


def arm_figures(rows: Rows, load: Figures, slo: SLO | None, percentiles: Sequence[float], scheduled: bool) -> Figures:
    """The figures of the requests of a load. ``scheduled``: they had times at which they were due; latencies count from
    them, and requests that were never sent miss the SLO."""
    judged = [row.since_due() for row in rows] if scheduled else rows
    done = [row for row in judged if row.error is None]
    duration_s = load.get("duration_s")
    if duration_s is None:
        begun_s = min((row.sent_s for row in judged), default=0.0)
        duration_s = max(row.sent_s + (row.e2e_ms or 0.0) / 1e3 for row in judged) - begun_s
    unsent, lag = load.get("unsent", 0), None
    if scheduled:
        lag = Lag.between([row.scheduled_s for row in rows], [row.sent_s for row in rows])
    stages = {figure: stages_of(done, figure).fillna(0.0).mean().round(4).to_dict() for figure in Figure}
    prompt_tokens, output_tokens = (sum(values_of(done, key)) for key in ("prompt_tokens", "output_tokens"))

    def per_second(count: float) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    good = sum(slo.met_by(row) for row in judged) if slo else 0
    share = good / (len(rows) + unsent * scheduled) if rows else None
    return {
        "requests": len(rows),
        "failed": len(rows) - len(done),
        "failures": dict(Counter(row.error.partition(":")[0] for row in rows if row.error is not None)),
        "retried": sum(row.attempts > 1 for row in done),
        "planned": load.get("planned"),
        "duration_s": duration_s,
        "unsent": unsent,
        **_distributions(done, percentiles),
        "stages_ms": {figure.value: means for figure, means in stages.items() if means},
        "output_tokens_per_s": per_second(output_tokens),
        "total_tokens_per_s": per_second(output_tokens + prompt_tokens),
        "requests_per_s": per_second(len(done)),
        "goodput": slo and {"requests_per_s": per_second(good), "share": share},
        "lag": lag and asdict(lag),
    }


def _distributions(rows: Rows, percentiles: Sequence[float]) -> Figures:
    return {key: distribution(values_of(rows, key), percentiles) for key in FIGURES}


def _answer(summary: Figures, run: RunData) -> str:
    sentences = []
    for arm, each in summary["arms"].items():
        ttft, itl = each["ttft_ms"], each["itl_ms"]
        if ttft is None:
            sentences.append(f"{arm}: none of {counted(each['requests'], 'request')} succeeded.")
            continue
        gaps = "" if itl is None else f" and the gaps between tokens {itl['mean']:.1f} ms"
        good = "" if each["goodput"] is None else f"; {100 * each['goodput']['share']:.0f} % met the SLO"
        rates = f"{each['requests_per_s']:.2f} requests/s and {each['output_tokens_per_s']:.1f} output tokens/s, "
        if summary["added_ms"] is not None:  # modes that take turns have no rates of their own
            rates = ""
        sentences.append(
            f"{arm}: {rates}TTFT was {ttft['mean']:.1f} ms{gaps} on average, over "
            f"{counted(each['requests'], 'request')}{good}."
        )
    added = [(summary["added_ms"] or {}).get(figure) for figure in Figure]
    if clauses := [added_text(f"token {number}", each) for number, each in enumerate(added, 1) if each is not None]:
        beside = f" ({text})" if (text := beside_text(summary)) else ""
        sentences.append(f"In pairs of the same request{beside}, {' and '.join(clauses)}.")
        sentences.append(unclear_text({**summary, "added_ttft_ms": summary["added_ms"]}, run, "more --requests"))
    return " ".join(filter(None, sentences)) or "No request ended."


def _color(arm: str) -> Any:
    """That of a mode in every picture."""
    return ARM_LOOKS.get(arm, {"color": PALETTE[2]})["color"]


def _latency_picture(arms: Mapping[str, Rows]) -> Picture:
    """The cumulative distributions of TTFT, ITL and E2E, a line per mode."""
    looks: Looks = {arm: {"color": _color(arm)} for arm in arms}
    panels: list[Panel] = []
    for key in ("ttft_ms", "itl_ms", "e2e_ms"):
        shares = cumulative({arm: values_of(rows, key) for arm, rows in arms.items()}, percent=True)
        marks, legend = [Mark(shares, "value", "share", "series", looks, kind="steps")], "" if panels else "lower right"
        panels.append(Panel(marks, "ms", "share, %", FIGURES[key], xlim=(0, None), ylim=(0, 101), legend=legend))
    caption = "Share of the requests (ITL: of the gaps) that were at most so long."
    return Picture("cdf", "Distributions of the latencies", caption, panels, 3, 3.6, {"sharey": True})


def _stages_picture(arms: Mapping[str, Figures]) -> Picture:
    """The mean breakdown of each figure, one bar per mode and figure."""
    bars = []
    for figure, (arm, each) in itertools.product(Figure, arms.items()):
        at_ms = 0.0
        for stage, ms in each["stages_ms"].get(figure, {}).items():
            if ms > 0:
                bars.append({"row": f"{figure} · {arm}", "stage": stage, "ms": ms, "from": at_ms})
                at_ms += ms
    looks = {bar["stage"]: {"color": COLORS.get(bar["stage"], FAINT)} for bar in bars}
    marks, rows = [Mark(bars, "ms", "row", "stage", looks, kind="bars", to="from")], {bar["row"]: 0 for bar in bars}
    caption = (
        "Mean of every stage of the breakdown of token 1 (ttft) and token 2 (ttft_decode). Stages with a negative "
        "mean, which clock offsets can cause, are in the summary only."
    )
    panel, height_in = Panel(marks, "ms from the client's call, mean", rows=[*rows]), 0.55 * len(rows) + 2.2
    return Picture("stages", "Where the time goes", caption, [panel], height_in=height_in, legend=True)


def _time_picture(arms: Mapping[str, Rows]) -> Picture:
    """Above, each request from sending to its end, with token 1 marked; below, generated tokens per second."""
    tops, belows = [], []
    for arm, rows in arms.items():
        ordered = sorted(rows, key=lambda row: row.sent_s)
        begun_s, color = ordered[0].scheduled_s, _color(arm)
        spans: list[Figures] = []
        for number in range(0, len(ordered), -(-len(ordered) // _MOST_BARS)):
            row, sent_s = ordered[number], ordered[number].sent_s - begun_s
            first_s, end_s = (sent_s + (ms or 0.0) / 1e3 for ms in (row.ttft_ms, row.e2e_ms))
            times = {"sent": sent_s, "first": first_s, "end": end_s} if row.error is None else {"failed": sent_s}
            spans.append({"number": number, **times})
        marks = [
            Mark(spans, "sent", "number", kind="span", to="first", look={"color": "#c9ced6"}),
            Mark(spans, "first", "number", kind="span", to="end", look={"color": color}),
            Mark(spans, "failed", "number", kind="points", look={"color": INK, "marker": "x"}),
        ]
        tops.append(Panel(marks, y="request", title=arm, ylim=(max(map(len, arms.values())), -1)))
        times_s = np.concatenate([row.token_times_s for row in rows]) - begun_s
        longest_s = float(times_s.max(initial=0.0))
        width_s = max(0.25, longest_s / 60)
        counts, edges = np.histogram(times_s, np.arange(0.0, longest_s + 2 * width_s, width_s))
        rates = [{"s": at_s, "rate": count / width_s} for at_s, count in zip(edges, [*counts, 0], strict=True)]
        tokens = Mark(rates, "s", "rate", kind="area", look={"color": color, "step": "post", "alpha": 0.75})
        belows.append(Panel([tokens], "s since the load began", "output tokens/s"))
    sample = " (a sample of the requests)" if any(len(rows) > _MOST_BARS for rows in arms.values()) else ""
    return Picture(
        "over_time",
        "Over time",
        f"Above: each request, grey until token 1 and coloured from there to its end; × is a failed request{sample}. "
        "Below: generated tokens per second.",
        [*tops, *belows],
        columns=len(arms),
        share={"sharex": "col", "sharey": "row"},
    )


def _pairs_picture(added: Mapping[str, Figures]) -> Picture:
    """The differences of the pairs in their order, with median and interval."""
    panels = []
    for figure, each in added.items():
        median = Interval.from_dict(each)
        edges = [Rule("y", edge, look={"color": INK}) for edge in (median.lo, median.hi) if median.known]
        points = pair_points(each, range(1, median.n + 1), PALETTE[0])
        marks: list[Mark | Rule] = [
            points,
            Rule("y"),
            *edges,
            Rule("y", median.value, look={"color": INK, "linestyle": "-"}),
        ]
        panels.append(Panel(marks, "pair", "pd - colocated, ms", f"added {figure}: {median.text()}"))
    return Picture(
        "pairs",
        "Differences of the pairs",
        "Each point is a pair, disaggregated minus colocated, in the order of sending; hollow ones are those beside "
        "which other processes used the machine. Pairs far beyond the others are drawn at the edge. The line is the "
        "median, dashed lines are its 95 % interval.",
        panels,
        columns=2,
    )


def _pairs_table(added: Mapping[str, Figures]) -> TableBlock:
    """The added times of pairs."""
    records = [
        {**each, "figure": figure, "added": each,
         "disturbed": None if each["disturbed"] is None else len(each["disturbed"])}
        for figure, each in added.items()
    ]  # fmt: skip
    columns = "figure", "pairs | n", "added, ms | added:+", "its mean, ms | mean:+.2f", "disturbed pairs | disturbed"
    return table("Added by disaggregation", records, columns, PAIRS_CAPTION)


def latency_table(parts: Mapping[str, Figures]) -> TableBlock:
    """The distributions of every latency, in milliseconds, by mode or what else the ``parts`` are called."""
    names = next((each[key] for each in parts.values() for key in FIGURES if each[key]), {"mean": 0.0, "count": 0})
    records = [
        {"figure": "" if number else title, "mode": part, **(each[key] or {"count": 0})}
        for key, title in FIGURES.items()
        for number, (part, each) in enumerate(parts.items())
    ]
    columns = ("ms | figure", "mode", *(f"{name} | {name}:{'.0f' if name == 'count' else '.2f'}" for name in names))
    return table("Latencies", records, columns)
