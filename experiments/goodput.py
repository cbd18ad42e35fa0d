"""``pdserve experiment goodput``: requests per second and device that meet an SLO, disaggregated and colocated.

Every split xPyD is a service of its own. Both arms run on it, one after the other (`experiments.modes`): mode
``pd``, and mode ``colocated``, in which each of its workers serves whole requests. So both have the same devices.
Colocated requests do not depend on the split; their rows of all services with equally many devices count together."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from pydantic import Field

from experiments.environment import devices_here
from experiments.experiment import Cell, Options, option
from experiments.matrix import IDLE, ModeMatrix, cell_caveats, check_loads, goodput_panel, load_table, under_load
from experiments.modes import ATTAINMENT, COLOCATED, PD, SLO, ArmLoads, Split, slo_text
from experiments.report.drawing import ARM_LOOKS, DOTTED, MARKERS, PALETTE, Look, Picture, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, FinishedCell, Parameters, RunData
from experiments.statistics import difference_interval, mean_interval
from experiments.workloads.catalog import workload_of
from experiments.workloads.conversation import Workload
from experiments.workloads.options import WorkloadOptions
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import Interval, interval_text

_IDLE_PAIRS = 8
_MOST_DEVICES = 4
_TTFT_PERCENT = 90.0
"""Prompts of a workload differ in length, so an automatic SLO goes by this percentile of the idle TTFT."""
_PER_DEVICE = "requests/s per device"


class GoodputOptions(WorkloadOptions, Options):
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


class Goodput(ModeMatrix):
    """See the module."""

    name = "goodput"
    question = "How many requests per second and device meet an SLO, disaggregated and colocated?"
    options_type = GoodputOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """Pairs on the idle first split, for an automatic SLO; then one cell per split and rate. For a running
        service: its own split only."""
        options = self.options
        if not options.rates:
            raise InvalidRequest("--rates: is empty")
        check_loads(options.rates, options.slo)
        self.workload({})  # checks it
        cells = []
        for number, split in enumerate(self._splits(attached)):
            place, service = {"split": split.name, "devices": split.devices}, {} if attached else split.settings
            if options.slo == "auto" and number == 0:
                cells.append(self.cell(f"{split.name}/idle", {**place, "load": IDLE}, service, _IDLE_PAIRS))
            for rate in options.rates:
                parameters = {**place, "load": f"rate-{rate:g}", "rate_per_device": rate}
                cells.append(self.cell(f"{split.name}/rate-{rate:g}", parameters, service))
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
        if not chosen:
            raise InvalidRequest("--splits: is empty")
        return [Split.parse(text, "--splits") for text in chosen]

    def workload(self, parameters: Parameters) -> Workload:
        """The same in all cells. InvalidRequest names the option that is wrong."""
        return workload_of(self.options)

    def slo(self, cell: FinishedCell, run: RunData) -> SLO | None:
        """An automatic one comes from all idle requests."""
        idle = [row for each in run.cells if not under_load(each.parameters) for row in run.rows_of(each.cell)]
        return SLO.chosen(self.options.slo, idle, _TTFT_PERCENT)

    def found(self, cells: Sequence[Figures], run: RunData) -> Figures:
        """``workload``; ``slo_ms``.

        ``systems``, one per split and one for colocated requests per number of devices: ``system``, ``arm``, ``split``,
        ``devices``; ``goodput_rps_per_device``, the best of the measured loads, and ``at_rate_per_device``;
        ``sustained_rate_per_device``, the largest load up to which 90 % of the requests meet the SLO; ``points``, every
        load.

        ``best_split``: the disaggregated split with the best goodput. ``gain_rps_per_device``: its goodput minus that
        of colocated requests on as many devices, each at its own best load."""
        loaded = [cell for cell in run.cells if under_load(cell.parameters) and run.rows_of(cell.cell)]
        slo, seed = self.slo(loaded[0], run) if loaded else None, self.options.seed
        systems = [] if slo is None else _systems(loaded, run, slo, seed)
        values = [system.pop("values") for system in systems]
        found: Figures = {"best_split": None, "gain_rps_per_device": None}
        if systems:
            best = max((system for system in systems if system["arm"] == PD), key=_goodput)
            (theirs, before), (ours, after) = (values[systems.index(each)] for each in (_rival(systems, best), best))
            gain = difference_interval(theirs, ours, seed, (before, after))
            found = {"best_split": best["split"], "gain_rps_per_device": gain and gain.to_dict()}
        slo_ms = slo and dict(slo.limits_ms)
        return {"workload": run.fact("workload", ""), "slo_ms": slo_ms, "systems": systems, **found}

    def report(self, run: RunData, summary: Figures) -> Report:
        """Goodput over the load, and the tables."""
        method = (
            f"Poisson arrivals, {self.options.duration_s:g} s per mode and round, {self.options.rounds} rounds, A B B "
            "A, each mode alone on the service with the same prompts at the same times; intervals are 95 % bootstrap"
        )
        systems, loaded = summary["systems"], [cell for cell in summary["cells"] if under_load(cell)]
        source = "twice an idle colocated service" if self.options.slo == "auto" else "as given"
        slo = f"{slo_text(summary['slo_ms'])} ({source})" if summary["slo_ms"] else ""
        caveats = [
            "The result holds for this SLO, workload and machine. A stricter limit of the gaps favours "
            "disaggregation, a stricter limit of TTFT favours colocated workers.",
            "Goodput is the best of the measured rates: the true maximum may lie between two of them, and chance "
            "helps to choose the best, for which the interval of the difference does not account.",
            {each["devices"] for each in systems} == {2}
            and "With two devices 1P1D is the only split; other splits need more devices.",
            *cell_caveats(summary["cells"]),
        ]
        setup = setup_of(run, method, workload=summary["workload"], SLO=slo)
        report = Report("Goodput per device", self.question, _answer(summary), setup, [], caveats, summary["failed"])
        if systems:
            columns = (
                "system",
                "devices",
                f"goodput, {_PER_DEVICE} | goodput_rps_per_device",
                f"at a load of, {_PER_DEVICE} | at_rate_per_device:g",
                f"≥ 90 % meet the SLO up to, {_PER_DEVICE} | sustained_rate_per_device:g",
            )
            ordered = sorted(systems, key=_goodput, reverse=True)
            best = table("The best of each system", ordered, columns, "0: with none of the measured loads.")
            report.blocks += [_picture(systems), best]
        if loaded:
            report.blocks.append(load_table(loaded))
        return report


def _systems(cells: Sequence[FinishedCell], run: RunData, slo: SLO, seed: int) -> list[Figures]:
    """Every split disaggregated, and colocated by number of devices, with goodput and attainment at each rate. The
    ``values`` of the best one are the goodput of each request, and its round."""
    members: dict[tuple[str, str | None, int], dict[float, list[ArmLoads]]] = {}
    for cell in cells:
        split, devices, rate = (cell.parameters[key] for key in ("split", "devices", "rate_per_device"))
        for arm, name in ((PD, split), (COLOCATED, None)):
            loads = members.setdefault((arm, name, devices), {}).setdefault(float(rate), [])
            loads.append(ArmLoads.of(cell, run.rows_of(cell.cell), arm))
    systems = []
    for (arm, split, devices), by_rate in members.items():
        points: list[Figures] = []
        values = []
        for rate, loads in sorted(by_rate.items()):
            met, rounds = ([*itertools.chain(*each)] for each in zip(*(load.met(slo) for load in loads), strict=True))
            offered = statistics.fmean(load.offered_rps for load in loads) / devices
            attainment = mean_interval(met, seed, rounds)  # requests of one round share a queue
            if attainment is not None:
                goodput = attainment.scaled(offered).to_dict()
                points.append(
                    {"rate_per_device": rate, "attainment": attainment.to_dict(), "goodput_rps_per_device": goodput}
                )
                values.append(([each * offered for each in met], rounds))
        if points:
            best = max(points, key=_goodput)
            sustaining = itertools.takewhile(lambda point: point["attainment"]["mean"] >= ATTAINMENT, points)
            systems.append(
                {
                    "system": f"{split} disaggregated" if arm == PD else f"{devices} colocated",
                    "arm": arm,
                    "split": split,
                    "devices": devices,
                    "goodput_rps_per_device": best["goodput_rps_per_device"],
                    "at_rate_per_device": best["rate_per_device"],
                    "sustained_rate_per_device": max((point["rate_per_device"] for point in sustaining), default=0.0),
                    "points": points,
                    "values": values[points.index(best)],
                }
            )
    return systems


def _goodput(system: Figures) -> float:
    """The mean goodput per device of a system, or of one of its points."""
    return float(system["goodput_rps_per_device"]["mean"])


def _rival(systems: Sequence[Figures], split: Figures) -> Figures:
    """The colocated workers on as many devices."""
    return next(each for each in systems if (each["arm"], each["devices"]) == (COLOCATED, split["devices"]))


def _answer(summary: Figures) -> str:
    systems = summary["systems"]
    if not systems:
        if summary["slo_ms"]:
            return "No load was measured to its end."
        return "There is no SLO to judge by: no idle request was completed."
    split = next(each for each in systems if each["split"] == summary["best_split"])
    colocated, gain = _rival(systems, split), Interval.from_dict(summary["gain_rps_per_device"])
    kind = {1: "more than", -1: "less than", 0: "not distinguishable from"}[gain.sign]
    before, after = ("The best split is ", ", which") if sum(each["arm"] == PD for each in systems) > 1 else ("", "")
    up_to = [
        f"up to {each['sustained_rate_per_device']:g} {_PER_DEVICE}"
        if each["sustained_rate_per_device"]
        else f"with none of the {len(each['points'])} measured loads"
        for each in (split, colocated)
    ]
    return (
        f"{before}{split['split']}{after} serves at most "
        f"{interval_text(split['goodput_rps_per_device'])} {_PER_DEVICE} within {slo_text(summary['slo_ms'])}. That is "
        f"{kind} the {interval_text(colocated['goodput_rps_per_device'])} of {colocated['devices']} colocated workers "
        f"(difference {gain.text(_PER_DEVICE)}). "
        f"At least {100 * ATTAINMENT:.0f} % of the requests meet the SLO {up_to[0]} disaggregated and {up_to[1]} "
        "colocated."
    )


def _picture(systems: Sequence[Figures]) -> Picture:
    """Goodput per device over the load per device. Colocated systems are blue and dashed. The first split has the
    colour of disaggregation, others further ones."""
    looks: dict[str, Look] = {}
    turns = itertools.cycle(zip(PALETTE[1:], MARKERS, strict=False))
    for system in systems:
        dashes = {} if system["devices"] == systems[0]["devices"] else {"linestyle": DOTTED}
        look = {**ARM_LOOKS[COLOCATED], **dashes, "label": system["system"]}
        if system["arm"] == PD:
            look = dict(zip(("color", "marker"), next(turns), strict=True))
        looks[system["system"]] = look
    points = [{**point, "system": system["system"]} for system in systems for point in system["points"]]
    columns = "rate_per_device", "goodput_rps_per_device", "system"
    return Picture(
        "goodput",
        "Goodput over load",
        "Requests per second and device that meet the SLO, with 95 % intervals. On the dotted line every request "
        "meets it. Where a curve falls, the system spends its time on requests that are late anyway.",
        [goodput_panel(points, *columns, looks, _PER_DEVICE, legend="upper left")],
    )
