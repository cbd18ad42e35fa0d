"""``pdserve plan``: how many prefill and decode workers, over which link, or none apart at all.

Every candidate is a service in the simulated world (`simulator.planning`): its router, admission and schedulers are the
real ones, and steps and transfers take the time that a profile of this machine (`experiments.profile`) or a device's
data sheet predicts. For each, the largest rate is searched at which `ATTAINMENT` of the requests meet the SLO. Then the
best disaggregated and the best colocated one are searched again with one thing changed at a time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Unpack

import msgspec
import numpy as np
import yaml
from pydantic import Field

from checkpoints.source import ModelSource, resolve_model
from experiments.deployment import Deployment, Service
from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.modes import ATTAINMENT, COLOCATED, PD, SLO, SLO_FACTOR, Split, slo_text
from experiments.profile import Profiled
from experiments.report.drawing import ARM_LOOKS, Mark, Panel, Picture, TableBlock, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, RequestRow, RunData
from experiments.workloads.arrivals import random_arrivals
from experiments.workloads.catalog import workload_of
from experiments.workloads.conversation import Conversation
from experiments.workloads.options import WorkloadOptions
from ops.model_memory import ServedModel, activation_bytes
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.view import WaitMode
from simulator.planning.devices import USABLE_MEMORY, DeviceKind, device_kind
from simulator.planning.service import (
    LinkClass,
    Overheads,
    PlannedRequests,
    PlannedService,
    PlannedTurn,
    PlannedWorker,
    RequestResult,
    ServiceRun,
    run_service,
)
from simulator.planning.step_time import StepTime

IDLE, CHANGES = "idle", "changes"
"""The first and the last cell."""
_MOST_CANDIDATES = 32
_SEARCHES = 5
"""Rates that are simulated between one that is sustained and its double, which is not: the result is within 2 %."""
_MOST_REQUESTS = 1200
"""Of a simulated load."""
_ALIKE = 0.03
"""Rates that differ by less are called equal."""
_CHUNKS = (512,)
"""Token budgets of colocated workers that are tried beside the usual one."""
_PERCENT = 90.0
_ALONE = 16
"""Requests that an automatic SLO goes by."""
_VOCAB = 32_000
_GPU_OVERHEADS = Overheads(0.002, 0.001, 0.001, 0.001, 0.001, 0.0)
"""Assumed where no profile says what a service adds."""


class PlanOptions(WorkloadOptions, Options):
    """Options of `Plan`."""

    model: str = Field("dummy:8b", description="model to serve: a folder, or dummy:8b")
    device: str = Field(
        "h100",
        description="a100, h100, h200, b200, l40s, mi300x, lpu; flops=…,bandwidth=…,memory=…,link=…,nic=…; or the "
        "folder of a run of `pdserve experiment profile`",
    )
    decode_device: str | None = Field(None, description="device of decode workers (none: as --device)")
    devices: int = option(8, ge=2, le=4096, description="devices in all", quick=4)
    per_host: int = Field(8, ge=1, description="devices of a host")
    tensor_parallel: tuple[int, ...] = Field(
        (), description="devices of a worker, to be tried for each role (none: the fewest that hold the model)"
    )
    splits: tuple[str, ...] = Field(("auto",), description="splits to try, such as 3P1D; auto: all")
    wan: str | None = Field(
        None, description="GBIT:RTT_MS of a link that all hand-offs share, as between two sites (none: there is none)"
    )
    slo: str = Field(
        "auto",
        description="limits in ms: ttft=200,itl=50 (ttft_decode, tpot, e2e); auto: twice the idle colocated TTFT "
        "(90th percentile) and gap between tokens",
    )
    cost: float = Field(1.0, gt=0, description="cost of a device, in any unit")
    decode_cost: float | None = Field(None, gt=0, description="that of a device of decode workers (none: the same)")
    requests: int = option(300, ge=20, description="requests of each simulated load, at least", quick=100)
    duration_s: float = option(10.0, gt=0, description="seconds of each simulated load, at least", quick=2.0)
    apply: Path | None = Field(None, description="write the configuration of the best deployment to this file")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment: workers by role, and how many devices each has. Colocated ones have decode workers only.
    ``budget``: tokens of a step of colocated workers (0: the usual)."""

    mode: str
    prefill: int
    decode: int
    tensor_parallel: tuple[int, int]
    budget: int = 0

    @property
    def name(self) -> str:
        """Of its cell."""
        degrees = dict(zip((PD, COLOCATED), (self.tensor_parallel, self.tensor_parallel[1:]), strict=True))[self.mode]
        suffix = "" if max(degrees) == 1 else f" TP {'+'.join(map(str, degrees))}"
        if self.mode == PD:
            return f"{self.prefill}P{self.decode}D{suffix}"
        return f"{self.decode} colocated{suffix}{f' budget {self.budget}' if self.budget else ''}"

    @property
    def devices(self) -> tuple[int, int]:
        """Devices of prefill and of decode workers."""
        return self.prefill * self.tensor_parallel[0], self.decode * self.tensor_parallel[1]

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of its cell."""
        return {
            "mode": self.mode,
            "prefill": self.prefill,
            "decode": self.decode,
            "tensor_parallel": list(self.tensor_parallel),
            "budget": self.budget,
        }

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Candidate:
        """The one with these parameters."""
        first, second = parameters["tensor_parallel"]
        prefill, decode, budget = (int(parameters[key]) for key in ("prefill", "decode", "budget"))
        return cls(str(parameters["mode"]), prefill, decode, (int(first), int(second)), budget)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is different: factors on what links carry, on the lengths of prompts and outputs, and on the
    limits of the SLO."""

    name: str = ""
    link: float = 1.0
    prompts: float = 1.0
    outputs: float = 1.0
    ttft: float = 1.0
    itl: float = 1.0

    def slo(self, slo: SLO) -> SLO:
        """The limits with this change."""
        factors = {"ttft": self.ttft, "ttft_decode": self.ttft, "itl": self.itl, "tpot": self.itl}
        return SLO({key: limit * factors.get(key, 1.0) for key, limit in slo.limits_ms.items()})


_CHANGES = (
    Change("links carry half as much", link=0.5),
    Change("links carry twice as much", link=2.0),
    Change("prompts are twice as long", prompts=2.0),
    Change("prompts are half as long", prompts=0.5),
    Change("outputs are twice as long", outputs=2.0),
    Change("the limit of TTFT is half as long", ttft=0.5),
    Change("the limit of gaps is half as long", itl=0.5),
    Change("the limit of gaps is twice as long", itl=2.0),
)


class Plan(Experiment):
    """See the module."""

    name = "plan"
    question = "Which deployment serves most requests within an SLO, and does it pay to disaggregate?"
    options_type = PlanOptions
    simulated: ClassVar[bool] = True
    options: PlanOptions
    _config: PdserveConfig

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
        if attached is not None:
            raise InvalidRequest("--target: plan simulates services and measures none; leave it out")
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
                searched = self._search(cells[name], change, slo, bench.advance, float(found[name]["rate"]))
                row[cells[name].mode] = searched["per_cost"]
            rows.append(row)
        bench.facts["changes"] = rows

    def _idle_slo(self) -> SLO:
        """The SLO: as given, or from requests that are alone on a colocated worker."""
        if self.options.slo != "auto":
            return SLO.parse(self.options.slo)
        candidate = next(each for each in self.site.candidates() if each.mode == COLOCATED)
        alone = itertools.islice(workload_of(self.options).conversations(_ALONE, self.options.seed, _VOCAB), _ALONE)
        results = [
            result
            for conversation in alone
            for result in self._run(candidate, Change(), [(conversation, 0.0)]).requests
        ]
        ttft = float(np.percentile([each.ttft_s for each in results], _PERCENT))
        gaps = [gap for each in results for gap in each.itl_s]
        limits = {"ttft": 1e3 * ttft, **({"itl": 1e3 * statistics.median(gaps)} if gaps else {})}
        return SLO({key: round(SLO_FACTOR * limit, 3) for key, limit in limits.items()})

    def _simulate(self, candidate: Candidate, change: Change, times: Iterator[float], count: int) -> ServiceRun:
        conversations = workload_of(self.options).conversations(count, self.options.seed, _VOCAB)
        return self._run(candidate, change, zip(conversations, times, strict=False))

    def _run(self, candidate: Candidate, change: Change, arrivals: Iterable[tuple[Conversation, float]]) -> ServiceRun:
        requests = (_planned(conversation, at_s, change) for conversation, at_s in arrivals)
        mode: WaitMode = Mode.PD if candidate.mode == PD else Mode.COLOCATED
        return run_service(self.site.service(candidate, change), mode, requests, self.options.seed)

    def _search(
        self, candidate: Candidate, change: Change, slo: SLO, advance: Callable[[int], None], near: float = 0.0
    ) -> Figures:
        """The largest rate that a candidate sustains, how it does at that rate, and what misses the SLO beyond it. The
        search begins at the rate ``near``, if that is known."""
        limits, seed = change.slo(slo), self.options.seed
        points: dict[float, Figures] = {}

        def sustains(rate: float) -> bool:
            count = min(max(self.options.requests, round(rate * self.options.duration_s)), _MOST_REQUESTS)
            run = self._simulate(candidate, change, random_arrivals(rate, seed), count)
            points[rate] = _point(rate, run, limits)
            return bool(points[rate]["attainment"] >= ATTAINMENT)

        low, high = 0.0, near or sum(candidate.devices) * 2.0
        while sustains(high) and high < 1e6:
            low, high = high, high * 2
        while not low and high > 1e-3:
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
        ``per_cost``, ``at_rate`` (the figures at that rate), ``binds`` (what misses the SLO beyond it), ``points`` (the
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
            f"{_ALIKE:.0%}"
        )
        devices = "; ".join(each["text"] for each in summary["devices"])
        slo = f"{slo_text(summary['slo_ms'])} ({'as given' if self.options.slo != 'auto' else 'twice an idle service'})"
        setup = setup_of(
            run, method, devices=devices, workload=summary["workload"], SLO=slo if summary["slo_ms"] else ""
        )
        blocks: list[Picture | TableBlock] = []
        if rows:
            blocks += [_picture(rows), _candidate_table(rows)]
        if summary["changes"]:
            blocks.append(_change_table(summary["changes"]))
        caveats = [
            *(each["caveat"] for each in summary["devices"]),
            "Every request is served to its last token; workers do not fail.",
            "Layers with a sliding window count as if they saw all tokens.",
            max((max(row["tensor_parallel"]) for row in rows), default=1) > 1
            and "On GPUs pdserve serves a model on one device per worker (docs/engine.md).",
        ]
        return Report("Plan", self.question, _answer(summary), setup, blocks, caveats, [])


_SEARCHED = ("rate", "per_device", "per_cost", "at_rate", "binds", "points")


@dataclass(frozen=True, slots=True)
class Site:
    """What there is to deploy on, and the model that is to be served."""

    options: PlanOptions
    config: PdserveConfig
    source: ModelSource
    layout: KVLayout
    kinds: tuple[DeviceKind | Profiled, DeviceKind | Profiled]
    """Of prefill and of decode workers."""

    @classmethod
    def of(cls, options: PlanOptions, config: PdserveConfig) -> Site:
        """The site that the options describe. InvalidRequest names the one that is wrong."""
        kinds = _kind(options.device), _kind(options.decode_device or options.device)
        for kind in kinds:
            if isinstance(kind, Profiled) and kind.model != options.model:
                raise InvalidRequest(f"--model: the profile is of {kind.model}, and not of {options.model}")
        source = resolve_model(options.model)
        layout = ServedModel.of(source, config, "cuda").layout
        if isinstance(kinds[0], Profiled):
            layout = msgspec.structs.replace(layout, dtype=kinds[0].dtype, block_size=kinds[0].block_size)
        return cls(options, config, source, layout, kinds)

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return self.source.shape.dtype if self.config.model.dtype == "auto" else self.config.model.dtype

    def texts(self) -> list[dict[str, str]]:
        """What is to be said about the devices."""
        return [_about(kind) for kind in dict.fromkeys(self.kinds)]

    def cost(self, candidate: Candidate) -> float:
        """Of all devices of a candidate."""
        first, second = candidate.devices
        other = self.options.decode_cost
        decode_cost = self.options.cost if other is None or candidate.mode == COLOCATED else other
        return first * self.options.cost + second * decode_cost

    def candidates(self) -> list[Candidate]:
        """All that are tried, colocated ones first. InvalidRequest if the model does not fit."""
        total, splits = self.options.devices, self.options.splits
        degrees = [self._degrees(role) for role in Role]
        colocated = [
            Candidate(COLOCATED, 0, total // degree, (degree, degree), budget)
            for degree in self._degrees(Role.PREFILL)
            for budget in (0, *_CHUNKS)
            if total // degree
        ]
        pairs = [
            Candidate(PD, prefill, (total - prefill * first) // second, (first, second))
            for first, second in itertools.product(*degrees)
            for prefill in range(1, total // first + 1)
            if total - prefill * first >= second
        ]
        if splits != ("auto",):
            wanted = [Split.parse(text, "--splits") for text in splits]
            pairs = [
                Candidate(PD, split.prefill, split.decode, (first, second))
                for split in wanted
                for first, second in itertools.product(*degrees)
            ]
        most = _MOST_CANDIDATES - len(colocated)
        if len(pairs) > most:  # evenly spread over the splits
            pairs = [pairs[len(pairs) * place // most] for place in range(most)]
        if not pairs:
            raise InvalidRequest(f"--devices: {total} are too few for a prefill and a decode worker of this model")
        return [*colocated, *pairs]

    def _degrees(self, role: Role) -> tuple[int, ...]:
        """Devices of a worker that are tried."""
        kind = self._kind_of(role)
        if isinstance(kind, Profiled):
            if set(self.options.tensor_parallel) - {1}:
                raise InvalidRequest("--tensor-parallel: a profile is of one device; leave it out")
            return (1,)
        fits = [each for each in (1 << n for n in range(13)) if self._pool_bytes(kind, each) >= self._least_pool_bytes]
        wanted = self.options.tensor_parallel or tuple(fits[:1])
        if not wanted or (not_fitting := [each for each in wanted if each not in fits]):
            most = max(not_fitting, default=1) if wanted else 4096
            raise InvalidRequest(
                f"--device: {most} of {kind.name} do not hold the weights and one prompt of {self.options.model}; use "
                "more devices per worker, or larger ones"
            )
        return wanted

    def _kind_of(self, role: Role) -> DeviceKind | Profiled:
        return self.kinds[role is Role.DECODE]

    @property
    def _least_pool_bytes(self) -> int:
        """KV of one request of the context, at most of 8192 tokens."""
        return min(self.source.shape.max_position_embeddings, 8192) * self.layout.token_bytes

    def _pool_bytes(self, kind: DeviceKind, devices: int) -> float:
        """What a worker has left for KV."""
        shape, engine = self.source.shape, self.config.engine
        step = activation_bytes(shape, self.dtype, engine.token_budget("cuda", Role.PREFILL), engine.max_num_seqs)
        return USABLE_MEMORY * kind.memory * devices - shape.weight_bytes(self.dtype) - step

    def service(self, candidate: Candidate, change: Change) -> PlannedService:
        """The service of a candidate, with a change."""
        per_host, place = self.options.per_host, 0
        workers = []
        counts = {Role.PREFILL: candidate.prefill, Role.DECODE: candidate.decode}
        for role, degree in zip(Role, candidate.tensor_parallel, strict=True):
            for number in range(counts[role]):
                host = f"host{place // per_host}"
                workers.append(self._worker(candidate, role, degree, f"{role}-{number}", host))
                place += degree
        source, target = self.kinds
        profiled = next((kind for kind in self.kinds if isinstance(kind, Profiled)), None)
        if isinstance(source, DeviceKind) and isinstance(target, DeviceKind):
            within = LinkClass(min(source.link, target.link) * change.link, 10e-6)
            between = LinkClass(min(source.nic, target.nic) * per_host * change.link, 20e-6)
        else:
            assert profiled is not None, "one of the two is a profile"
            within = msgspec.structs.replace(profiled.link, bytes_per_s=profiled.link.bytes_per_s * change.link)
            between = within
        return PlannedService(
            workers,
            self.layout,
            within,
            between,
            _wan(self.options.wan, change.link),
            profiled.overheads if profiled is not None else _GPU_OVERHEADS,
            self.config.router.model_copy(update={"prefix_fetch": "off"}),
            self.config.transfer.layer_groups if self.config.transfer.overlap == "layer" else 0,
            prefix_caching=_shares_prefixes(self.options),
            max_model_len=self.source.shape.max_position_embeddings,
        )

    def _worker(self, candidate: Candidate, role: Role, degree: int, worker_id: str, host: str) -> PlannedWorker:
        kind, engine = self._kind_of(role if candidate.mode == PD else Role.PREFILL), self.config.engine
        on_gpu = isinstance(kind, DeviceKind)
        steps: StepTime
        if isinstance(kind, DeviceKind):
            steps, pool = kind.steps(self.source.shape, self.dtype, degree), self._pool_bytes(kind, degree)
            budget, num_blocks = engine.token_budget("cuda", role), int(pool) // self.layout.block_bytes
        else:
            steps, budget, num_blocks = kind.steps, kind.chunk, kind.pool_tokens // kind.block_size
        return PlannedWorker(
            worker_id,
            role,
            host,
            steps,
            num_blocks,
            candidate.budget or budget,
            engine.max_num_seqs,
            run_ahead=on_gpu,
        )


def _kind(text: str) -> DeviceKind | Profiled:
    return Profiled.read(Path(text)) if Path(text).is_dir() else device_kind(text)


def _about(kind: DeviceKind | Profiled) -> dict[str, str]:
    if isinstance(kind, Profiled):
        return {
            "text": f"{kind.device}, as profiled in {kind.path}",
            "caveat": f"Steps were predicted with a median error of {kind.error:.1%} when they were profiled; "
            "docs/planning.md compares simulated and measured services.",
        }
    return {
        "text": f"{kind.name}: {kind.flops / 1e12:g} TFLOP/s, {kind.bandwidth / 1e12:g} TB/s, {kind.memory / 1e9:g} GB "
        f"({kind.source})",
        "caveat": f"No run of pdserve on {kind.name} has confirmed these figures: steps are calculated from its data "
        "sheet. Profile one where you can.",
    }


def _wan(text: str | None, factor: float) -> LinkClass | None:
    """The link that ``GBIT:RTT_MS`` describes. InvalidRequest if it does not."""
    if text is None:
        return None
    gbit, _, rtt_ms = text.partition(":")
    try:
        rate, latency_s = float(gbit) * 1e9 / 8, float(rtt_ms or 0) / 2e3
    except ValueError:
        rate, latency_s = 0.0, 0.0
    if not 0 < rate < math.inf or not 0 <= latency_s < math.inf:
        raise InvalidRequest(f"--wan: {text!r} is not GBIT:RTT_MS; write, for example, 100:20")
    return LinkClass(rate * factor, latency_s)


def _shares_prefixes(options: WorkloadOptions) -> bool:
    return bool(options.prefix_len) or options.turns > 1 or options.dataset in ("trace", "sharegpt")


def _planned(conversation: Conversation, at_s: float, change: Change) -> PlannedRequests:
    turns = []
    for turn in conversation.turns:
        tokens = turn.token_ids
        count = max(1, round(len(tokens) * change.prompts))
        tokens = (tokens * math.ceil(change.prompts))[:count]
        turns.append(PlannedTurn(tokens, max(1, round(turn.output_len * change.outputs)), turn.pause_s))
    return PlannedRequests(at_s, tuple(turns), conversation.salt or "", conversation.session_id)


# --- figures ---------------------------------------------------------------------------------------------------------


def row_of(result: RequestResult, index: int, arm: str) -> RequestRow:
    """A simulated request as a row of a run."""
    known = not result.error
    return RequestRow(
        cell="",
        arm=arm,
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
    rows = [row_of(result, number, "") for number, result in enumerate(run.requests)]
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


def _summary(values: Sequence[float | None]) -> Figures | None:
    if not values:
        return None
    array = np.array(values, float)
    return {"mean": float(array.mean()), "p50": float(np.percentile(array, 50)), "p99": float(np.percentile(array, 99))}


def _binds(point: Figures) -> str:
    """What keeps a candidate from more than its best rate."""
    if not point:
        return ""
    missed = max(point["missed"], key=lambda key: point["missed"][key])
    what = f"{missed.upper().replace('_', ' of ')}"
    full = {"links": point["link"]} | {role: point.get(f"{role}_busy", 0.0) for role in Role}
    most = max(full, key=lambda key: full[key])
    busy = f"{most if most == 'links' else f'{most} workers'} {full[most]:.0%} busy"
    return f"{what}; {busy}" + (f"; {point['preemptions']} preemptions" if point["preemptions"] else "")


def _best(found: Mapping[str, Mapping[str, Any]], mode: str) -> str | None:
    """The candidate of a mode that serves most per cost."""
    mine = {
        name: float(facts["per_cost"]) for name, facts in found.items() if (" colocated" in name) == (mode == COLOCATED)
    }
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
        return f"{summary['best']} serves {_rate(rows[summary['best']])} within {slo_text(summary['slo_ms'])}."
    ratio = pair["per_cost"] / alone["per_cost"] if alone["per_cost"] else math.inf
    within = f"within {slo_text(summary['slo_ms'])}"
    if ratio > 1 + _ALIKE:
        times = "which colocated workers do not serve at all" if math.isinf(ratio) else f"{ratio:.2f} times as many"
        text = (
            f"Disaggregate: {pair['name']} serves {_rate(pair)} {within}, {times} as {alone['name']} per cost "
            f"({_rate(alone)}, bound by {alone['binds']})."
        )
    elif ratio < 1 - _ALIKE:
        text = (
            f"Do not disaggregate: {alone['name']} serves {_rate(alone)} {within}. The best split, {pair['name']}, "
            f"serves {ratio:.2f} times as many per cost ({_rate(pair)}, bound by {pair['binds']})."
        )
    else:
        text = (
            f"It makes no difference: {pair['name']} serves {_rate(pair)} {within}, and {alone['name']} {_rate(alone)}."
        )
    turning = [row["change"] for row in summary["changes"] if _sign(row) not in (0, _sign_of(ratio))]
    if turning:
        text += f" This would change if {', or if '.join(turning)}."
    return text


def _rate(row: Figures) -> str:
    return f"{row['per_device']:.3g} requests/s per device"


def _sign_of(ratio: float) -> int:
    return 0 if abs(ratio - 1) <= _ALIKE else 1 if ratio > 1 else -1


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
        "Figures at the rate of the first column. Beyond that: the limit that most requests miss, and what is busiest."
    )
    return table("Candidates", rows, columns, caption)


def _change_table(rows: Sequence[Figures]) -> TableBlock:
    names = {1: "disaggregated", -1: "colocated", 0: "neither"}
    shown = [{**row, "better": names[_sign(row)]} for row in rows]
    columns = ("if | change", f"disaggregated | {PD}:.3g", f"colocated | {COLOCATED}:.3g", "better")
    caption = (
        f"Requests/s per cost of the best candidate of each kind, with one thing changed. Neither: within {_ALIKE:.0%}."
    )
    return table("What would change the answer", shown, columns, caption)
