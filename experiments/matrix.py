"""A question about both modes: a matrix of cells, each with pairs on an idle service or with the rounds of a load.

A question says which cells there are, what it finds in their figures, and how it answers and draws. Measuring, the
figures of a cell, its tables and its caveats are the same for all of them."""

from __future__ import annotations

import itertools
import secrets
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from experiments.experiment import Bench, Cell, Experiment
from experiments.load import Lag
from experiments.modes import (
    ARMS,
    ATTAINMENT,
    CALIBRATION_TOKENS,
    COLOCATED,
    MARGINS,
    PD,
    SLO,
    ArmLoads,
    LinkModel,
    LoadPlan,
    PairOptions,
    added_ms,
    fixed_ms,
    layout_facts,
    middle_pairs,
    overlap_of,
    pairs_of,
    send_pairs,
    slo_text,
)
from experiments.report.drawing import ARM_LOOKS, DOTTED, Looks, Mark, Panel, Records, Rule, TableBlock, table
from experiments.run_folder import (
    LAG,
    Figures,
    FinishedCell,
    Parameters,
    Rows,
    RunData,
    faults,
    stages_of,
    unexpected_bytes,
    values_of,
)
from experiments.runner import COUNTED, NOTES
from experiments.statistics import difference_interval, mean_interval, percentile, plain_mean
from experiments.warm_up import requests_of
from experiments.workloads.catalog import fitted
from experiments.workloads.conversation import Workload
from experiments.workloads.synthetic import Fixed, Synthetic
from external_engines.server import NOT_FETCHED
from ops.machine_load import LOAD, beside_text
from pdserve.client.async_client import AsyncClient
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import MIN_VALUES, Interval
from pdserve.core.request import counted
from pdserve.core.timeline import STAGE_NAMES, Figure

IDLE = "idle"
"""The parameter ``load`` of cells with pairs; others have a rate."""
PAIR_TOKENS = 3
"""Tokens that the requests of pairs generate."""
QUEUES = (LAG, "route", "prefill_queue", "decode_queue")
"""The stages in which a request waits for others."""
_CALIBRATIONS = 6  # of which the first is left out


def under_load(parameters: Parameters) -> bool:
    """Whether a cell with these parameters has a load."""
    return bool(parameters.get("load", IDLE) != IDLE)


class ModeMatrix(Experiment):
    """A question whose cells compare both modes. Cells under load have the parameter ``load``; their options are
    ``slo``, ``duration_s`` and ``rounds``."""

    options: Any

    @property
    def enough(self) -> PairOptions:
        """How long pairs are added to the least number on an idle service: by default not at all."""
        return self.options if isinstance(self.options, PairOptions) else PairOptions(pairs_s=0.0)

    def workload(self, parameters: Parameters) -> Workload:
        """What is sent in a cell with these parameters: random prompts of one length."""
        return Synthetic(Fixed(parameters["prompt_len"]), Fixed(PAIR_TOKENS))

    def load(self, parameters: Parameters) -> LoadPlan:
        """The rounds of a cell under load."""
        rate = parameters["rate"] if "rate" in parameters else parameters["rate_per_device"] * parameters["devices"]
        return LoadPlan(rate, self.options.duration_s, self.options.rounds, self.options.seed)

    def slo(self, cell: FinishedCell, run: RunData) -> SLO | None:
        """The SLO of a cell under load. An automatic one comes from the idle cell that is like it otherwise."""
        alike = {**{key: value for key, value in cell.parameters.items() if key != "rate"}, "load": IDLE}
        idle = [row for each in run.cells if each.parameters == alike for row in run.rows_of(each.cell)]
        return SLO.chosen(self.options.slo, idle)

    def found(self, cells: Sequence[Figures], run: RunData) -> Figures:
        """What the summary has beside the figures of its ``cells``."""
        return {}

    def cell(self, name: str, parameters: Parameters, service: Parameters, pairs: int | None = None) -> Cell:
        """A cell of at least so many ``pairs``, or (None) under load."""
        if pairs is not None:
            return Cell(name, parameters, service, pairs, self.enough.pairs_s)
        load = self.load(parameters)
        return Cell(name, parameters, service, load.planned(), load.sending_s, may_overload=True)

    async def measure(self, bench: Bench) -> None:
        """Calibrate the hand-off with prompts of one block, then send pairs, or under load the rounds of both modes."""
        parameters, seed = bench.cell.parameters, self.options.seed
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            workload = await fitted(self.workload(parameters), client, status)
            bench.facts |= {**layout_facts(status), "workload": workload.describe()}
            block = Synthetic(Fixed(CALIBRATION_TOKENS), Fixed(2))
            calibrations = []
            for prompt, _ in itertools.islice(requests_of(block, seed, status.vocab_size), _CALIBRATIONS):
                salt = f"calibration/{secrets.token_hex(8)}"
                done = await client.generate(prompt, mode=PD, max_tokens=2, ignore_eos=True, salt=salt).result()
                prefill_ms = done.breakdowns[Figure.TTFT_DECODE].stages_ms.get("prefill", 0.0)
                calibrations.append({"exposed_ms": done.transfer.exposed_ms, "prefill_ms": prefill_ms})
            bench.facts["calibrations"] = calibrations[1:]
            if under_load(parameters):
                await self.load(parameters).send(bench, client, workload, status.vocab_size)
            else:
                await send_pairs(bench, client, requests_of(workload, seed, status.vocab_size), self.enough)

    def figures(self, cell: FinishedCell, run: RunData) -> Figures | None:
        """Those of a cell; None if it has no pair or, under load, no request."""
        slo = self.slo(cell, run) if under_load(cell.parameters) else None
        return cell_figures(cell, run.rows_of(cell.cell), slo, self.options.seed)

    def summarise(self, run: RunData) -> Figures:
        """``cells``, an object per cell: its name (``cell``), its parameters, and `cell_figures`; then what the
        question finds in them (`found`).

        What makes the run fail: arms that generated different tokens, requests that moved other bytes than expected,
        and failed requests on an idle service. Under load the arms batch differently, and the product does not promise
        equal tokens then (docs/experiments.md), only equally many."""
        cells = [figures for cell in run.cells if (figures := self.figures(cell, run)) is not None]
        failed = []
        for cell in run.cells:
            rows, loaded = run.rows_of(cell.cell), under_load(cell.parameters)
            field, what = (
                ("output_tokens", "the number of tokens differs") if loaded else ("token_hash", "tokens differ")
            )
            differing = [pair for pair in pairs_of(rows) if getattr(pair[0], field) != getattr(pair[1], field)]
            if differing:
                ids = " and ".join(row.request_id for row in differing[0])
                margin = cell.facts.get(MARGINS, {}).get(str(differing[0][0].index))
                failed.append(
                    f"{cell.cell}: {what} between the arms in {len(differing)} pairs, first in requests {ids}"
                    + ("" if margin is None else f", whose two likeliest tokens are at least {margin} apart")
                )
            failed += faults(cell.cell, rows, failing=not loaded)
        return {"experiment": self.name, "cells": cells, **self.found(cells, run), "failed": failed}


def cell_figures(cell: FinishedCell, rows: Rows, slo: SLO | None, seed: int) -> Figures | None:
    """All cells have ``n`` (pairs, or requests of each arm), ``errors`` by arm; ``added_ttft_ms``: ``ttft`` and
    ``ttft_decode``, disaggregated minus colocated; ``arms_ms`` by arm (`latencies`); ``causes_ms`` by stage, with
    ``unexplained_ms`` and ``explained_pct`` of ``ttft_decode``, and ``colocated_ms``, that of the colocated requests
    that the causes are of; the keys of `handoffs`; ``kv_bytes``, ``kv_bytes_expected``, ``kv_bytes_equal``
    (None: no request has a proof), and ``unproven``, the requests without one; ``computed_itself``: whether decode
    computed prompts whose KV it should have fetched, by its counters (None: they do not tell); ``tokens_equal`` and
    ``tokens_equal_share``; ``machine_load``. ``cause_intervals_ms`` has the causes with their intervals.

    Of pairs the added time is the median of the differences (`added_ms`), and causes are of their middle half. Under
    load the added time is the difference of the arms' means, latencies count from when requests were due, and there are
    the keys of `_load_figures`. None without any pair, or request under load."""
    pairs, loaded = pairs_of(rows), under_load(cell.parameters)
    if not (rows if loaded else pairs):
        return None
    sent = {arm: [row for row in rows if row.arm == arm] for arm in ARMS}
    if loaded:
        done = {arm: [row.since_due() for row in each if row.error is None] for arm, each in sent.items()}
        causing = [[row for row in done[arm] if row.ttft_decode_ms is not None] for arm in ARMS]
        added = {figure: _added_under_load(done, figure, seed) for figure in Figure}
    else:
        done = {arm: [pair[side] for pair in pairs] for side, arm in enumerate(ARMS)}
        causing = [[pair[side] for pair in middle_pairs(pairs, Figure.TTFT_DECODE)] for side in range(len(ARMS))]
        added = {figure: added_ms(pairs, figure) for figure in Figure}
    equal = [pd.token_hash == colocated.token_hash for pd, colocated in pairs]
    unproven = sum(row.is_unproven for row in done[PD])
    return {
        "cell": cell.cell,
        **cell.parameters,
        "n": min(map(len, sent.values())) if loaded else len(pairs),
        "errors": {arm: sum(row.error is not None for row in each) for arm, each in sent.items()},
        "added_ttft_ms": added,
        "arms_ms": {arm: latencies(each) for arm, each in done.items()},
        **_causes(causing, added[Figure.TTFT_DECODE], loaded, seed),
        **handoffs(cell, done[PD]),
        **{key: sum(getattr(row, key) for row in done[PD]) for key in ("kv_bytes", "kv_bytes_expected")},
        "kv_bytes_equal": None if done[PD] and unproven == len(done[PD]) else unexpected_bytes(rows) is None,
        "unproven": unproven,
        "computed_itself": _computed_itself(cell),
        "tokens_equal": all(equal) if equal else None,
        "tokens_equal_share": round(statistics.fmean(equal), 4) if equal else None,
        LOAD: cell.facts.get(LOAD),
        **(_load_figures(cell, rows, slo, seed) if loaded else {}),
    }


def _computed_itself(cell: FinishedCell) -> bool | None:
    if not cell.facts.get(COUNTED):
        return None
    return any(NOT_FETCHED in note for note in cell.facts.get(NOTES, ()))


def _added_under_load(done: Mapping[str, Rows], figure: Figure, seed: int) -> Figures | None:
    """The difference of the arms' means; requests of one round share a queue."""
    having = [[row for row in done[arm] if row.figure_ms(figure) is not None] for arm in (COLOCATED, PD)]
    colocated, pd = (values_of(rows, f"{figure}_ms") for rows in having)
    rounds = [row.repeat for row in having[0]], [row.repeat for row in having[1]]
    interval = difference_interval(colocated, pd, seed, rounds)
    return None if interval is None else interval.to_dict()


def latencies(rows: Rows) -> dict[str, float | None]:
    """Means of the requests' latencies, and the 99th percentiles of TTFT and of all gaps; in milliseconds."""
    values = {key: values_of(rows, f"{key}_ms") for key in ("ttft", "ttft_decode", "tpot", "e2e")}
    found = {key: statistics.fmean(each) if each else None for key, each in values.items()}
    found |= {f"{key}_p99": percentile(values_of(rows, f"{key}_ms"), 99.0) for key in ("ttft", "itl")}
    return {key: value and round(value, 4) for key, value in found.items()}


def _causes(arms: Sequence[Rows], added: Figures | None, loaded: bool, seed: int) -> Figures:
    """Why ``ttft_decode`` differs between two arms: the difference of the means of each stage, what is left, and the
    share that is explained; null if one of the arms has no request. Unless ``loaded``, the arms' rows are pairs."""
    if added is None or not all(arms):
        return dict.fromkeys(("colocated_ms", "causes_ms", "cause_intervals_ms", "unexplained_ms", "explained_pct"))
    pd, colocated = (stages_of(rows).fillna(0.0).reindex(columns=[LAG, *STAGE_NAMES], fill_value=0.0) for rows in arms)
    rounds = [row.repeat for row in arms[1]], [row.repeat for row in arms[0]]
    intervals = {
        stage: difference_interval(colocated[stage].tolist(), pd[stage].tolist(), seed, rounds)
        if loaded
        else mean_interval([a - b for a, b in zip(pd[stage], colocated[stage], strict=True)], seed)
        for stage in pd
    }
    causes_ms = pd.mean() - colocated.mean()
    added_ms = Interval.from_dict(added).value
    unexplained_ms = added_ms - float(causes_ms.sum())
    return {
        "colocated_ms": round(statistics.fmean(values_of(arms[1], "ttft_decode_ms")), 4),
        "causes_ms": causes_ms.round(4).to_dict(),
        "cause_intervals_ms": {stage: each and each.to_dict() for stage, each in intervals.items()},
        "unexplained_ms": round(unexplained_ms, 4),
        "explained_pct": round(100 * (1 - abs(unexplained_ms / added_ms)), 2) if added_ms else 100.0,
    }


def handoffs(cell: FinishedCell, rows: Rows) -> Figures:
    """The transfers of disaggregated requests: ``exposed_ms`` (an interval), and its mean ``achieved_ms``; ``wire_ms``,
    ``request_to_ready_ms``, ``prefill_ms``; ``ceiling_gbs``, ``clock_error_ms``, ``transports_used``; ``predicted_ms``,
    the exposed time by arithmetic, with ``fixed_ms``. Null where nothing was handed off, where engines of others did
    it, which tell no times, or for the last two if the model's layers are unknown or the link was not measured."""
    import pandas  # takes long

    transports_used = sorted({row.transport for row in rows}) if rows else None
    clock_error_ms = round(max(row.clock_error_ms for row in rows), 4) if rows else None
    rows = [row for row in rows if "decode_leg" not in row.stages_ms.get(Figure.TTFT_DECODE, {})]
    columns = ("exposed_ms", "wire_ms", "import_ms", "request_to_ready_ms", "ceiling_gbs")
    moved = pandas.DataFrame([row.transfer for row in rows], columns=columns).fillna(0.0)
    figures = {
        "achieved_ms": moved.exposed_ms.mean(),
        "wire_ms": (moved.wire_ms + moved.import_ms).mean(),
        "request_to_ready_ms": moved.request_to_ready_ms.mean(),
        "prefill_ms": stages_of(rows).get("prefill", pandas.Series([0.0])).mean(),
        "ceiling_gbs": moved.ceiling_gbs.median(),
    }
    found = {key: round(float(value), 4) if rows else None for key, value in figures.items()}
    prompt_len = cell.parameters.get("prompt_len") if rows else None
    return {
        "exposed_ms": plain_mean(moved.exposed_ms.tolist()),
        "clock_error_ms": clock_error_ms,
        **found,
        **predicted(cell, prompt_len, found["prefill_ms"] or 0.0, figures["ceiling_gbs"]),
        "transports_used": transports_used,
    }


def predicted(
    cell: FinishedCell, prompt_len: int | None, prefill_ms: float, gbs: float, rtt_ms: float = 0.0
) -> Figures:
    """``predicted_ms`` and ``fixed_ms`` of a prompt on a link of ``gbs``; null if one of them is unknown."""
    model = None if prompt_len is None else LinkModel.of(cell, prompt_len, prefill_ms)
    if model is None or not gbs:
        return {"predicted_ms": None, "fixed_ms": None}
    cost_ms = fixed_ms(cell, gbs, rtt_ms)
    exposed_ms = model.exposed_ms(overlap_of(cell), gbs, rtt_ms) + cost_ms
    return {"predicted_ms": round(exposed_ms, 4), "fixed_ms": round(cost_ms, 4)}


def _load_figures(cell: FinishedCell, rows: Rows, slo: SLO | None, seed: int) -> Figures:
    """``rounds``, ``slo_ms``, and by arm: ``unsent``, ``offered_rps``, ``lag``; ``attainment``, the share of the
    requests that were due which met the SLO, and ``goodput_rps``, that share of the arrivals per second."""
    found: Figures = {"rounds": len({row.repeat for row in rows}), "slo_ms": slo and dict(slo.limits_ms)}
    for arm in ARMS:
        load = ArmLoads.of(cell, rows, arm)
        met = None
        if slo is not None:
            values, rounds = load.met(slo)
            met = mean_interval(values, seed, rounds)
        lag = Lag.between([row.scheduled_s for row in load.rows], [row.sent_s for row in load.rows])
        behind = any((each["lag"] or {}).get("behind", False) for each in load.loads)
        figures = {
            "unsent": load.unsent,
            "offered_rps": round(load.offered_rps, 4),
            "attainment": met and met.to_dict(),
            "goodput_rps": met and met.scaled(load.offered_rps).to_dict(),
            "lag": lag and {**{key: round(value, 4) for key, value in asdict(lag).items()}, "behind": behind},
        }
        for key, value in figures.items():
            found.setdefault(key, {})[arm] = value
    return found


def sustains(cell: Figures, arm: str) -> bool:
    """Whether at least `ATTAINMENT` of the arm's requests met the SLO."""
    met = cell["attainment"][arm]
    return met is not None and met["mean"] >= ATTAINMENT


def check_loads(rates: Sequence[float], slo: str) -> None:
    """`InvalidRequest` unless all rates are positive and finite, none is given twice, and the SLO is one or auto."""
    if slo != "auto":
        SLO.parse(slo, "--slo")
    for rate in rates:
        if not 0 < rate < float("inf"):
            raise InvalidRequest(f"--rates: {rate:g} is not a positive number of requests per second")
    if len(set(rates)) != len(rates):
        raise InvalidRequest("--rates: a rate is given twice")


def late_text(where: str) -> str:
    """What a load generator that was late means."""
    return (
        f"The load generator was behind its schedule {where}: it shares the machine with the service. Latencies count "
        "from when a request was due, so they contain that wait."
    )


def cell_caveats(cells: Sequence[Figures]) -> list[str | bool]:
    """What a reader has to know about the cells of any question."""
    loaded = [cell for cell in cells if under_load(cell)]
    errors_ms = [cell["clock_error_ms"] for cell in cells if cell["clock_error_ms"] is not None]
    late = [cell["cell"] for cell in loaded if any(lag and lag["behind"] for lag in cell["lag"].values())]
    unsent = sum(sum(cell["unsent"].values()) for cell in loaded)
    different = [cell["tokens_equal_share"] for cell in loaded if cell["tokens_equal"] is False]
    unproven = [cell for cell in cells if cell["unproven"]]
    fetched = all(cell["computed_itself"] is False for cell in unproven)
    return [
        unproven != []
        and f"Of {counted(sum(cell['unproven'] for cell in unproven), 'disaggregated request')} the moved bytes are "
        "not known: the engine counts those of all requests together, or not at all. "
        + (
            "By its counters of prompt tokens, decode has fetched the KV of all prompts of these cells."
            if fetched
            else "A decode that computed the prompt itself would not be seen in them."
        ),
        errors_ms != []
        and f"Stages between two workers are known to ± {max(errors_ms):.3f} ms (clock offset); smaller differences of "
        "kv_exposed and dispatch mean nothing.",
        any(cell["rounds" if "rounds" in cell else "n"] < MIN_VALUES for cell in cells)
        and f"Cells with fewer than {MIN_VALUES} pairs have no intervals; nor have loads with fewer rounds, because "
        "requests of one round share a queue.",
        late != []
        and late_text(f"in {len(late)} of {len(loaded)} cells ({', '.join(late[:4])}{', …' if len(late) > 4 else ''})"),
        unsent > 0
        and f"{unsent} requests were due, but the load generator did not come to them before their load ended. They "
        "count as requests that miss the SLO.",
        loaded != []
        and "A load lasts for a limited time. Above the capacity of an arm the queue would grow further in a longer "
        "one, and its attainment would fall.",
        loaded != []
        and "The gap between token 1 and token 2 includes the hand-off, so in pd the SLO of the gaps limits the "
        "hand-off as well.",
        different != []
        and f"In {len(different)} of {len(loaded)} cells under load, some requests generated other tokens than the "
        f"same prompt in the other arm (at worst {1 - min(different):.0%} of them). The arms batch differently, "
        "and another batch can round logits differently. With engine.batch_invariant: true tokens are equal.",
    ]


def unclear_text(cell: Figures, run: RunData, more: str = "more time for pairs (--pairs-s)") -> str:
    """Why one of the added times of a cell of pairs has no clear sign, and what would help, among it ``more``; empty if
    all have one."""
    added = [each for each in cell["added_ttft_ms"].values() if each is not None]
    if all(Interval.from_dict(each).sign for each in added):
        return ""
    machine, service = run.environment.get("machine", {}), run.environment.get("service") or {}
    cores, workers, pairs = machine.get("cores"), len(service.get("workers", ())), max(each["n"] for each in added)
    reasons, helps = [], []
    if marks := max((each["disturbed"] or () for each in added), key=len):
        reasons.append(f"other processes used the machine beside {len(marks)} of {pairs} pairs")
    elif load := beside_text(cell):
        reasons.append(load.replace("beside other load: ", "other processes used ", 1))
    if reasons:
        helps.append("a quiet machine")
    if cores is not None and cores < workers + 2:
        reasons.append(f"{workers} workers, the gateway and the client share {cores} cores")
        helps.append("more cores")
    reasons.append(f"only {pairs} pairs were measured")
    helps.append(more)
    return f"Reasons: {'; '.join(reasons)}. What would help: {', '.join(helps)}."


PAIRS_CAPTION = (
    "Added: median of the pairs' differences. Disturbed: pairs beside which other processes used the machine; they "
    "count like all others."
)


def pair_points(added: Figures, xs: Sequence[float], color: str) -> Mark:
    """The pairs of an added time as faint points at ``xs``, hollow where they were disturbed. Those more than eight
    times as far from the middle half as it is wide are drawn at that distance."""
    lower, middle, upper = np.percentile(added["differences_ms"], (25, 50, 75))
    reach_ms = 8 * max(upper - lower, 0.5)
    shown_ms = np.clip(added["differences_ms"], middle - reach_ms, middle + reach_ms)
    disturbed = added["disturbed"] or ()
    points = [
        {"x": x, "ms": ms, "hollow": place in disturbed} for place, (x, ms) in enumerate(zip(xs, shown_ms, strict=True))
    ]
    look = {"label": None, "color": color, "marker": "o", "markersize": 3.2, "alpha": 0.45}
    return Mark(points, "x", "ms", "hollow", {True: {"markerfacecolor": "none"}}, look, "points")


def idle_table(cells: Sequence[Figures], *more: str) -> TableBlock:
    """All cells of pairs; ``more`` columns come after those of the prediction."""
    records = []
    for cell in cells:
        added = cell["added_ttft_ms"][Figure.TTFT_DECODE]
        disturbed = None if added["disturbed"] is None else len(added["disturbed"])
        proven = cell["n"] - cell["unproven"]
        num_bytes = cell["kv_bytes"] // proven if proven else None
        records.append({**cell, "mean": added["mean"], "disturbed": disturbed, "bytes": num_bytes})
    columns = (
        "cell",
        "n",
        "added ttft, ms | added_ttft_ms.ttft:+",
        "added ttft_decode, ms | added_ttft_ms.ttft_decode:+",
        "its mean, ms | mean:+.2f",
        "disturbed pairs | disturbed",
        "explained, % | explained_pct:.1f",
        "exposed, ms | exposed_ms",
        "predicted, ms | predicted_ms:.2f",
        *more,
        "on the wire, ms | wire_ms:.2f",
        "request to ready, ms | request_to_ready_ms:.2f",
        "ceiling, GB/s | ceiling_gbs:.4g",
        "KV, bytes | bytes:,",
        "= expected | kv_bytes_equal",
        "tokens equal | tokens_equal",
    )
    caption = (
        f"{PAIRS_CAPTION} KV bytes per request; the ceiling is the best rate of the link so far. Exposed is what a "
        "request waits for after its prompt is computed; request to ready spans from decode's allocation to the last "
        "block, and so contains the prefill."
    )
    return table("All idle cells", records, columns, caption)


def load_table(cells: Sequence[Figures]) -> TableBlock:
    """All cells under load."""
    records = []
    for cell in cells:
        causes_ms, slo = cell["causes_ms"] or {}, slo_text(cell["slo_ms"]) if cell["slo_ms"] else None
        waiting_ms = sum(causes_ms[name] for name in QUEUES) if causes_ms else None
        other_ms = sum(causes_ms.values()) - waiting_ms if waiting_ms is not None else None
        records.append({**cell, "slo": slo, "waiting_ms": waiting_ms, "other_ms": other_ms})
    columns = (
        "cell",
        "requests per arm | n",
        "added ttft, ms | added_ttft_ms.ttft:+",
        "added ttft_decode, ms | added_ttft_ms.ttft_decode:+",
        "by waiting, ms | waiting_ms:+.2f",
        "by other stages, ms | other_ms:+.2f",
        "unexplained, ms | unexplained_ms:+.2f",
        "explained, % | explained_pct:.1f",
        "SLO | slo",
        "SLO met pd, % | attainment.pd*100:.0f",
        "SLO met colocated, % | attainment.colocated*100:.0f",
        "goodput pd, colocated, 1/s | goodput_rps.pd.mean:.2f, goodput_rps.colocated.mean:.2f",
        "TTFT p99 pd, colocated, ms | arms_ms.pd.ttft_p99:.1f, arms_ms.colocated.ttft_p99:.1f",
        "ITL p99 pd, colocated, ms | arms_ms.pd.itl_p99:.1f, arms_ms.colocated.itl_p99:.1f",
        "failed pd, colocated | errors.pd, errors.colocated",
        "lag p99 pd, colocated, ms | lag.pd.p99_ms:.1f, lag.colocated.p99_ms:.1f",
        "exposed, ms | achieved_ms:.2f",
        "predicted on an idle link, ms | predicted_ms:.2f",
        "on the wire, ms | wire_ms:.2f",
        "request to ready, ms | request_to_ready_ms:.2f",
        "KV, bytes | kv_bytes:,",
        "= expected | kv_bytes_equal",
        "equal tokens, % | tokens_equal_share*100:.1f",
    )
    return table(
        "Under load",
        records,
        columns,
        "Added: difference of the arms' means, disaggregated minus colocated; of ttft_decode by stages, where waiting "
        f"is {', '.join(QUEUES)}. Latencies count from when a request was due. KV bytes of all requests.",
    )


def attainment_panel(points: Records, title: str, legend: str) -> Panel:
    """The share of requests that met the SLO over the rate: ``points`` have ``rate``, ``arm`` and the interval
    ``met``."""
    rates = sorted({point["rate"] for point in points})
    return Panel(
        [Mark(points, "rate", "met", "arm", ARM_LOOKS, factor=100), Rule("y", 100 * ATTAINMENT)],
        "offered load, requests/s",
        "requests that meet the SLO, %",
        title,
        "x" if rates[-1] > 8 * rates[0] else "",
        rates,
        ylim=(-4, 104),
        legend=legend,
    )


def goodput_panel(
    points: Records, rate: str, good: str, by: str, looks: Looks, unit: str = "requests/s", **panel: Any
) -> Panel:
    """Goodput over the offered load (the columns ``good`` and ``rate``). On the dotted line they are equal."""
    rates = sorted({point[rate] for point in points})
    return Panel(
        [Mark(points, rate, good, by, looks), Rule("diagonal", look={"linestyle": DOTTED})],
        f"offered load, {unit}",
        f"goodput, {unit}",
        ticks=rates,
        xlim=(0, 1.06 * rates[-1]),
        ylim=(-0.02 * rates[-1], 1.03 * rates[-1]),
        **panel,
    )
