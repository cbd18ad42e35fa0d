"""What `pdserve plan` predicts beside what a service does: `python -m experiments.benchmarks.plan`.

A service of one prefill and one decode worker of the 135m shape gets the same loads in both modes, each alone. Each
load is simulated with the same requests at the same times, from a profile of this machine (``--profile``, else it is
measured first). A shared machine is not equally fast at all times: before and after each load a few requests, one at a
time, show how fast it is, and the simulated steps are scaled by that."""

from __future__ import annotations

import itertools
import secrets
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from experiments.benchmarks.frame import Quick, in_turns, note, run, service
from experiments.experiment import Cell
from experiments.load import Load, run_load
from experiments.plan import Planner
from experiments.planned_site import Candidate, Change, PlannerOptions
from experiments.profile import Profile, Profiled
from experiments.runner import new_folder, run_experiment
from experiments.workloads.arrivals import random_arrivals
from experiments.workloads.conversation import random_tokens
from experiments.workloads.synthetic import Synthetic, parse_lengths
from pdserve import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure
from router.view import WaitMode
from simulator.planning.service import PlannedRequests, PlannedService, PlannedTurn, ServiceRun, run_service
from simulator.planning.step_time import StepShape, StepTime

MODES: tuple[WaitMode, ...] = (Mode.PD, Mode.COLOCATED)
WORKLOADS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "short": ("64:256", "16:64", (1.5, 2.5)),
    "middle": ("256:768", "16:48", (0.8, 1.4)),
    "long": ("1024:1536", "8:24", (0.4, 0.7)),
}
"""Tokens of prompts and outputs, and requests per second."""
QUICK_WORKLOADS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {"short": ("8:16", "2:4", (4.0,))}
_PROBE_TOKENS, _PROBE_OUTPUT, _PROBES = 384, 10, 3


@dataclass(frozen=True, slots=True)
class Scaled:
    """Steps with prompts take ``prompts`` times as long as profiled, others ``decodes`` times."""

    steps: StepTime
    prompts: float
    decodes: float

    def seconds(self, step: StepShape) -> float:
        """See `StepTime`."""
        return self.steps.seconds(step) * (self.prompts if step.pairs else self.decodes)


def plan(
    quick: Quick = False,
    profile: Annotated[Path | None, typer.Option(help="folder of a profile of this machine")] = None,
) -> dict[str, Any]:
    """Measure, and simulate."""
    with tempfile.TemporaryDirectory(prefix="pdserve-plan-") as folder:
        path = profile or _profile(Path(folder), "tiny" if quick else "dummy:135m", quick)
        profiled = Profiled.read(path)
        options = PlannerOptions.choose(
            {"model": profiled.model, "device": str(path), "devices": 2, "splits": ("1P1D",)}
        )
        site = _site(options)
    workloads, duration_s = (QUICK_WORKLOADS, 1.5) if quick else (WORKLOADS, 40.0)
    loads = [(name, rate) for name, (*_, rates) in workloads.items() for rate in rates]
    figures: dict[str, Any] = {}
    with service({"model.path": profiled.model, "cluster.prefill": 1, "cluster.decode": 1}) as served:
        for place, (name, rate) in enumerate(loads):
            for _, mode in in_turns(MODES[:: 1 if place % 2 == 0 else -1], 1):
                inputs, outputs, _ = workloads[name]
                workload = Synthetic(parse_lengths("inputs", inputs), parse_lengths("outputs", outputs))
                before = served.client(partial(_speed, profiled))
                load = served.client(partial(_send, workload, rate, mode, duration_s))
                after = served.client(partial(_speed, profiled))
                speed = [statistics.fmean(each) for each in zip(before, after, strict=True)]
                key = f"{name} {rate:g}/s {mode}"
                figures[key] = _compare(load, _simulate(site, profiled, load, mode, speed)) | {
                    "prompts_took": speed[0],
                    "decodes_took": speed[1],
                }
                note(f"{key}: {figures[key]}")
    errors = {
        figure: [abs(each[f"{figure}_error"]) for each in figures.values()]
        for figure in ("ttft", "itl", "tokens_per_s")
    }
    return {
        "steps_error": profiled.error,
        "blocks_equal": all(each["blocks"] == each["blocks_simulated"] for each in figures.values()),
        "median_error": {name: statistics.median(values) for name, values in errors.items()},
        "worst_error": {name: max(values) for name, values in errors.items()},
        "loads": figures,
    }


def _profile(folder: Path, model: str, quick: bool) -> Path:
    experiment = Profile(Profile.options_type.choose({"model": model}, quick))
    made = new_folder(experiment, folder)
    run_experiment(experiment, made, _Notes())
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


def _site(options: PlannerOptions) -> PlannedService:
    planned = Planner(options)
    planned.configure(PdserveConfig())
    return planned.site.service(Candidate("pd", 1, 1, (1, 1)), Change())


async def _speed(profiled: Profiled, client: AsyncClient) -> tuple[float, float]:
    """How long prompts and decode steps take now, as multiples of what the profile says."""
    status: ServiceStatus = await client.status()
    prompts, decodes = [], []
    for number in range(_PROBES):
        tokens = random_tokens(f"probe/{number}", _PROBE_TOKENS, status.vocab_size)
        done = await client.generate(
            tokens, max_tokens=_PROBE_OUTPUT, ignore_eos=True, mode=Mode.PD, salt=secrets.token_hex(8)
        ).result()  # nothing of it is cached
        starts = range(0, _PROBE_TOKENS, profiled.chunk)
        chunks = [StepShape.plain(1, min(profiled.chunk, _PROBE_TOKENS - start), start) for start in starts]
        prefill_s = sum(profiled.steps.seconds(chunk) for chunk in chunks)
        prompts.append(done.breakdowns[Figure.TTFT].stages_ms["prefill"] / 1e3 / prefill_s)
        step_s = profiled.steps.seconds(StepShape.plain(1, 1, _PROBE_TOKENS + _PROBE_OUTPUT // 2))
        gap_s = statistics.median(done.itl_ms[1:]) / 1e3 - profiled.overheads.between_s
        decodes.append(gap_s / step_s)
    return statistics.median(prompts), statistics.median(decodes)


async def _send(workload: Synthetic, rate: float, mode: Mode, duration_s: float, client: AsyncClient) -> Load:
    conversations = workload.conversations(10**6, 7, (await client.status()).vocab_size)
    return await run_load(client, conversations, random_arrivals(rate, 7), mode=mode, duration_s=duration_s)


def _simulate(
    site: PlannedService, profiled: Profiled, load: Load, mode: WaitMode, speed: Sequence[float]
) -> ServiceRun:
    """The same requests at the same times."""
    requests = [
        PlannedRequests(each.sent_s, (PlannedTurn((0,) * (each.prompt_tokens or 1), len(each.generation.token_ids)),))
        for each in sorted(load.outcomes, key=lambda each: each.sent_s)
        if each.generation is not None
    ]
    steps = Scaled(profiled.steps, speed[0], speed[1])
    return run_service(site.with_steps(steps), mode, requests)


def _compare(load: Load, simulated: ServiceRun) -> dict[str, Any]:
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
