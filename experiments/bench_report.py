"""The figures of ``pdserve bench``, and its run folder (``--output``), which has the files of an experiment.

Rows are written while requests end, so that they outlive an interruption. There is one cell, `CELL`; its arms are the
modes that were asked for. Its facts say how each load went."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from experiments import environment
from experiments.bench_plan import PERCENTILES, BenchPlan
from experiments.environment import BUSY, OtherRequests
from experiments.experiment import Options, RunKind
from experiments.load import Lag, Load, Outcome
from experiments.modes import PD, SLO, added_ms, added_text, pairs_of
from experiments.report.drawing import (
    ARM_LOOKS,
    FAINT,
    INK,
    PALETTE,
    Look,
    Mark,
    Panel,
    Picture,
    TableBlock,
    cumulative,
    table,
)
from experiments.report.page import Report, setup_of
from experiments.run_folder import (
    LAG,
    Figures,
    FinishedCell,
    Parameters,
    RequestRow,
    RunData,
    RunFolder,
    failures,
    unexpected_bytes,
)
from ops.machine_load import LOAD, beside_text
from ops.waterfall.bars import COLORS
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady
from pdserve.core.request import counted_requests
from pdserve.core.timeline import STAGE_NAMES, UNATTRIBUTED, Figure

CELL = "load"
_MOST_BARS = 400
_TOKENS = (("token 1", Figure.TTFT), ("token 2", Figure.TTFT_DECODE))
FIGURES = {"ttft_ms": "TTFT", "ttft_decode_ms": "TTFT_DECODE", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


def parse_percentiles(text: str) -> tuple[float, ...]:
    """``50,90,99.9`` in ascending order; `InvalidRequest` unless all are between 0 and 100."""
    try:
        numbers = sorted({float(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < 100 for number in numbers):
        raise InvalidRequest(f"percentiles: {text!r} is not a list of numbers between 0 and 100, like 50,90,99")
    return tuple(numbers)


def distribution(values: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> dict[str, float] | None:
    """Statistics of a figure; None without values. ``std`` is the sample's (0 for a single value); percentiles are
    interpolated linearly and called ``p50``, ``p99.9``."""
    if not values:
        return None
    measured = np.asarray(values, float)
    std = float(measured.std(ddof=1)) if measured.size > 1 else 0.0
    edges = {"mean": float(measured.mean()), "std": std, "min": float(measured.min()), "max": float(measured.max())}
    named = {f"p{percent:g}": float(np.percentile(measured, percent)) for percent in percentiles}
    return {**edges, **named, "count": measured.size}


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
    )


def report_of(plan: BenchPlan, mode: str, load: Load, before: ServiceStatus) -> dict[str, Any]:
    """What ``pdserve bench --json`` prints of a load; leaked blocks are not counted yet. ``planned`` is the number of
    requests that a complete run has at most."""
    rows = [row_of(outcome, plan) for outcome in load.outcomes]
    refusals = [each.error for each in load.outcomes if isinstance(each.error, CapacityExceeded | NotReady)]
    waits_s = [error.retry_after_s for error in refusals if error.retry_after_s is not None]
    others = OtherRequests.of(before)
    facts = {"duration_s": load.duration_s, "unsent": load.unsent}
    slo, judged = plan.slo, [row.since_due() if plan.scheduled else row for row in rows]
    by_mode = {name: [row for row in judged if row.mode == name] for name in sorted({row.mode for row in rows} - {""})}
    return {
        "workload": plan.workload.describe(),
        "mode": str(mode),
        "partial": load.stopped,
        **arm_figures(rows, facts, slo, plan.percentiles, plan.scheduled),
        "planned": len(rows) if plan.planned is None else plan.planned,
        "errors": sorted({str(each.error) for each in load.outcomes if each.error is not None}),
        "kv_bytes_wrong": sum(row.error is None and row.kv_bytes != row.kv_bytes_expected for row in rows),
        "refused": {"requests": len(refusals), "retry_after_ms": statistics.median(waits_s) * 1e3 if waits_s else None},
        "lag": None if load.lag is None else asdict(load.lag),
        "scheduled": plan.scheduled,
        "busy": None if others is None else asdict(others),
        "slo_ms": None if slo is None else dict(slo.limits_ms),
        "leaked_blocks": None,
        LOAD: None,
        "by_mode": {name: _distributions(of_mode, plan.percentiles) for name, of_mode in by_mode.items()},
        "added_ms": {figure: added_ms(pairs_of(rows), figure) if plan.paired else None for figure in Figure},
    }


class BenchRecorder:
    """Writes a run of `run_bench` into a folder: environment, a row per request, and finally the cell."""

    def __init__(self, root: Path, plan: BenchPlan, target: str) -> None:
        """Makes the folder ``root/bench/stamp``; InvalidRequest if it cannot be made."""
        self._plan = plan
        pace = {name: value for name, value in asdict(plan.pace).items() if value is not None}
        if "ramp" in pace:
            pace["ramp"] = list(pace["ramp"])
        plain = ("requests", "duration_s", "warmup", "seed", "paired", "scheduled", "timeout_s")
        options: dict[str, Any] = {
            "target": target,
            "workload": plan.workload.describe(),
            "pace": {name: "inf" if value == float("inf") else value for name, value in pace.items()},
            "mode": str(plan.mode),
            "slo": None if plan.slo is None else plan.slo.text,
            "percentiles": ",".join(f"{each:g}" for each in plan.percentiles),
            **{name: getattr(plan, name) for name in plain},
        }
        self.folder = RunFolder.create(root, BenchRun.name, options)
        self._begun_s = time.monotonic()
        self._load_begun_s: dict[str, float] = {}

    def begin(self, status: ServiceStatus) -> None:
        """Write ``env.json``. The cell begins now."""
        self.folder.write_environment(
            {"machine": environment.machine(), "service": environment.service(status), "seed": self._plan.seed}
        )
        self._begun_s = time.monotonic()

    def record(self, outcome: Outcome) -> None:
        """Write the row of a request that has just ended."""
        load = "both" if self._plan.paired else str(outcome.mode)
        offset_s = self._load_begun_s.setdefault(load, time.monotonic() - outcome.ended_s - self._begun_s)
        self.folder.append(row_of(outcome, self._plan, offset_s))

    def finish(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Write the cell; the last report has the leaked blocks and the machine's load."""
        facts = {
            "loads": [
                {key: report[key] for key in ("mode", "duration_s", "unsent", "partial", "planned")}
                for report in reports
            ],
            BUSY: [{"arm": each["mode"], **each["busy"]} for each in reports if each["busy"] is not None],
            "leaked_blocks": reports[-1]["leaked_blocks"],
            "workload": reports[0]["workload"],
            LOAD: reports[-1][LOAD],
        }
        duration_s = round(time.monotonic() - self._begun_s, 3)
        self.folder.finish_cell(FinishedCell(CELL, {"mode": str(self._plan.mode)}, duration_s, facts))


class BenchRunOptions(Options):
    """What of a bench's options its summary depends on."""

    slo: str | None = Field(None, description="limits in ms")
    percentiles: str = Field(",".join(f"{each:g}" for each in PERCENTILES), description="percentiles to report")
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

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``arms``, ``added_ms``, ``partial``, ``leaked_blocks``; see docs/bench.md. A run that was ended before its
        cell was written is partial. Latencies count from when requests were due, if they had such times."""
        facts: Parameters = run.cells[0].facts if run.cells else {}
        loads: Sequence[Mapping[str, Any]] = facts.get("loads", ())
        slo = None if self.options.slo is None else SLO.parse(self.options.slo)
        percentiles = parse_percentiles(self.options.percentiles)
        arms = {}
        for arm in sorted({row.arm for row in run.rows}, key=lambda name: (name != PD, name)):
            load = next((each for each in loads if each["mode"] in (arm, "both")), {})
            rows = [row for row in run.rows if row.arm == arm]
            arms[arm] = arm_figures(rows, load, slo, percentiles, self.options.scheduled)
        summary: dict[str, Any] = {
            "experiment": self.name,
            "workload": facts.get("workload", self.options.workload),
            "partial": not loads or any(load["partial"] for load in loads),
            "leaked_blocks": facts.get("leaked_blocks"),
            LOAD: facts.get(LOAD),
            "slo_ms": None if slo is None else dict(slo.limits_ms),
            "arms": arms,
            "added_ms": _added(run.rows) if self.options.paired else None,
        }
        failed = [each for arm in arms for each in failures(arm, (row for row in run.rows if row.arm == arm))]
        failed += [
            f"{arm}: {wrong}" for arm in arms if (wrong := unexpected_bytes(row for row in run.rows if row.arm == arm))
        ]
        if summary["leaked_blocks"]:
            failed.append(f"{summary['leaked_blocks']} KV blocks did not come back")
        return {**summary, "failed": failed}

    def report(self, run: RunData, summary: Figures) -> Report:
        """CDFs of the latencies, means of the stages, throughput and requests over time, and the distributions."""
        arms = {arm: [row for row in run.rows if row.arm == arm] for arm in summary["arms"]}
        judged = arms
        if self.options.scheduled:
            judged = {arm: [row.since_due() for row in rows] for arm, rows in arms.items()}
        options = {**run.options, **run.options.get("pace", {})}
        how = [f"{name} {options[name]}" for name in ("concurrency", "rate", "ramp", "speed", "burstiness",
               "max_concurrency", "duration_s", "warmup", "mode", "seed") if options.get(name) is not None]  # fmt: skip
        setup = [*setup_of(run, ", ".join(how)), ("workload", summary["workload"])]
        report = Report(
            title="Benchmark",
            question=self.question,
            answer=_answer(summary),
            setup=setup,
            caveats=_caveats(summary, self.options.paired, self.options.scheduled),
            failures=summary["failed"],
        )
        if any(row.error is None for row in run.rows):
            report.blocks.append(_latency_picture(judged))
            if any(each["stages_ms"] for each in summary["arms"].values()):
                report.blocks.append(_stages_picture(summary["arms"]))
            report.blocks.append(_time_picture(arms))
        report.blocks.append(latency_table(summary["arms"]))
        return report


def arm_figures(
    rows: Sequence[RequestRow],
    load: Mapping[str, Any],
    slo: SLO | None,
    percentiles: Sequence[float],
    scheduled: bool,
) -> dict[str, Any]:
    """The figures of the requests of a load. ``scheduled``: they had times at which they were due; latencies count from
    them, and requests that were never sent miss the SLO."""
    judged = [row.since_due() for row in rows] if scheduled else rows
    done = [row for row in judged if row.error is None]
    ends_s = [row.sent_s + (row.e2e_ms or 0.0) / 1e3 for row in judged]
    begun_s = min((row.sent_s for row in judged), default=0.0)
    duration_s = float(load["duration_s"] if "duration_s" in load else max(ends_s) - begun_s)
    unsent, output_tokens = int(load.get("unsent", 0)), sum(row.output_tokens for row in done)
    lag = Lag.between([row.scheduled_s for row in rows], [row.sent_s for row in rows]) if scheduled else None
    due = len(rows) + (unsent if scheduled else 0)

    def per_second(count: float) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    goodput = None
    if slo is not None:
        good = sum(slo.met_by(row) for row in judged)
        goodput = {"requests_per_s": per_second(good), "share": good / due if rows else None}
    return {
        "requests": len(rows),
        "failed": len(rows) - len(done),
        "failures": dict(Counter((row.error or "").partition(":")[0] for row in rows if row.error is not None)),
        "planned": load.get("planned"),
        "duration_s": duration_s,
        "unsent": unsent,
        **_distributions(done, percentiles),
        "stages_ms": _stages(done),
        "output_tokens_per_s": per_second(output_tokens),
        "total_tokens_per_s": per_second(output_tokens + sum(row.prompt_tokens for row in done)),
        "requests_per_s": per_second(len(done)),
        "goodput": goodput,
        "lag": None if lag is None else asdict(lag),
    }


def _distributions(rows: Sequence[RequestRow], percentiles: Sequence[float]) -> dict[str, Any]:
    return {key: distribution(_values(rows, key), percentiles) for key in FIGURES}


def _values(rows: Sequence[RequestRow], key: str) -> list[float]:
    """A figure of the rows that have it; of gaps all of them."""
    found = [value for row in rows if row.error is None and (value := getattr(row, key)) is not None]
    return [gap for gaps in found for gap in gaps] if key == "itl_ms" else found


def _stages(rows: Sequence[RequestRow]) -> dict[str, dict[str, float]]:
    """Mean of each stage of each figure in the order of its table, over the requests that have the figure."""
    found: dict[str, dict[str, float]] = {}
    for figure in Figure:
        having = [row.stages_ms[figure] for row in rows if figure in row.stages_ms]
        names = [name for name in (LAG, *STAGE_NAMES, UNATTRIBUTED) if any(name in stages for stages in having)]
        if having:
            found[figure] = {
                name: round(sum(stages.get(name, 0.0) for stages in having) / len(having), 4) for name in names
            }
    return found


def _added(rows: Sequence[RequestRow]) -> dict[str, Any]:
    """What disaggregation adds to each figure (`added_ms`); None without pairs."""
    return {figure: added_ms(pairs_of(rows), figure) for figure in Figure}


def _answer(summary: Figures) -> str:
    sentences = []
    for arm, each in summary["arms"].items():
        ttft, itl = each["ttft_ms"], each["itl_ms"]
        if ttft is None:
            sentences.append(f"{arm}: none of {counted_requests(each['requests'])} succeeded.")
            continue
        gaps = "" if itl is None else f" and the gaps between tokens {itl['mean']:.1f} ms"
        good = "" if each["goodput"] is None else f"; {100 * each['goodput']['share']:.0f} % met the SLO"
        sentences.append(
            f"{arm}: {each['requests_per_s']:.2f} requests/s and {each['output_tokens_per_s']:.1f} output tokens/s, "
            f"TTFT was {ttft['mean']:.1f} ms{gaps} on average, over {counted_requests(each['requests'])}{good}."
        )
    added = [(token, (summary["added_ms"] or {}).get(figure)) for token, figure in _TOKENS]
    if clauses := [added_text(token, each) for token, each in added if each is not None]:
        beside = f" ({text})" if (text := beside_text(summary)) else ""
        sentences.append(f"In pairs of the same request{beside}, {' and '.join(clauses)}.")
    return " ".join(sentences) or "No request ended."


def _caveats(summary: Figures, paired: bool, scheduled: bool) -> list[str]:
    caveats = []
    if summary["partial"]:
        caveats.append("The run was interrupted; only the requests that had ended are counted.")
    late = [arm for arm, each in summary["arms"].items() if each["lag"] and each["lag"]["behind"]]
    if late:
        caveats.append(
            f"The load generator was behind its schedule ({', '.join(late)}). Latencies count from when a request was "
            "due, so they contain that wait."
        )
    if unsent := sum(each["unsent"] for each in summary["arms"].values()):
        caveats.append(
            f"{unsent} requests were due and never sent{', and count as missing the SLO' if scheduled else ''}."
        )
    if len(summary["arms"]) > 1 and not paired:
        caveats.append(
            "Each mode had the service to itself, one after the other; a drift of the machine is not averaged. There "
            "is a single load of each mode, so their difference has no interval; pairs (--mode both without a rate) "
            "have one."
        )
    return caveats


def _looks(arms: Iterable[str]) -> dict[str, Look]:
    """Modes look as in every picture, and keep their names."""
    return {arm: {"color": ARM_LOOKS.get(arm, {"color": PALETTE[2]})["color"], "marker": ""} for arm in arms}


def _latency_picture(arms: Mapping[str, Sequence[RequestRow]]) -> Picture:
    """The cumulative distributions of TTFT, ITL and E2E, a line per mode."""
    panels: list[Panel] = []
    for key in ("ttft_ms", "itl_ms", "e2e_ms"):
        shares = cumulative({arm: _values(rows, key) for arm, rows in arms.items()}, percent=True)
        mark = Mark(shares, "value", "share", by="series", looks=_looks(arms), kind="steps")
        panels.append(Panel([mark], x="ms", y="share, %", title=FIGURES[key], xlim=(0, None), ylim=(0, 101),
                            legend="" if panels else "lower right"))  # fmt: skip
    caption = "Share of the requests (ITL: of the gaps) that were at most so long."
    share = {"sharey": True}
    return Picture("cdf", "Distributions of the latencies", caption, panels, columns=3, height_in=3.6, share=share)


def _stages_picture(arms: Mapping[str, Figures]) -> Picture:
    """The mean breakdown of each figure, one bar per mode and figure."""
    bars = []
    for figure in Figure:
        for arm, each in arms.items():
            stages = {name: ms for name, ms in each["stages_ms"].get(figure, {}).items() if ms > 0}
            starts = itertools.accumulate(stages.values(), initial=0.0)
            bars += [
                {"row": f"{figure} · {arm}", "stage": name, "ms": ms, "from": start}
                for (name, ms), start in zip(stages.items(), starts, strict=False)
            ]
    looks = {bar["stage"]: {"color": COLORS.get(bar["stage"], FAINT)} for bar in bars}
    panel = Panel(
        [Mark(bars, "ms", "row", by="stage", looks=looks, kind="bars", to="from")],
        x="ms from the client's call, mean",
        rows=list(dict.fromkeys(bar["row"] for bar in bars)),
    )
    return Picture(
        "stages",
        "Where the time goes",
        "Mean of every stage of the breakdown of token 1 (ttft) and token 2 (ttft_decode). Stages with a negative "
        "mean, which clock offsets can cause, are in the summary only.",
        [panel],
        height_in=0.55 * len(panel.rows) + 2.2,
        legend=True,
    )


def _time_picture(arms: Mapping[str, Sequence[RequestRow]]) -> Picture:
    """Above, each request from sending to its end, with token 1 marked; below, generated tokens per second."""
    tops: list[Panel] = []
    belows: list[Panel] = []
    for arm, rows in arms.items():
        ordered = sorted(rows, key=lambda row: row.sent_s)
        begun_s, color = ordered[0].scheduled_s, _looks((arm,))[arm]["color"]
        spans: list[dict[str, float]] = []
        for number, row in list(enumerate(ordered))[:: -(-len(ordered) // _MOST_BARS)]:
            sent_s = row.sent_s - begun_s
            ends = {"first": sent_s + (row.ttft_ms or 0.0) / 1e3, "end": sent_s + (row.e2e_ms or 0.0) / 1e3}
            spans.append({"number": number, **({"sent": sent_s, **ends} if row.error is None else {"failed": sent_s})})
        marks = [
            Mark(spans, "sent", "number", kind="span", to="first", look={"color": "#c9ced6"}),
            Mark(spans, "first", "number", kind="span", to="end", look={"color": color}),
            Mark(spans, "failed", "number", kind="points", look={"color": INK, "marker": "x"}),
        ]
        tops.append(Panel(marks, y="request", title=arm, falling=not tops))
        times_s = np.asarray([at_s - begun_s for row in rows for at_s in _token_times_s(row)], float)
        longest_s = float(times_s.max()) if times_s.size else 0.0
        width_s = max(0.25, longest_s / 60)
        counts, edges = np.histogram(times_s, np.arange(0.0, longest_s + 2 * width_s, width_s))
        rates = [{"s": at_s, "rate": count / width_s} for at_s, count in zip(edges, [*counts, 0], strict=True)]
        tokens = Mark(rates, "s", "rate", kind="area", look={"color": color, "step": "post", "alpha": 0.75})
        belows.append(Panel([tokens], x="s since the load began", y="output tokens/s"))
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


def _token_times_s(row: RequestRow) -> list[float]:
    if row.error is not None or row.ttft_ms is None or not row.output_tokens:
        return []
    return list(row.sent_s + np.cumsum([row.ttft_ms, *row.itl_ms]) / 1e3)


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
