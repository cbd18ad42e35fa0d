"""Whether the deployment that `pdserve plan` prefers is the best one when all are measured:
`python -m experiments.benchmarks.choices` (as root).

Two hosts made of namespaces have a core of this machine each, and a cable that the kernel shapes. In each of
`SETTINGS`, which no fit has seen, every one of `DEPLOYMENTS` gets the same requests at the same times. How well it does
is one number: by what the limits of the SLO would have to be multiplied for 90 % of the requests to meet them, so that
less is better. The plan prefers the one with the least in a simulation, which takes its steps from a profile of this
machine (``--profile``, else it is measured first); of those that it calls equal, the first."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from experiments.benchmarks.frame import Quick, in_turns, note, run
from experiments.benchmarks.plan import measured_profile
from experiments.deployment import run_in_loop
from experiments.hosts import PAYLOAD_SHARE, NamespaceDeployment, missing
from experiments.load import run_load
from experiments.modes import ATTAINMENT, COLOCATED, PD, SLO
from experiments.plan import ALIKE, Planner, row_of
from experiments.planned_site import Candidate, Change, PlannerOptions
from experiments.run_folder import RequestRow
from experiments.workloads.arrivals import random_arrivals
from experiments.workloads.synthetic import Synthetic, parse_lengths
from pdserve import AsyncClient
from pdserve.client.target import Target
from pdserve.core.config import PdserveConfig
from pdserve.core.request import Mode
from simulator.planning.profile import Profiled

_PAIR = Candidate(PD, 1, 1, (1, 1))
DEPLOYMENTS: Mapping[str, tuple[Candidate, Change]] = {
    "1P1D": (_PAIR, Change()),
    "1P1D coded": (_PAIR, Change(coded=True)),
    "2 colocated": (Candidate(COLOCATED, 0, 2, (1, 1)), Change()),
}
CODECS = ("none", "lossless")
_NEAR = 0.05
"""A choice is right if the best deployment is better by no more than this share."""
_WARM_UP_S, _WARM_UP_SEED = 5.0, 99
_ROUND_TRIP_MS = 0.1
"""Of the cable."""
_MOST = 10**6


class Setting(NamedTuple):
    """What is served over which link: tokens of prompts and outputs, requests per second, Gbit/s, and the limits."""

    inputs: str
    outputs: str
    rate: float
    gbps: float
    slo: str

    @property
    def name(self) -> str:
        """Of its figures."""
        return f"{self.inputs} to {self.outputs} tokens, {self.rate:g}/s, {self.gbps:g} Gbit/s"

    @property
    def workload(self) -> Synthetic:
        """Its requests."""
        return Synthetic(parse_lengths("inputs", self.inputs), parse_lengths("outputs", self.outputs))


SETTINGS = (
    Setting("64:256", "16:64", 1.5, 0.05, "ttft_decode=400,tpot=60"),
    Setting("64:256", "16:64", 1.5, 2.0, "ttft_decode=400,tpot=60"),
    Setting("256:768", "16:48", 0.8, 0.1, "ttft_decode=1000,tpot=60"),
    Setting("1024:1536", "8:24", 0.4, 1.0, "ttft_decode=3000,tpot=60"),
    Setting("256:768", "32:64", 0.8, 5.0, "ttft=3000,itl=40"),
    Setting("256:768", "32:64", 1.2, 5.0, "ttft=3000,tpot=20"),
    Setting("256:768", "32:64", 1.2, 0.2, "ttft=3000,tpot=20"),
    Setting("512:1024", "16:32", 1.0, 0.2, "ttft=3000,tpot=20"),
    Setting("1024:1536", "32:64", 0.6, 0.2, "ttft=3000,tpot=20"),
    Setting("1024:1536", "32:64", 0.6, 5.0, "ttft=3000,tpot=20"),
)
"""In some each of the deployments is the best one by far."""
QUICK_SETTINGS = (Setting("8:16", "2:4", 4.0, 0.5, "ttft_decode=100,tpot=30"),)


def choices(
    quick: Quick = False,
    profile: Annotated[Path | None, typer.Option(help="folder of a profile of this machine")] = None,
) -> dict[str, Any]:
    """Simulate, and measure."""
    if problem := missing():
        raise typer.BadParameter(f"there are no hosts to measure on: {problem}")
    settings, rounds, duration_s = (QUICK_SETTINGS, 1, 1.5) if quick else (SETTINGS, 2, 25.0)
    with tempfile.TemporaryDirectory(prefix="pdserve-choices-") as folder:
        path = profile or measured_profile(Path(folder), quick, {"model.path": "tiny" if quick else "dummy:135m"})
        model = Profiled.read(path, "--profile").model
        planned = {each: _simulated(each, model, path, rounds, duration_s) for each in settings}
    figures = {}
    # The lossless codec is for bfloat16, also on a CPU that emulates it.
    service = {"model.path": model, "model.dtype": "bfloat16", "transfer.transport": "tcp"}
    with NamespaceDeployment(note, settings=service) as deployment:
        for setting in settings:
            rows: dict[str, list[RequestRow]] = {name: [] for name in DEPLOYMENTS}
            for seed, codec in in_turns(CODECS, rounds):
                target = deployment.provide({"transfer.codec": codec})
                deployment.rate(setting.gbps)
                for name, (candidate, change) in DEPLOYMENTS.items():
                    if change.coded != (codec == "lossless"):
                        continue
                    run_in_loop(_send(target, setting, candidate.mode, _WARM_UP_SEED, _WARM_UP_S))
                    rows[name] += run_in_loop(_send(target, setting, candidate.mode, seed, duration_s))
            figures[setting.name] = _compare(planned[setting], rows, SLO.parse(setting.slo))
            note(f"{setting.name}: {figures[setting.name]}")
    return {
        "right": sum(each["loss"] <= _NEAR for each in figures.values()),
        "of": len(figures),
        "settings": figures,
    }


def _simulated(
    setting: Setting, model: str, profile: Path, rounds: int, duration_s: float
) -> Mapping[str, Sequence[RequestRow]]:
    """The requests of each deployment, as the plan predicts them."""
    options = PlannerOptions.choose(
        {
            "model": model,
            "device": str(profile),
            "devices": 2,
            "wan": f"{setting.gbps * PAYLOAD_SHARE}:{_ROUND_TRIP_MS}",
        }
    )
    planner = Planner(options)
    planner.configure(PdserveConfig())
    found: dict[str, list[RequestRow]] = {}
    for (name, (candidate, change)), seed in itertools.product(DEPLOYMENTS.items(), range(rounds)):
        times = itertools.takewhile(lambda at_s: at_s < duration_s, random_arrivals(setting.rate, seed))
        conversations = setting.workload.conversations(_MOST, seed, planner.site.source.shape.vocab_size)
        ended = planner.simulate(candidate, change, zip(conversations, times, strict=False))
        found.setdefault(name, []).extend(row_of(each, number) for number, each in enumerate(ended.requests))
    return found


async def _send(target: Target, setting: Setting, mode: str, seed: int, duration_s: float) -> list[RequestRow]:
    """The requests of a load."""
    async with AsyncClient(target) as client:
        conversations = setting.workload.conversations(_MOST, seed, (await client.status()).vocab_size)
        times = random_arrivals(setting.rate, seed)
        load = await run_load(client, conversations, times, mode=Mode(mode), duration_s=duration_s)
    return [
        RequestRow.of(each.generation, each.error, cell="", arm="", repeat=seed, index=each.index)
        for each in load.outcomes
    ]


def _compare(
    planned: Mapping[str, Sequence[RequestRow]], measured: Mapping[str, Sequence[RequestRow]], slo: SLO
) -> dict[str, Any]:
    """The factors on the limits, and by what share the best deployment is better than the planned one (``loss``)."""
    predicted, found = (
        {name: float(np.quantile([slo.factor_for(row) for row in rows], ATTAINMENT)) for name, rows in each.items()}
        for each in (planned, measured)
    )
    least = min(predicted.values())
    choice = next(name for name in DEPLOYMENTS if predicted[name] <= least * (1 + ALIKE))
    best = min(found, key=found.__getitem__)
    loss = 1 - found[best] / found[choice]
    return {"planned": choice, "best": best, "loss": loss, "factor": found, "factor_simulated": predicted}


if __name__ == "__main__":
    run(choices)
