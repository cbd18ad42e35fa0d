"""What `pdserve plan` may deploy, and on what: devices, links, and the candidates that use them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from pydantic import Field

from checkpoints.source import ModelSource, resolve_model
from experiments.experiment import Options, option
from experiments.modes import COLOCATED, PD, SLO, Split
from experiments.workloads.options import WorkloadOptions
from ops.model_memory import ServedModel, activation_bytes
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv_layout import KVLayout
from pdserve.core.worker import Role
from simulator.planning.devices import USABLE_MEMORY, DeviceKind, device_kind
from simulator.planning.profile import Profiled
from simulator.planning.service import Failure, LinkClass, Overheads, PlannedService, PlannedWorker
from simulator.planning.step_time import Scaled

_MOST_CANDIDATES = 32
_MOST_DEGREE = 4096
_CHUNKS = (512,)
"""Token budgets of colocated workers that are tried beside the usual one."""
_CODED, _CODING_BYTES_PER_S, _DECODING_BYTES_PER_S = 4 / 3, 0.5e9, 0.8e9
"""How many bytes of KV in bfloat16 become one without loss, and how many per second a core codes and decodes
(`make bench-codec`, 2 virtual cores of a Xeon, 2026-11-28)."""
_SLOW = 2.0
_GPU_OVERHEADS = Overheads(0.002, 0.001, 0.001, 0.001, 0.001, 0.0)
"""Assumed where no profile says what a service adds."""


class PlannerOptions(WorkloadOptions, Options):
    """Options of `Planner`."""

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
    def is_one_worker(self) -> bool:
        """Whether there is only one."""
        return self.mode == COLOCATED and self.decode == 1

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
    limits of the SLO; that KV is ``coded`` without loss on links between hosts; that one worker of a role is ``slow``
    (each step takes twice as long), or ``lost`` from the start, or ``fails`` in the middle of the load. Colocated
    workers are of both roles."""

    name: str = ""
    link: float = 1.0
    prompts: float = 1.0
    outputs: float = 1.0
    ttft: float = 1.0
    itl: float = 1.0
    coded: bool = False
    slow: Role | None = None
    lost: Role | None = None
    fails: Role | None = None

    def slo(self, slo: SLO) -> SLO:
        """The limits with this change."""
        factors = {"ttft": self.ttft, "ttft_decode": self.ttft, "itl": self.itl, "tpot": self.itl}
        return SLO({key: limit * factors.get(key, 1.0) for key, limit in slo.limits_ms.items()})


@dataclass(frozen=True, slots=True)
class Site:
    """What there is to deploy on, and the model that is to be served."""

    options: PlannerOptions
    config: PdserveConfig
    source: ModelSource
    layout: KVLayout
    kinds: tuple[DeviceKind | Profiled, DeviceKind | Profiled]
    """Of prefill and of decode workers."""

    @classmethod
    def of(cls, options: PlannerOptions, config: PdserveConfig) -> Site:
        """The site that the options describe. InvalidRequest names the one that is wrong."""
        kinds = _kind(options.device), _kind(options.decode_device or options.device)
        for kind in kinds:
            if isinstance(kind, Profiled) and kind.model != options.model:
                raise InvalidRequest(f"--model: the profile is of {kind.model}, and not of {options.model}")
        source = resolve_model(options.model)
        layout = ServedModel.of(source, config, "cuda").layout
        if isinstance(kinds[0], Profiled):
            layout = kinds[0].layout(layout)
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
        least = self._least_pool_bytes
        wanted = self.options.tensor_parallel
        if wanted and min(wanted) < 1:
            raise InvalidRequest(f"--tensor-parallel: {min(wanted)} is no number of devices")
        most = max(wanted, default=_MOST_DEGREE)
        if not wanted:
            powers = (1 << n for n in range(_MOST_DEGREE.bit_length()))
            wanted = tuple(itertools.islice((each for each in powers if self._pool_bytes(kind, each) >= least), 1))
        too_few = [each for each in wanted if self._pool_bytes(kind, each) < least]
        if too_few or not wanted:
            raise InvalidRequest(
                f"--device: {max(too_few, default=most)} of {kind.name} do not hold the weights and one prompt of "
                f"{self.options.model}; use more devices per worker, or larger ones"
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

    def service(self, candidate: Candidate, change: Change, duration_s: float = math.inf) -> PlannedService:
        """The service of a candidate, with a change, for a load that lasts so long."""
        per_host, place = self.options.per_host, 0
        workers = []
        counts = {Role.PREFILL: candidate.prefill, Role.DECODE: candidate.decode}
        slow, lost, fails = (
            Role.DECODE if role is not None and candidate.mode == COLOCATED else role
            for role in (change.slow, change.lost, change.fails)
        )
        for role, degree in zip(Role, candidate.tensor_parallel, strict=True):
            for number in range(counts[role]):
                worker = self._worker(candidate, role, degree, f"{role}-{number}", f"host{place // per_host}")
                place += degree
                if number == 0 and role is lost:
                    continue
                if number == 0 and role is slow:
                    worker = replace(worker, steps=Scaled(worker.steps, _SLOW))
                workers.append(worker)
        source, target = self.kinds
        profiled = next((kind for kind in self.kinds if isinstance(kind, Profiled)), None)
        if isinstance(source, DeviceKind) and isinstance(target, DeviceKind):
            within = LinkClass(min(source.link, target.link) * change.link, 10e-6)
            between = LinkClass(min(source.nic, target.nic) * per_host * change.link, 20e-6)
        else:
            assert profiled is not None, "one of the two is a profile"
            within = msgspec.structs.replace(profiled.link, bytes_per_s=profiled.link.bytes_per_s * change.link)
            between = within
        wan = _wan(self.options.wan, change.link)
        if change.coded and self.layout.dtype == "bfloat16":
            on_cpu = profiled is not None and profiled.device == "cpu"
            between, wan = _coded(between, on_cpu), None if wan is None else _coded(wan, on_cpu)
        return PlannedService(
            workers,
            self.layout,
            within,
            between,
            wan,
            profiled.overheads if profiled is not None else _GPU_OVERHEADS,
            self.config.router.model_copy(update={"prefix_fetch": "off"}),
            self.config.transfer.layer_groups if self.config.transfer.overlap == "layer" else 0,
            prefix_caching=_shares_prefixes(self.options),
            max_model_len=self.source.shape.max_position_embeddings,
            failures=() if fails is None or math.isinf(duration_s) else (Failure(f"{fails}-0", duration_s / 2),),
        )

    def _worker(self, candidate: Candidate, role: Role, degree: int, worker_id: str, host: str) -> PlannedWorker:
        kind, engine = self._kind_of(role if candidate.mode == PD else Role.PREFILL), self.config.engine
        if isinstance(kind, Profiled):
            worker = kind.worker(worker_id, role, host, engine)
        else:
            worker = PlannedWorker(
                worker_id,
                role,
                host,
                kind.steps(self.source.shape, self.dtype, degree),
                int(self._pool_bytes(kind, degree)) // self.layout.block_bytes,
                engine.token_budget("cuda", role),
                engine.max_num_seqs,
                run_ahead=True,
            )
        return replace(worker, token_budget=candidate.budget or worker.token_budget)


def _kind(text: str) -> DeviceKind | Profiled:
    return Profiled.read(Path(text), "--device") if Path(text).is_dir() else device_kind(text)


def _about(kind: DeviceKind | Profiled) -> dict[str, str]:
    if isinstance(kind, Profiled):
        return {
            "text": f"{kind.device}, as profiled in {kind.path}",
            "caveat": f"Steps were predicted with a median error of {kind.error:.1%} when they were profiled. In a "
            "service whose engines share their cores with the rest they took up to twice as long (docs/planning.md).",
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


def _coded(link: LinkClass, on_cpu: bool) -> LinkClass:
    """The link, counted in bytes of KV before they are coded. Coding takes the time of an engine ``on_cpu``."""
    most = min(link.most_bytes_per_s, _CODING_BYTES_PER_S)
    engines = (_CODING_BYTES_PER_S, _DECODING_BYTES_PER_S) if on_cpu else ()
    return LinkClass(link.bytes_per_s * _CODED, link.latency_s, most, *engines)


def _shares_prefixes(options: WorkloadOptions) -> bool:
    return bool(options.prefix_len) or options.turns > 1 or options.dataset in ("trace", "sharegpt")
