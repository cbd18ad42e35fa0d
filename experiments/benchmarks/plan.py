"""What `pdserve plan` predicts beside what a service does: `python -m experiments.benchmarks.plan`.

A service of one prefill and one decode worker of the 135m shape gets the same loads in both modes, each alone. Each
load is simulated with the same requests at the same times, from a profile of this machine (``--profile``, else it is
measured first). With ``--vllm``, a virtual environment with vLLM, the workers start its servers, with pdserve's
connector, which reports their steps.

A shared machine is not equally fast at all times, and its speed says nothing about a plan. So a load has two errors:
``ROLE_steps_error`` is that of the profile, by the mean duration of the load's steps, which the workers report; the
other errors are those of a simulation whose steps have that mean. In mode colocated a step may have prompts and decodes
in it; there ``both_steps_error`` is what remains after the factors of mode pd for each."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from experiments.benchmarks.frame import Quick, in_turns, note, run, service
from experiments.benchmarks.published import prefill_as_a_service
from experiments.benchmarks.vllm_servers import VLLM, check, native_dtype, saved_model, started_by_pdserve, version
from experiments.child_process import ROOT
from experiments.experiment import Cell
from experiments.load import Load, run_load
from experiments.plan import Planner
from experiments.planned_site import Candidate, Change, PlannerOptions
from experiments.profile import Profile
from experiments.runner import new_folder, run_experiment
from experiments.workloads.arrivals import random_arrivals
from experiments.workloads.synthetic import Synthetic, parse_lengths
from pdserve import AsyncClient
from pdserve.core.config import PdserveConfig, RouterConfig
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.view import WaitMode
from simulator.planning.profile import Profiled
from simulator.planning.service import PlannedRequests, PlannedService, PlannedTurn, ServiceRun, run_service
from simulator.planning.step_time import Scaled, StepShape, StepTime

MODES: tuple[WaitMode, ...] = (Mode.PD, Mode.COLOCATED)
WORKLOADS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "short": ("64:256", "16:64", (1.5, 2.5)),
    "middle": ("256:768", "16:48", (0.8, 1.4)),
    "long": ("1024:1536", "8:24", (0.4, 0.7)),
}
"""Tokens of prompts and outputs, and requests per second."""
QUICK_WORKLOADS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {"short": ("8:16", "2:4", (4.0,))}
_FITS = 6
"""Simulations of a load. Slower steps are larger, since more requests wait for them, so that the factor by which they
are slower takes some to find."""
_WARM_UP_S = 4.0


@dataclass(frozen=True, slots=True)
class Steps:
    """How many, and the seconds that they took together."""

    number: int
    busy_s: float

    def __add__(self, other: Steps) -> Steps:
        return Steps(self.number + other.number, self.busy_s + other.busy_s)

    def __sub__(self, other: Steps) -> Steps:
        return Steps(self.number - other.number, self.busy_s - other.busy_s)

    @property
    def mean_s(self) -> float:
        """Of one."""
        return self.busy_s / self.number


def plan(
    quick: Quick = False,
    profile: Annotated[Path | None, typer.Option(help="folder of a profile of this machine")] = None,
    vllm: VLLM = None,
) -> dict[str, Any]:
    """Measure, and simulate."""
    settings: dict[str, Any] = {"model.path": "tiny" if quick else "dummy:135m"}
    with tempfile.TemporaryDirectory(prefix="pdserve-plan-") as folder:
        if vllm is not None:
            check(vllm, "validate-plan")
            dtype = native_dtype()
            is_made = not quick and profile is None  # a given profile names its model
            model = saved_model(Path(folder) / "model", dtype) if is_made else ROOT / "models" / "tiny"
            settings = started_by_pdserve(vllm, model, dtype, "pdserve")
        path = profile or measured_profile(Path(folder), quick, settings)
        profiled = Profiled.read(path, "--profile")
        settings |= {"model.path": profiled.model, "model.dtype": profiled.dtype}
        options = PlannerOptions.choose(
            {"model": profiled.model, "device": str(path), "devices": 2, "splits": ("1P1D",)}
        )
        figures = _measured(_site(options, settings), settings, quick)
    errors = {
        figure: [abs(each[f"{figure}_error"]) for each in figures.values()]
        for figure in ("ttft", "ttft_p99", "itl", "itl_p99", "tokens_per_s")
    }
    return {
        "engine": "pdserve" if vllm is None else f"vLLM {version(vllm)}, worker.connector pdserve",
        "steps_error": profiled.error,
        "blocks_equal": all(each["blocks"] == each["blocks_simulated"] for each in figures.values()),
        "median_error": {name: statistics.median(values) for name, values in errors.items()},
        "worst_error": {name: max(values) for name, values in errors.items()},
        "published": prefill_as_a_service(200 if quick else 3000),
        "loads": figures,
    }


def _measured(site: PlannedService, settings: Mapping[str, Any], quick: bool) -> dict[str, Any]:
    """The figures of each load on a service with ``settings``."""
    workloads, duration_s = (QUICK_WORKLOADS, 1.5) if quick else (WORKLOADS, 40.0)
    loads = [(name, rate) for name, (*_, rates) in workloads.items() for rate in rates]
    figures: dict[str, Any] = {}
    with service({**settings, "cluster.prefill": 1, "cluster.decode": 1}) as served:
        for inputs, outputs, _ in workloads.values():
            served.client(partial(_send, _workload(inputs, outputs), 1.0, Mode.PD, _WARM_UP_S))
        for place, (name, rate) in enumerate(loads):
            inputs, outputs, _ = workloads[name]
            measured = {
                mode: served.client(partial(_send, _workload(inputs, outputs), rate, mode, duration_s))
                for _, mode in in_turns(MODES[:: 1 if place % 2 == 0 else -1], 1)
            }
            factors: Mapping[str, float] = {}
            for mode in MODES:
                simulated, factors = _fitted(site, *measured[mode], mode, factors)
                key = f"{name} {rate:g}/s {mode}"
                figures[key] = _compare(measured[mode][0], simulated, factors)
                note(f"{key}: {figures[key]}")
    return figures


def measured_profile(folder: Path, quick: bool, settings: Mapping[str, Any]) -> Path:
    """The folder of a new profile of this machine, of the model and the engine that services with ``settings`` have."""
    experiment = Profile(Profile.options_type.choose({"model": settings["model.path"]}, quick))
    made = new_folder(experiment, folder)
    run_experiment(experiment, made, _Notes(), settings=settings)
    return made.path


class _Notes:
    """Tells what a profile does."""

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        """See `Progress`."""

    def cell(self, cell: Cell) -> None:
        """See `Progress`."""
        note(f"profile: {cell.name}")

    def advance(self, steps: int) -> None:
        """See `Progress`."""

    def stage(self, text: str) -> None:
        """See `Progress`."""
        note(text)


def _workload(inputs: str, outputs: str) -> Synthetic:
    return Synthetic(parse_lengths("inputs", inputs), parse_lengths("outputs", outputs))


def _site(options: PlannerOptions, settings: Mapping[str, Any]) -> PlannedService:
    planned = Planner(options)
    planned.configure(PdserveConfig.load(None, settings))
    return planned.site.service(Candidate("pd", 1, 1, (1, 1)), Change())


async def _send(
    workload: Synthetic, rate: float, mode: Mode, duration_s: float, client: AsyncClient
) -> tuple[Load, Mapping[str, Steps]]:
    """A load, and the steps that it took, by role."""
    before = await _steps(client)
    conversations = workload.conversations(10**6, 7, (await client.status()).vocab_size)
    load = await run_load(client, conversations, random_arrivals(rate, 7), mode=mode, duration_s=duration_s)
    return load, {role: steps - before[role] for role, steps in (await _steps(client)).items()}


async def _steps(client: AsyncClient) -> Mapping[str, Steps]:
    """The steps of each role so far, when none runs."""
    await asyncio.sleep(3 * RouterConfig().heartbeat_s)
    return {worker.role: Steps(worker.steps, worker.busy_s) for worker in (await client.status()).workers}


@dataclass(frozen=True, slots=True)
class _ByKind:
    """Steps with prompts take ``prompt`` times as long as predicted, others ``other`` times."""

    steps: StepTime
    prompt: float
    other: float

    def seconds(self, step: StepShape) -> float:
        """See `StepTime`."""
        return (self.prompt if step.pairs else self.other) * self.steps.seconds(step)


def _fitted(
    site: PlannedService, load: Load, steps: Mapping[str, Steps], mode: WaitMode, before: Mapping[str, float]
) -> tuple[ServiceRun, dict[str, float]]:
    """The same requests at the same times, with steps that are as long on average as those of each role were, and the
    factors for that. Where both roles do the same, they have one factor, on top of those for steps with and without
    prompts that mode ``pd`` had ``before`` under the same load."""
    requests = [
        PlannedRequests(each.sent_s, (PlannedTurn((0,) * (each.prompt_tokens or 1), len(each.generation.token_ids)),))
        for each in sorted(load.outcomes, key=lambda each: each.sent_s)
        if each.generation is not None
    ]
    groups = {worker.worker_id: str(worker.role) if mode is Mode.PD else "both" for worker in site.workers}
    if mode is Mode.COLOCATED:
        steps = {"both": reduce(Steps.__add__, steps.values())}
        kinds = before[Role.PREFILL], before[Role.DECODE]
        workers = [replace(each, steps=_ByKind(each.steps, *kinds)) for each in site.workers]
        site = replace(site, workers=workers)
    factors, used = dict.fromkeys(steps, 1.0), dict.fromkeys(steps, 1.0)
    for _ in range(_FITS):
        used = dict(factors)
        workers = [replace(each, steps=Scaled(each.steps, used[groups[each.worker_id]])) for each in site.workers]
        run = run_service(replace(site, workers=workers), mode, requests)
        for group, measured in steps.items():
            mine = [use for use in run.workers if groups[use.worker_id] == group]
            simulated = Steps(sum(use.steps for use in mine), sum(use.busy for use in mine) * run.duration_s)
            factors[group] *= measured.mean_s / simulated.mean_s
    return run, used


def _compare(load: Load, simulated: ServiceRun, factors: Mapping[str, float]) -> dict[str, Any]:
    done = [each.generation for each in load.outcomes if each.generation is not None]
    ended_s = max(each.ended_s for each in load.outcomes) - min(each.sent_s for each in load.outcomes)
    served = [each for each in simulated.requests if not each.error]
    first_s = min(each.sent_s for each in served)
    last_s = max(each.sent_s + each.e2e_s for each in served)
    ours = {
        "ttft": [each.ttft_ms for each in done],
        "itl": [*itertools.chain.from_iterable(each.itl_ms for each in done)],
    }
    theirs = {
        "ttft": [1e3 * each.ttft_s for each in served],
        "itl": [1e3 * gap for each in served for gap in each.itl_s],
    }
    found: dict[str, Any] = {"requests": len(done), "failed": len(load.outcomes) - len(done)}
    found |= {f"{role}_steps_error": 1 / factor - 1 for role, factor in factors.items()}
    for name in ours:
        for figure, of in (("", np.mean), ("_p99", lambda values: np.percentile(values, 99))):
            measured, predicted = float(of(ours[name])), float(of(theirs[name]))
            found[f"{name}{figure}_ms"] = measured
            found[f"{name}{figure}_simulated_ms"] = predicted
            found[f"{name}{figure}_error"] = predicted / measured - 1
    tokens = sum(len(each.token_ids) for each in done) / ended_s
    predicted = sum(each.output_tokens for each in served) / (last_s - first_s)
    found |= {"tokens_per_s": tokens, "tokens_per_s_simulated": predicted, "tokens_per_s_error": predicted / tokens - 1}
    blocks = sum(each.kv_blocks_sent for each in done)
    return found | {"blocks": blocks, "blocks_simulated": sum(each.kv_blocks for each in served)}


if __name__ == "__main__":
    run(plan)
