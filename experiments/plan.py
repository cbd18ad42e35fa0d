"""``pdserve plan``: how many prefill and decode workers, over which link, or none apart at all.

Every candidate is a service in the simulated world (`simulator.planning`): its router, admission and schedulers are the
real ones, and steps and transfers take the time that a profile of this machine (`experiments.profile`) or a device's
data sheet predicts. For each, the largest rate is searched at which `ATTAINMENT` of the requests meet the SLO. Then the
best disaggregated and the best colocated one are searched again with one thing changed at a time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Unpack

import numpy as np
import yaml

from experiments.deployment import Deployment, Service
from experiments.experiment import Bench, Cell, Experiment
from experiments.modes import ATTAINMENT, COLOCATED, PD, SLO, SLO_FACTOR, slo_text
from experiments.planned_site import Candidate, Change, PlannerOptions, Site
from experiments.report.drawing import ARM_LOOKS, Mark, Panel, Picture, TableBlock, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, RequestRow, RunData
from experiments.workloads.arrivals import random_arrivals
from experiments.workloads.catalog import workload_of
from experiments.workloads.conversation import Conversation
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.view import WaitMode
from simulator.planning.service import (
    PlannedRequests,
    PlannedTurn,
    RequestResult,
    ServiceRun,
    run_service,
)

IDLE, CHANGES = "idle", "changes"
"""The first and the last cell."""
_SEARCHES = 5
"""Rates that are simulated between one that is sustained and its double, which is not: the result is within 2 %."""
_MOST_REQUESTS = 1200
"""Of a simulated load."""
ALIKE = 0.03
"""Rates that differ by less are called equal."""
_LONGER = 3.0
_PERCENT = 90.0
_ALONE = 16
"""Requests that an automatic SLO goes by."""
_VOCAB = 32_000
_CHANGES = (
    Change("links carry half as much", link=0.5),
    Change("links carry twice as much", link=2.0),
    Change("KV is coded between hosts (transfer.codec: lossless)", coded=True),
    Change("prompts are twice as long", prompts=2.0),
    Change("prompts are half as long", prompts=0.5),
    Change("outputs are twice as long", outputs=2.0),
    Change("the limit of TTFT is half as long", ttft=0.5),
    Change("the limit of gaps is half as long", itl=0.5),
    Change("the limit of gaps is twice as long", itl=2.0),
    Change("a prefill worker takes twice as long", slow=Role.PREFILL),
    Change("a decode worker takes twice as long", slow=Role.DECODE),
    Change("a prefill worker is lost", lost=Role.PREFILL),
    Change("a decode worker is lost", lost=Role.DECODE),
    Change("a prefill worker fails in the middle of the load", fails=Role.PREFILL),
    Change("a decode worker fails in the middle of the load", fails=Role.DECODE),
)


class Planner(Experiment):
    """See the module."""

    name = "plan"
    question = "Which deployment serves most requests within an SLO, and does it pay to disaggregate?"
    options_type = PlannerOptions
    needs_own = "plan simulates services and measures none"
    simulated: ClassVar[bool] = True
    options: PlannerOptions
    _config = PdserveConfig()

    def deployment(self, report: Callable[[str], None], **service: Unpack[Service]) -> Deployment:
        """Nothing is started; its configuration is simulated."""
        deployment = super().deployment(report, **service)
        self.configure(deployment.configuration({}))
        return deployment

    def configure(self, config: PdserveConfig) -> None:
        """Simulate services with these settings."""
        self._config = config

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """The idle service, for an automatic SLO; one cell per candidate; the changes."""
        if self.options.slo != "auto":
            SLO.parse(self.options.slo, "--slo")
        workload_of(self.options)  # checks it
        if self.options.apply is not None and not self.options.apply.parent.is_dir():
            raise InvalidRequest(f"--apply: the folder of {self.options.apply} does not exist; make it first")
        candidates = self.site.candidates()
        return [
            Cell(IDLE, {}, None),
            *(Cell(each.name, each.parameters, None) for each in candidates),
            Cell(CHANGES, {}, None, 2 * len(_CHANGES)),
        ]

    @cached_property
    def site(self) -> Site:
        """What there is to deploy on."""
        return Site.of(self.options, self._config)

    async def measure(self, bench: Bench) -> None:
        """Search the largest rate of the cell's candidate, or of the two best with each change."""
        if bench.cell.name == IDLE:
            bench.facts["slo"] = self._idle_slo().text
            bench.facts |= {"devices": self.site.texts(), "workload": workload_of(self.options).describe()}
            bench.advance(1)
            return
        slo = SLO.parse(str(bench.earlier[IDLE]["slo"]))
        if bench.cell.name != CHANGES:
            bench.facts |= self._search(Candidate.of(bench.cell.parameters), Change(), slo, bench.advance)
            return
        found = {name: facts for name, facts in bench.earlier.items() if "rate" in facts}
        best = [each for mode in (PD, COLOCATED) if (each := _best(found, mode)) is not None]
        cells = {each.name: each for each in self.site.candidates()}
        rows = []
        for change in _CHANGES:
            row: Figures = {"change": change.name}
            for name in best:
                if cells[name].is_one_worker and (change.lost or change.fails):
                    row[cells[name].mode] = 0.0
                    bench.advance(1)
                    continue
                searched = self._search(cells[name], change, slo, bench.advance, float(found[name]["rate"]))
                row[cells[name].mode] = searched["per_cost"]
            rows.append(row)
        bench.facts["changes"] = rows

    def _idle_slo(self) -> SLO:
        """The SLO: as given, or from requests that are alone on a colocated worker."""
        if self.options.slo != "auto":
            return SLO.parse(self.options.slo)
        candidate = next(each for each in self.site.candidates() if each.mode == COLOCATED)
        results = self._alone(candidate, Change())
        ttft = float(np.percentile([each.ttft_s for each in results], _PERCENT))
        gaps = [gap for each in results for gap in each.itl_s]
        limits = {"ttft": 1e3 * ttft, **({"itl": 1e3 * statistics.median(gaps)} if gaps else {})}
        return SLO({key: round(SLO_FACTOR * limit, 3) for key, limit in limits.items()})

    def _alone(self, candidate: Candidate, change: Change) -> list[RequestResult]:
        """Requests that are alone on a service."""
        conversations = workload_of(self.options).conversations(_ALONE, self.options.seed, _VOCAB)
        runs = [self.simulate(candidate, change, [(each, 0.0)]) for each in itertools.islice(conversations, _ALONE)]
        return [result for run in runs for result in run.requests]

    def _alone_within(self, candidate: Candidate, change: Change, slo: SLO) -> bool:
        """Whether there is a rate that is low enough."""
        rows = [row_of(result, number) for number, result in enumerate(self._alone(candidate, change))]
        return statistics.fmean(slo.met_by(row) for row in rows) >= ATTAINMENT

    def simulate(
        self,
        candidate: Candidate,
        change: Change,
        arrivals: Iterable[tuple[Conversation, float]],
        duration_s: float = math.inf,
    ) -> ServiceRun:
        """Serve conversations, each with the second at which it begins, of a load that lasts so long, on a candidate
        with a change. Without a worker of one role, those of the other serve alone."""
        requests = (_planned(conversation, at_s, change) for conversation, at_s in arrivals)
        service = self.site.service(candidate, change, duration_s)
        in_pairs = len({worker.role for worker in service.workers}) == len(Role)
        mode: WaitMode = Mode.COLOCATED
        if in_pairs:  # auto has learnt no costs, so it means a pair while both roles have workers
            mode = Mode.AUTO if service.failures else Mode.PD
        return run_service(service, mode, requests, self.options.seed)

    def _search(
        self, candidate: Candidate, change: Change, slo: SLO, advance: Callable[[int], None], near: float = 0.0
    ) -> Figures:
        """The largest rate that a candidate sustains, how it does at that rate, and what keeps it from more. The
        search begins at the rate ``near``, if that is known."""
        limits, seed = change.slo(slo), self.options.seed
        points: dict[float, Figures] = {}

        def sustains(rate: float) -> bool:
            count = min(max(self.options.requests, round(rate * self.options.duration_s)), _MOST_REQUESTS)
            conversations = workload_of(self.options).conversations(count, seed, _VOCAB)
            arrivals = zip(conversations, random_arrivals(rate, seed), strict=False)
            run = self.simulate(candidate, change, arrivals, count / rate)
            points[rate] = _point(rate, run, limits)
            return bool(points[rate]["attainment"] >= ATTAINMENT and points[rate]["keeps_up"])

        low, high = 0.0, near or sum(candidate.devices) * 2.0
        while sustains(high) and high < 1e6:
            low, high = high, high * 2
        while not low and high > 1e-3 and self._alone_within(candidate, change, limits):
            if sustains(high / 2):
                low = high / 2
            else:
                high /= 2
        for _ in range(_SEARCHES if low else 0):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if sustains(middle) else (low, middle)
        advance(1)
        per_device = low / sum(candidate.devices)
        cost = self.site.cost(candidate)
        ordered = [points[rate] for rate in sorted(points)]
        return {
            "mode": candidate.mode,
            "rate": low,
            "per_device": per_device,
            "per_cost": low / cost,
            "at_rate": points.get(low),
            "binds": _binds(points.get(high, {})),
            "points": ordered,
        }

    def summarise(self, run: RunData) -> Figures:
        """``slo_ms``, ``devices``, ``workload``.

        ``candidates``, the best first: ``name``, its parameters, ``rate`` (requests/s within the SLO), ``per_device``,
        ``per_cost``, ``at_rate`` (the figures at that rate), ``binds`` (what keeps it from more), ``points`` (the
        rates that were simulated). ``best``, ``best_pd``, ``best_colocated``: names. ``changes``: rates per cost with
        one thing changed. ``settings``: those of the best one."""
        facts = {cell.cell: cell for cell in run.cells}
        rows = [
            {"name": cell.cell, **cell.parameters, **{key: cell.facts[key] for key in _SEARCHED}}
            for cell in run.cells
            if "rate" in cell.facts
        ]
        rows.sort(key=lambda row: -float(row["per_cost"]))
        found = {row["name"]: row for row in rows}
        slo = facts[IDLE].facts.get("slo") if IDLE in facts else None
        best = rows[0] if rows and rows[0]["rate"] else None
        return {
            "experiment": self.name,
            "slo_ms": None if slo is None else dict(SLO.parse(slo).limits_ms),
            "devices": run.fact("devices", []),
            "workload": run.fact("workload", ""),
            "candidates": rows,
            "best": best and best["name"],
            "best_pd": _best(found, PD),
            "best_colocated": _best(found, COLOCATED),
            "changes": run.fact("changes", []),
            "settings": {} if best is None else _settings(Candidate.of(best)),
            "failed": [],
        }

    def finished(self, summary: Figures) -> None:
        """Write the configuration of the best deployment, if that was asked for."""
        if (path := self.options.apply) is None:
            return
        if not summary["settings"]:
            raise InvalidRequest("--apply: no candidate serves requests within the SLO, so nothing was written")
        nested: dict[str, dict[str, Any]] = {}
        for key, value in {"model.path": self.options.model, **summary["settings"]}.items():
            section, _, name = key.partition(".")
            nested.setdefault(section, {})[name] = value
        text = yaml.safe_dump(nested, sort_keys=False)
        path.write_text(f"# {summary['best']}: chosen by pdserve plan\n{text}", encoding="utf-8")

    def report(self, run: RunData, summary: Figures) -> Report:
        """Rates of all candidates, what binds them, and what would change the answer."""
        rows = summary["candidates"]
        method = (
            f"simulated services with the real router and scheduler, at least {self.options.requests} requests per "
            f"rate (Poisson arrivals); the rate at which {ATTAINMENT:.0%} of the requests meet the SLO, within "
            f"{ALIKE:.0%}"
        )
        devices = "; ".join(each["text"] for each in summary["devices"])
        source = "twice an idle service" if self.options.slo == "auto" else "as given"
        slo = f"{slo_text(summary['slo_ms'])} ({source})" if summary["slo_ms"] else ""
        setup = setup_of(run, method, devices=devices, workload=summary["workload"], SLO=slo)
        blocks: list[Picture | TableBlock] = []
        if rows:
            blocks += [_picture(rows), _candidate_table(rows)]
        if summary["changes"]:
            blocks.append(_change_table(summary["changes"]))
        caveats = [
            *(each["caveat"] for each in summary["devices"]),
            "Every request is served to its last token.",
            "Layers with a sliding window count as if they saw all tokens.",
            max((max(row["tensor_parallel"]) for row in rows), default=1) > 1
            and "On GPUs pdserve serves a model on one device per worker (docs/engine.md).",
        ]
        return Report("Plan", self.question, _answer(summary), setup, blocks, caveats, [])


_SEARCHED = ("rate", "per_device", "per_cost", "at_rate", "binds", "points")


def _planned(conversation: Conversation, at_s: float, change: Change) -> PlannedRequests:
    turns = []
    for turn in conversation.turns:
        tokens = turn.token_ids
        count = max(1, round(len(tokens) * change.prompts))
        tokens = (tokens * math.ceil(change.prompts))[:count]
        turns.append(PlannedTurn(tokens, max(1, round(turn.output_len * change.outputs)), turn.pause_s))
    return PlannedRequests(at_s, tuple(turns), conversation.salt or "", conversation.session_id)


# --- figures ---------------------------------------------------------------------------------------------------------


def row_of(result: RequestResult, index: int) -> RequestRow:
    """A simulated request as a row of a run."""
    known = not result.error
    return RequestRow(
        cell="",
        arm="",
        repeat=0,
        index=index,
        error=result.error or None,
        prompt_tokens=result.prompt_tokens,
        output_tokens=result.output_tokens,
        ttft_ms=1e3 * result.ttft_s if known else None,
        ttft_decode_ms=1e3 * result.ttft_decode_s if known and result.ttft_decode_s >= 0 else None,
        tpot_ms=1e3 * statistics.fmean(result.itl_s) if known and result.itl_s else None,
        e2e_ms=1e3 * result.e2e_s if known else None,
        itl_ms=tuple(1e3 * gap for gap in result.itl_s),
    )


def _point(rate: float, run: ServiceRun, slo: SLO) -> Figures:
    """How a load went."""
    rows = [row_of(result, number) for number, result in enumerate(run.requests)]
    served = [row for row in rows if row.error is None]
    missed = {
        key: statistics.fmean(not SLO({key: limit}).met_by(row) for row in rows) for key, limit in slo.limits_ms.items()
    }
    ttfts, gaps = [row.ttft_ms for row in served], [gap for row in served for gap in row.itl_ms]
    exposed = [1e3 * each.exposed_s for each in run.requests if each.exposed_s >= 0]
    by_role = {role: [w for w in run.workers if w.worker_id.startswith(role)] for role in Role}
    busy = {f"{role}_busy": statistics.fmean(w.busy for w in group) for role, group in by_role.items() if group}
    return {
        "rate": rate,
        "attainment": statistics.fmean(slo.met_by(row) for row in rows),
        "keeps_up": _keeps_up(run.requests),
        "missed": missed,
        "refused": statistics.fmean(row.error is not None for row in rows),
        "ttft_ms": _summary(ttfts),
        "itl_ms": _summary(gaps),
        "exposed_ms": _summary(exposed),
        "tokens_per_s": sum(row.output_tokens for row in served) / run.duration_s,
        "preemptions": sum(w.preemptions for w in run.workers),
        "link": max(run.links.values(), default=0.0),
        **busy,
    }


def _keeps_up(results: Sequence[RequestResult]) -> bool:
    """Whether a service has no queue that grows as long as requests come: after the last one came, it takes at most
    `_LONGER` times as long as the first tenth of the requests did."""
    ordered = sorted(results, key=lambda each: each.sent_s)
    first = max(each.e2e_s for each in ordered[: max(1, len(ordered) // 10)])
    last_sent_s = ordered[-1].sent_s
    return max(each.sent_s + each.e2e_s for each in ordered) - last_sent_s <= _LONGER * first


def _summary(values: Sequence[float | None]) -> Figures | None:
    if not values:
        return None
    array = np.array(values, float)
    return {"mean": float(array.mean()), "p50": float(np.percentile(array, 50)), "p99": float(np.percentile(array, 99))}


def _binds(point: Figures) -> str:
    """What keeps a candidate from a higher rate (a limit of the SLO, or a queue that grows without end), and what is
    busiest. ``point`` is the lowest rate that it does not sustain; empty if none was simulated."""
    if not point or (point["attainment"] >= ATTAINMENT and point["keeps_up"]):
        return ""
    what = "a growing queue"
    if point["attainment"] < ATTAINMENT:
        what = max(point["missed"], key=lambda key: point["missed"][key]).upper()
    full = {"links": point["link"]} | {role: point.get(f"{role}_busy", 0.0) for role in Role}
    most = max(full, key=lambda key: full[key])
    busy = f"{most if most == 'links' else f'{most} workers'} {full[most]:.0%} busy"
    return f"{what}; {busy}" + (f"; {point['preemptions']} preemptions" if point["preemptions"] else "")


def _best(found: Mapping[str, Mapping[str, Any]], mode: str) -> str | None:
    """The candidate of a mode that serves most per cost."""
    mine = {name: float(facts["per_cost"]) for name, facts in found.items() if facts["mode"] == mode}
    return max(mine, key=lambda name: mine[name], default=None)


def _settings(candidate: Candidate) -> Figures:
    first, second = candidate.tensor_parallel
    settings: Figures = {"cluster.prefill": candidate.prefill, "cluster.decode": candidate.decode}
    if max(first, second) > 1:
        settings["engine.tensor_parallel"] = {"prefill": first, "decode": second}
    if candidate.budget:
        settings["engine.max_num_batched_tokens"] = candidate.budget
    return settings


# --- words and pictures ----------------------------------------------------------------------------------------------


def _answer(summary: Figures) -> str:
    rows = {row["name"]: row for row in summary["candidates"]}
    if not rows:
        return "Nothing was simulated."
    if summary["best"] is None:
        return f"No candidate serves a request within {slo_text(summary['slo_ms'])}."
    pair, alone = (rows.get(summary[key]) for key in ("best_pd", "best_colocated"))
    if pair is None or alone is None:
        limits = slo_text(summary["slo_ms"])
        return f"{summary['best']} serves {_rate(rows[summary['best']])} within {limits}, by simulation."
    ratio = pair["per_cost"] / alone["per_cost"] if alone["per_cost"] else math.inf
    within = f"within {slo_text(summary['slo_ms'])}, by simulation"
    if ratio > 1 + ALIKE:
        many = "which colocated workers do not serve at all"
        if not math.isinf(ratio):
            many = f"{ratio:.2f} times as many per cost as {alone['name']} ({_rate(alone)}, bound by {alone['binds']})"
        text = f"Disaggregate: {pair['name']} serves {_rate(pair)} {within}, {many}."
    elif ratio < 1 - ALIKE:
        text = (
            f"Do not disaggregate: {alone['name']} serves {_rate(alone)} {within}, and the best split, {pair['name']}, "
            f"{ratio:.2f} times as many per cost ({_rate(pair)}, bound by {pair['binds']})."
        )
    else:
        text = (
            f"It makes no difference: {pair['name']} serves {_rate(pair)} and {alone['name']} {_rate(alone)} {within}."
        )
    turning = [row["change"] for row in summary["changes"] if _sign(row) not in (0, _sign_of(ratio))]
    if turning:
        text += f" This would change if {', or if '.join(turning)}."
    return text


def _rate(row: Figures) -> str:
    return f"{row['per_device']:.3g} requests/s per device"


def _sign_of(ratio: float) -> int:
    return 0 if abs(ratio - 1) <= ALIKE else 1 if ratio > 1 else -1


def _sign(row: Figures) -> int:
    """Which mode serves more with a change: 1 disaggregated, -1 colocated, 0 neither."""
    if not row.get(COLOCATED):
        return 1 if row.get(PD) else 0
    return _sign_of(float(row.get(PD, 0.0)) / float(row[COLOCATED]))


def _picture(rows: Sequence[Figures]) -> Picture:
    shown = list(rows[:16])
    bars = Mark(shown, "per_device", "name", "mode", ARM_LOOKS, kind="bars")
    lines = [
        {**point, "name": row["name"], "share": 100 * point["attainment"]}
        for row in shown[:6]
        for point in row["points"]
    ]
    return Picture(
        "plan",
        "Requests per second and device within the SLO",
        "Left: the most that each candidate sustains. Right: how many requests meet the SLO over the load, of the best "
        "six.",
        [
            Panel([bars], "requests/s per device", rows=[row["name"] for row in shown], xlim=(0, None)),
            Panel([Mark(lines, "rate", "share", "name")], "requests/s", "requests within the SLO, %", log="x",
                  ylim=(0, 102), legend="lower left"),
        ],
        columns=2,
        height_in=max(4.2, 0.3 * len(shown) + 1.4),
    )  # fmt: skip


def _candidate_table(rows: Sequence[Figures]) -> TableBlock:
    columns = (
        "candidate | name",
        "requests/s | rate:.3g",
        "per device | per_device:.3g",
        "per cost | per_cost:.3g",
        "TTFT p50 / p99, ms | at_rate.ttft_ms.p50:.0f / at_rate.ttft_ms.p99:.0f",
        "gaps p50 / p99, ms | at_rate.itl_ms.p50:.1f / at_rate.itl_ms.p99:.1f",
        "exposed p99, ms | at_rate.exposed_ms.p99:.1f",
        "busiest link, % | at_rate.link*100:.1f",
        "beyond that | binds",
    )
    caption = (
        "Figures at the rate of the first column. Beyond that: the limit that most requests miss, or a growing queue; "
        "and what is busiest."
    )
    return table("Candidates", rows, columns, caption)


def _change_table(rows: Sequence[Figures]) -> TableBlock:
    names = {1: "disaggregated", -1: "colocated", 0: "neither"}
    shown = [{**row, "better": names[_sign(row)]} for row in rows]
    columns = ("if | change", f"disaggregated | {PD}:.3g", f"colocated | {COLOCATED}:.3g", "better")
    caption = (
        f"Requests/s per cost of the best candidate of each kind, with one thing changed. Neither: within {ALIKE:.0%}."
    )
    return table("What would change the answer", shown, columns, caption)
