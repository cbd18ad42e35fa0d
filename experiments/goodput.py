"""``pdserve experiment goodput``: requests per second and device that meet an SLO, disaggregated and colocated.

Every split xPyD is a service of its own. Both arms run on it, one after the other (`experiments.modes`): mode
``pd``, and mode ``colocated``, in which each of its workers serves whole requests. So both have the same devices.
Colocated requests do not depend on the split; their rows of all services with equally many devices count together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from experiments.bench_plan import BenchPlan, Pace, fitted
from experiments.environment import devices_here
from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.modes import (
    ATTAINMENT,
    COLOCATED,
    PD,
    REQUEST_TIMEOUT_S,
    SLO,
    ArmLoads,
    LoadPlan,
    Split,
    attainment_panel,
    check_rates,
    check_slo,
    differences_of,
    load_caveats,
    slo_of,
    slo_text,
    summarise_load,
)
from experiments.report.drawing import (
    ARM_LOOKS,
    DOTTED,
    MARKERS,
    PALETTE,
    Look,
    Mark,
    Panel,
    Picture,
    Rule,
    TableBlock,
    table,
)
from experiments.report.page import Report, setup_of
from experiments.run_folder import FinishedCell, RunData
from experiments.statistics import difference_interval, mean_interval
from experiments.warm_up import requests_of, warm_up
from experiments.workloads.arrivals import ClosedLoop
from experiments.workloads.catalog import WorkloadOptions
from experiments.workloads.conversation import Workload
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import Interval
from pdserve.core.request import Mode

_IDLE_REQUESTS = 8
_MOST_DEVICES = 4
_TTFT_PERCENT = 90.0
"""Prompts of a workload differ in length, so an automatic SLO goes by this percentile of the idle TTFT."""


class GoodputOptions(Options):
    """Options of `Goodput`."""

    splits: tuple[str, ...] = Field(
        ("auto",), description="splits to compare, such as 1P1D,2P1D; auto: every split of the devices"
    )
    devices: int | None = Field(
        None, ge=2, le=64, description="devices that auto divides (none: those of this host, at most 4)"
    )
    rates: tuple[float, ...] = option(
        (0.25, 0.5, 1.0, 2.0, 4.0),
        description="loads in requests/s per device",
        quick=[0.5, 1.5],
    )
    slo: str = Field(
        "auto",
        description="limits in ms: ttft=200,itl=50 (ttft_decode, tpot, e2e); auto: twice the idle colocated TTFT "
        "(90th percentile) and gap between tokens",
    )
    duration_s: float = option(15.0, gt=0, le=86_400, description="seconds of each load", quick=5.0)
    rounds: int = option(6, ge=2, description="loads of each mode per cell", quick=2)
    dataset: str = Field("random", description="what is sent, see `pdserve bench`")
    dataset_path: str | None = Field(None, description="file of the dataset")
    input_len: str | None = Field(None, description="tokens of each prompt, N or LOW:HIGH (random: 256)")
    output_len: str | None = Field(None, description="tokens to generate for each, N or LOW:HIGH (random: 32)")
    prefix_len: int | None = Field(None, description="tokens that random prompts share")
    num_prefixes: int | None = Field(None, description="how many different prefixes")
    turns: int | None = Field(None, description="turns of a conversation")
    pause_s: float | None = Field(None, description="seconds between an answer and the next turn")
    scale: str | None = Field(None, description="factor on the lengths of a published dataset, or INPUT:OUTPUT")
    block_size: int | None = Field(None, description="tokens of a hash id of a trace")

    def workload(self) -> Workload:
        """What is sent. InvalidRequest names the option that is wrong."""
        path = None if self.dataset_path is None else Path(self.dataset_path)
        names = ("dataset", "input_len", "output_len", "prefix_len", "num_prefixes", "turns", "pause_s", "scale")
        return WorkloadOptions(
            **{name: getattr(self, name) for name in names}, dataset_path=path, block_size=self.block_size
        ).workload()


class Goodput(Experiment):
    """See the module."""

    name: ClassVar[str] = "goodput"
    question: ClassVar[str] = "How many requests per second and device meet an SLO, disaggregated and colocated?"
    options_type: ClassVar[type[Options]] = GoodputOptions
    options: GoodputOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """Idle requests of the first split, for an automatic SLO; then one cell per split and rate. For a running
        service: its own split only."""
        options = self.options
        check_rates(options.rates)
        if not options.rates:
            raise InvalidRequest("--rates: is empty")
        check_slo(options.slo)
        options.workload()  # checks it
        splits = self._splits(attached)
        cells: list[Cell] = []
        if options.slo == "auto":
            parameters = {"split": splits[0].name, "devices": splits[0].devices, "load": "idle"}
            service = {} if attached else splits[0].settings
            cells.append(Cell(f"{splits[0].name}/idle", parameters, service, _IDLE_REQUESTS))
        for split in splits:
            for rate in options.rates:
                parameters = {
                    "split": split.name,
                    "devices": split.devices,
                    "load": f"rate-{rate:g}",
                    "rate_per_device": rate,
                }
                service, load = {} if attached else split.settings, self._load(rate, split.devices)
                name = f"{split.name}/rate-{rate:g}"
                cells.append(Cell(name, parameters, service, load.planned(), load.sending_s, may_overload=True))
        return cells

    def _splits(self, attached: ServiceStatus | None) -> list[Split]:
        chosen = self.options.splits
        if attached is not None:
            split = Split.of(attached)
            if chosen not in (("auto",), (split.name,)):
                raise InvalidRequest(
                    f"--splits: the running service is {split.name}, and its workers are not changed; leave it out"
                )
            return [split]
        if chosen == ("auto",):
            return Split.all(self.options.devices or min(_MOST_DEVICES, max(2, devices_here())))
        splits = [Split.parse(text, "--splits") for text in chosen]
        if not splits:
            raise InvalidRequest("--splits: is empty")
        return splits

    def _load(self, rate_per_device: float, devices: int) -> LoadPlan:
        options = self.options
        return LoadPlan(rate_per_device * devices, options.duration_s, options.rounds, options.seed)

    async def measure(self, bench: Bench) -> None:
        """Idle: colocated requests, one at a time. Under load: the rounds of both arms."""
        parameters = bench.cell.parameters
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            plan = BenchPlan(self.options.workload(), Pace(rate=1.0), seed=self.options.seed)
            workload = (await fitted(client, plan, status)).workload
            bench.facts["workload"] = workload.describe()
            if "rate_per_device" in parameters:
                load = self._load(parameters["rate_per_device"], parameters["devices"])
                await load.send(bench, client, workload)
                return

            await warm_up(bench, client, requests_of(workload, self.options.seed - 2, status.vocab_size), (COLOCATED,))
            await bench.load(
                client,
                workload.conversations(_IDLE_REQUESTS, self.options.seed - 1, status.vocab_size),
                ClosedLoop(1),
                arm=COLOCATED,
                repeat=0,
                mode=Mode.COLOCATED,
                timeout_s=REQUEST_TIMEOUT_S,
            )

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``workload``; ``slo_ms`` and ``slo_source`` (``idle`` or ``option``).

        ``cells``, one per split and rate: ``cell``, ``split``, ``devices``, ``load``, ``rate_per_device``, and the
        keys of `summarise_load`. ``systems``, one per split and one for colocated requests per number of devices:
        ``system``, ``arm``, ``split``, ``devices``; ``goodput_rps_per_device``, the best of the measured loads, and
        ``at_rate_per_device``; ``sustained_rate_per_device``, the largest load up to which 90 % of the requests meet
        the SLO; ``points``, every load.

        ``best`` and ``best_split``: the system with the best goodput, and the best disaggregated split.
        ``gain_rps_per_device``: goodput of the best split minus that of colocated requests on as many devices, each
        at its own best load."""
        idle = [row for cell in run.cells if cell.parameters["load"] == "idle" for row in run.rows_of(cell.cell)]
        slo = slo_of(self.options.slo, idle, _TTFT_PERCENT)
        measured = [cell for cell in run.cells if "rate_per_device" in cell.parameters and run.rows_of(cell.cell)]
        cells = [
            {
                "cell": cell.cell,
                **cell.parameters,
                **summarise_load(cell, run.rows_of(cell.cell), slo, self.options.seed),
            }
            for cell in measured
        ]
        systems = [] if slo is None else _systems(measured, run, slo, self.options.seed)
        summary: dict[str, Any] = {
            "experiment": self.name,
            "workload": next((cell.facts["workload"] for cell in run.cells if "workload" in cell.facts), ""),
            "slo_ms": None if slo is None else dict(slo.limits_ms),
            "slo_source": "idle" if self.options.slo == "auto" else "option",
            "cells": cells,
            "systems": [{key: value for key, value in system.items() if key != "values"} for system in systems],
            "best": None,
            "best_split": None,
            "gain_rps_per_device": None,
            "failed": [
                each for cell in measured for each in differences_of(cell.cell, run.rows_of(cell.cell), under_load=True)
            ],
        }
        if systems:
            best = max(systems, key=_goodput)
            disaggregated = max((each for each in systems if each["arm"] == PD), key=_goodput)
            rivals = [s for s in systems if s["arm"] == COLOCATED and s["devices"] == disaggregated["devices"]]
            (theirs, their_rounds), (ours, our_rounds) = rivals[0]["values"], disaggregated["values"]
            gain = difference_interval(theirs, ours, self.options.seed, (their_rounds, our_rounds))
            summary["best"] = best["system"]
            summary["best_split"] = disaggregated["split"]
            summary["gain_rps_per_device"] = None if gain is None else gain.to_dict()
        return summary

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """Goodput and attainment over the load, and the tables."""
        options = self.options
        method = (
            f"Poisson arrivals, {options.duration_s:g} s per mode and round, {options.rounds} rounds, A B B A, each "
            "mode alone on the service with the same prompts at the same times; intervals are 95 % bootstrap"
        )
        setup = [*setup_of(run, method), ("workload", summary["workload"])]
        if summary["slo_ms"]:
            source = "twice an idle colocated service" if summary["slo_source"] == "idle" else "as given"
            setup.append(("SLO", f"{slo_text(summary['slo_ms'])} ({source})"))
        report = Report(
            title="Goodput per device",
            question=self.question,
            answer=_answer(summary),
            setup=setup,
            caveats=_caveats(summary),
            failures=summary["failed"],
        )
        if summary["systems"]:
            report.blocks += [*_goodput_pictures(summary["systems"]), _systems_table(summary["systems"])]
        if summary["cells"]:
            report.blocks.append(_cells_table(summary["cells"]))
        return report


def _systems(cells: Sequence[FinishedCell], run: RunData, slo: SLO, seed: int) -> list[dict[str, Any]]:
    """Every split disaggregated, and colocated by number of devices, with goodput and attainment at each rate."""
    members: dict[tuple[str, str, int], list[FinishedCell]] = {}
    for cell in cells:
        split, devices = str(cell.parameters["split"]), int(cell.parameters["devices"])
        members.setdefault((PD, split, devices), []).append(cell)
        members.setdefault((COLOCATED, "", devices), []).append(cell)
    systems = []
    for (arm, split, devices), own in members.items():
        points: list[dict[str, Any]] = []
        values: list[tuple[list[float], list[tuple[str, int]]]] = []
        for rate in sorted({float(cell.parameters["rate_per_device"]) for cell in own}):
            at_rate = [cell for cell in own if cell.parameters["rate_per_device"] == rate]
            loads = [ArmLoads.of(cell, run.rows_of(cell.cell), arm) for cell in at_rate]
            met: list[float] = []
            rounds: list[tuple[str, int]] = []  # requests of one round share a queue
            for each in loads:
                of_cell, rounds_of_cell = each.met(slo)
                met += of_cell
                rounds += rounds_of_cell
            offered = statistics.fmean(each.offered_rps for each in loads) / devices
            attainment = mean_interval(met, seed, rounds)
            good = mean_interval([each * offered for each in met], seed, rounds)
            if attainment is not None and good is not None:
                points.append({
                    "rate_per_device": rate,
                    "attainment": attainment.to_dict(),
                    "goodput_rps_per_device": good.to_dict(),
                })  # fmt: skip
                values.append(([each * offered for each in met], rounds))
        if not points:
            continue
        best = max(range(len(points)), key=[_goodput(point) for point in points].__getitem__)
        sustained = 0.0
        for point in points:
            if point["attainment"]["mean"] < ATTAINMENT:
                break
            sustained = point["rate_per_device"]
        systems.append({
            "system": f"{split} disaggregated" if arm == PD else f"{devices} colocated",
            "arm": arm,
            "split": split or None,
            "devices": devices,
            "goodput_rps_per_device": points[best]["goodput_rps_per_device"],
            "at_rate_per_device": points[best]["rate_per_device"],
            "sustained_rate_per_device": sustained,
            "points": points,
            "values": values[best],
        })  # fmt: skip
    return systems


def _goodput(system: Mapping[str, Any]) -> float:
    """The mean goodput per device of a system, or of one of its points."""
    return float(system["goodput_rps_per_device"]["mean"])


def _answer(summary: Mapping[str, Any]) -> str:
    if not summary["systems"]:
        if summary["slo_ms"]:
            return "No load was measured to its end."
        return "There is no SLO to judge by: no idle request was completed."
    split = next(each for each in summary["systems"] if each["split"] == summary["best_split"])
    colocated = next(
        each for each in summary["systems"] if each["arm"] == COLOCATED and each["devices"] == split["devices"]
    )
    gain = Interval.from_dict(summary["gain_rps_per_device"])
    kind = {1: "more than", -1: "less than", 0: "not distinguishable from"}[gain.sign]
    several = sum(each["arm"] == PD for each in summary["systems"]) > 1
    return (
        f"{'The best split is ' if several else ''}{split['split']}{', which' if several else ''} serves at most "
        f"{_goodput(split):.2f} requests/s per device within {slo_text(summary['slo_ms'])}. That is {kind} the "
        f"{_goodput(colocated):.2f} of {colocated['devices']} colocated workers (difference "
        f"{gain.text('requests/s per device')}). At least {100 * ATTAINMENT:.0f} % of the requests meet the SLO up to "
        f"{split['sustained_rate_per_device']:g} requests/s per device disaggregated and up to "
        f"{colocated['sustained_rate_per_device']:g} colocated."
    )


def _caveats(summary: Mapping[str, Any]) -> list[str]:
    caveats = [
        "The result holds for this SLO, workload and machine. A stricter limit of the gaps favours disaggregation, a "
        "stricter limit of TTFT favours colocated workers.",
        "The gap between token 1 and token 2 includes the hand-off, so the limit of the gaps applies to it as well.",
        "Goodput is the best of the measured rates: the true maximum may lie between two of them, and chance helps to "
        "choose the best, for which the interval of the difference does not account.",
    ]
    splits = [system["devices"] for system in summary["systems"] if system["arm"] == PD]
    if len(splits) == 1 and splits[0] == 2:
        caveats.append("With two devices 1P1D is the only split; other splits need more devices.")
    return [*caveats, *load_caveats(summary["cells"])]


def _looks(systems: Sequence[Mapping[str, Any]]) -> dict[str, Look]:
    """Colocated systems are blue and dashed. The first split has the colour of disaggregation, others further ones."""
    looks: dict[str, Look] = {}
    splits = [each["system"] for each in systems if each["arm"] == PD]
    for system in systems:
        name, turn = system["system"], splits.index(system["system"]) if system["arm"] == PD else 0
        dashes = {} if system["devices"] == systems[0]["devices"] else {"linestyle": DOTTED}
        turned = {"color": PALETTE[1 + turn % (len(PALETTE) - 1)], "marker": MARKERS[turn % len(MARKERS)]}
        looks[name] = turned if system["arm"] == PD else {**ARM_LOOKS[COLOCATED], **dashes, "label": name}
    return looks


def _goodput_pictures(systems: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """Goodput per device, and the share of requests that met the SLO, over the load per device."""
    points = [
        {"arm": system["system"], "rate": point["rate_per_device"], "good": point["goodput_rps_per_device"],
         "met": point["attainment"]}
        for system in systems
        for point in system["points"]
    ]  # fmt: skip
    load = "offered load, requests/s per device"
    attainment = replace(attainment_panel(points, load, _looks(systems)), legend="lower left")
    good = Panel(
        [Mark(points, "rate", "good", by="arm", looks=_looks(systems)), Rule("diagonal", look={"linestyle": DOTTED})],
        x=load,
        y="goodput, requests/s per device",
        ticks=attainment.ticks,
        xlim=(0, 1.06 * attainment.ticks[-1]),
        ylim=(-0.02 * attainment.ticks[-1], 1.03 * attainment.ticks[-1]),
        legend="upper left",
    )
    return [
        Picture(
            "goodput",
            "Goodput over load",
            "Requests per second and device that meet the SLO, with 95 % intervals. On the dotted line every request "
            "meets it. Where a curve falls, the system spends its time on requests that are late anyway.",
            [good],
        ),
        Picture(
            "attainment",
            "Attainment over load",
            "Share of all requests that meet the SLO, with 95 % intervals; failed requests do not. The dashed line is "
            "the 90 % above which a system sustains the load.",
            [attainment],
        ),
    ]


def _systems_table(systems: Sequence[Mapping[str, Any]]) -> TableBlock:
    columns = (
        "system",
        "devices",
        "goodput, requests/s per device | goodput_rps_per_device",
        "at a load of, requests/s per device | at_rate_per_device:g",
        "≥ 90 % meet the SLO up to, requests/s per device | sustained_rate_per_device:g",
    )
    ordered = sorted(systems, key=_goodput, reverse=True)
    return table("The best of each system", ordered, columns, "0: at no load that was measured.")


def _cells_table(cells: Sequence[Mapping[str, Any]]) -> TableBlock:
    arms = [
        {"cell": cell["cell"], "arm": arm, **{key: cell[key][arm] for key in ("attainment", "errors", "goodput_rps",
         "arms_ms", "lag")}, "n": (cell["attainment"][arm] or {"n": 0})["n"]}
        for cell in cells
        for arm in (PD, COLOCATED)
    ]  # fmt: skip
    columns = (
        "cell",
        "arm",
        "requests | n",
        "failed | errors",
        "SLO met, % | attainment*100:.0f",
        "goodput, requests/s | goodput_rps.mean:.2f",
        "TTFT mean, ms | arms_ms.ttft:.1f",
        "TTFT p99, ms | arms_ms.ttft_p99:.1f",
        "ITL p99, ms | arms_ms.itl_p99:.1f",
        "lag p99, ms | lag.p99_ms:.1f",
    )
    return table("All cells", arms, columns)
