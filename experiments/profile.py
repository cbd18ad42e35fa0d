"""``pdserve experiment profile``: what `pdserve plan` has to know of this machine to predict a service on it.

The steps of an engine alone are measured (`experiments.engine_alone`): random sizes of prompts, batches and both
together, since kernels are fastest at some sizes and a service meets them all. `MeasuredSteps` is fitted to most of
them, and judged by the others. What a request spends beside engines comes from the breakdowns of an idle service with a
prefill and a decode worker, and the time between two steps from one with the tiny model, whose steps hardly take any
time themselves.

A running service, and one with engines that are not pdserve's, is measured by requests (`experiments.served_steps`)."""

from __future__ import annotations

import os
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import msgspec
import numpy as np
from pydantic import Field

from checkpoints.source import resolve_model
from experiments.deployment import Deployment, Service
from experiments.engine_alone.program import Rates, Sample, Task, measure_alone
from experiments.engine_alone.steps import StepCase, drawn_size
from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.modes import COLOCATED, PD, Split
from experiments.report.drawing import Mark, Panel, Picture, Rule, TableBlock, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, RequestRow, RunData, faults
from experiments.served_steps import measure_served, served_cases, unshared_salt
from experiments.workloads.conversation import random_tokens
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.request import Mode, counted
from pdserve.core.timeline import Figure
from simulator.planning.profile import PROFILE
from simulator.planning.service import Overheads
from simulator.planning.step_time import KNOTS, MeasuredSteps, StepShape

STEPS, BETWEEN, SERVED = "steps", "between", "served"
"""The cells."""
_HELD_OUT = 3
"""One of so many cases judges the fit."""
_LONGEST, _LARGEST = 1500, 32
"""Of contexts and of batches."""
_OUTPUT = 12
_LEAST_S = 1e-4
"""Hand-offs of long prompts take at least so much longer than short ones: less cannot be told from none."""
_WARM = 2
_SPREAD = 100
"""Number of quantiles that are kept."""


class ProfileOptions(Options):
    """Options of `Profile`. ``model`` is what a running service serves, too."""

    of_service = frozenset({"device"})

    steps: int = option(66, ge=36, description="steps of different sizes to measure", quick=36)
    repeats: int = option(3, ge=1, description="how often each is measured", quick=1)
    requests: int = option(8, ge=3, description="requests of each length and mode to an idle service", quick=3)
    device: Literal["cpu", "cuda"] = Field("cpu", description="one core, or the first GPU")
    step_tokens: int = Field(
        2048, ge=16, description="most tokens of a step of engines that do not tell it (--target, and other engines)"
    )


class Profile(Experiment):
    """See the module."""

    name = PROFILE
    question = "How long do steps of this machine take, and what does a service add to them?"
    options_type = ProfileOptions
    options: ProfileOptions
    _engine, _model = "pdserve", ""

    def deployment(self, report: Callable[[str], None], **service: Unpack[Service]) -> Deployment:
        """Services of the engine and the model that its configuration names."""
        deployment = super().deployment(report, **service)
        if not deployment.attached:
            config = deployment.configuration({})
            self._engine, self._model = config.worker.engine, config.model.path
        return deployment

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """The engine alone, then a service of the tiny model, then one of the model. For a running service, or another
        engine, the steps of a service, then requests one at a time."""
        sent = self.options.requests
        if attached is not None:
            self._check(attached)
        if attached is not None or self._engine != "pdserve":
            return [Cell(STEPS, {}, {}, self.options.steps), Cell(SERVED, {}, {}, len(_LENGTHS) * sent)]
        pair = {"cluster.prefill": 1, "cluster.decode": 1, "cluster.device": self.options.device}
        return [
            Cell(STEPS, {}, None, self._task().measurements),
            Cell(BETWEEN, {}, {**pair, "model.path": "tiny"}, sent),
            Cell(SERVED, {}, {**pair, "model.path": self.options.model}, 2 * len(_LENGTHS) * sent),
        ]

    def _check(self, status: ServiceStatus) -> None:
        """Raise InvalidRequest if a service cannot be profiled by requests."""
        if (split := Split.of(status).name) != "1P1D":
            raise InvalidRequest(f"target: profile a service of one prefill and one decode worker, and not {split}")
        model = self._model or self.options.model
        shape = resolve_model(model, served=False).shape
        if shape.vocab_size != status.vocab_size:
            raise InvalidRequest(
                f"--model: {model} has a vocabulary of {shape.vocab_size}, and what the service serves one of "
                f"{status.vocab_size}; name the same model"
            )

    def _task(self) -> Task:
        options = self.options
        core = min(os.sched_getaffinity(0)) if options.device == "cpu" else None
        return Task(
            model=options.model,
            device=options.device,
            core=core,
            repeats=options.repeats,
            seed=options.seed,
            cases=draw_cases(options.steps, options.seed),
        )

    async def measure(self, bench: Bench) -> None:
        """Keep the seconds of each case, or the rows of requests to an idle service."""
        by_requests = bench.attached or self._engine != "pdserve"
        if bench.cell.name == STEPS:
            await (self._measure_served_steps if by_requests else self._measure_steps)(bench)
            return
        if bench.cell.name == BETWEEN:
            bench.facts["alone_s"] = await self._decode_alone_s()
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            lengths: Sequence[int] = _LENGTHS
            modes = (PD,) if by_requests else (COLOCATED, PD)
            if bench.cell.name == BETWEEN:
                lengths, modes = _LENGTHS[:1], (COLOCATED,)
            room = min(status.context_length, status.pool_tokens) - _OUTPUT
            for length in lengths:
                tokens = min(length, room)
                for mode in modes:
                    for index in range(-_WARM, self.options.requests):
                        prompt = random_tokens(f"profile/{mode}/{length}/{index}", tokens, status.vocab_size)
                        sent: Mapping[str, Any] = {"max_tokens": _OUTPUT, "mode": Mode(mode), "salt": unshared_salt()}
                        if index < 0:  # warms up
                            await client.generate(prompt, ignore_eos=True, **sent).result()
                            continue
                        await bench.send(client, prompt, arm=mode, repeat=0, index=index, kind=str(length), **sent)
                        bench.advance(1)
        bench.facts |= {"block_size": status.block_size, "pool_tokens": status.pool_tokens}

    async def _decode_alone_s(self) -> float:
        """Seconds of a decode step of the tiny model, in an engine alone."""
        times: list[float] = []

        def take(message: Rates | Sample) -> None:
            if isinstance(message, Sample) and message.repeat >= 0:
                times.append(message.values["time_s"])

        task = msgspec.structs.replace(self._task(), model="tiny", cases=(StepCase(1, 1, _LENGTHS[0]),))
        await measure_alone(task, take)
        return statistics.median(times)

    async def _measure_served_steps(self, bench: Bench) -> None:
        """By requests to a running service."""
        options, steps = self.options, []
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            self._check(status)
            room = min(status.context_length, status.pool_tokens)
            for number, case in enumerate(served_cases(options.steps, options.seed, room)):
                name = f"profile/{options.seed}/{number}"
                found = await measure_served(client, case, options.repeats, name, status.vocab_size)
                steps.append({**msgspec.structs.asdict(found.case), "times_s": found.times_s})
                bench.advance(1)
            devices = ", ".join(sorted({worker.device for worker in status.workers}))
        bench.facts |= {"steps": steps, "device": devices, "dtype": status.dtype}
        bench.facts |= {"chunk": options.step_tokens, "by_requests": True, "model": self._model or options.model}

    async def _measure_steps(self, bench: Bench) -> None:
        task = self._task()
        times: list[list[float]] = [[] for _ in task.cases]

        def take(message: Rates | Sample) -> None:
            if isinstance(message, Sample):
                bench.advance(1)
                if message.repeat >= 0:
                    times[message.values["case"]].append(message.values["time_s"])

        built = await measure_alone(task, take)
        steps = [
            {**msgspec.structs.asdict(case), "times_s": each} for case, each in zip(task.cases, times, strict=True)
        ]
        bench.facts |= {"steps": steps, "device": built.device, "dtype": built.dtype, "chunk": built.chunk}

    def summarise(self, run: RunData) -> Figures:
        """``steps``: the fit (`MeasuredSteps`), with ``error``, the median of its relative errors at the ``held_out``
        steps, and ``bias``, their mean; ``cases``, all steps with the predicted ``predicted_ms`` and the measured
        ``measured_ms``. ``overheads``: seconds beside engines (`Overheads`). ``spread``: see `PlannedWorker`. ``link``:
        what a link of a host carries (`LinkClass`). ``model``, ``device``, ``dtype``, ``chunk`` (tokens of a step),
        ``block_size``, ``pool_tokens`` of a worker. ``requests``: how many there were. ``by_requests``: the steps were
        measured by requests to a service, and have the time between two steps in them. What was not measured is null.
        """
        facts = {cell.cell: cell.facts for cell in run.cells}
        found: Figures = {"experiment": self.name, "steps": None, "cases": []}
        found["model"] = run.fact("model", self.options.model)
        found |= {key: run.fact(key) for key in ("device", "dtype", "chunk", "block_size", "pool_tokens")}
        found |= {"overheads": None, "spread": None, "link": None, "failed": faults(SERVED, run.rows_of(SERVED))}
        found["by_requests"] = bool(run.fact("by_requests"))
        found["requests"] = sum(row.error is None for row in run.rows)
        if STEPS in facts:
            found |= _fitted(facts[STEPS]["steps"])
        if SERVED in facts and (BETWEEN in facts or found["by_requests"]) and found["steps"] is not None:
            found["spread"] = _spread(run.rows_of(SERVED))
            found["overheads"] = msgspec.to_builtins(_overheads(run, facts.get(BETWEEN)))
            rates = [float(link["ceiling_gbs"]) for link in facts[SERVED].get("links", ()) if link.get("ceiling_gbs")]
            rate = 1e9 * statistics.median(rates) if rates else _handoff_rate(run)
            if rate:
                found["link"] = {"bytes_per_s": rate, "latency_s": 0.0}
        return found

    def report(self, run: RunData, summary: Figures) -> Report:
        """Measured over predicted steps, and the overheads."""
        blocks: list[Picture | TableBlock] = []
        if summary["cases"]:
            blocks.append(_picture(summary["cases"]))
        if overheads := summary["overheads"]:
            rows = [{"what": what, "ms": 1e3 * overheads[key]} for key, what in _OVERHEAD_TEXTS.items()]
            blocks.append(table("Beside the engines", rows, ("what", "ms | ms:.2f"), "Medians of an idle service."))
        how = "after a warm-up, order reversed with each repeat"
        caveats = ["The profile holds for this model, dtype and machine, at the speed that it had at that time."]
        if summary["by_requests"]:
            how = "by requests to a running service, after a warm-up"
            caveats.append(
                "No step with parts of prompts and decodes was measured: that they take the sum is assumed. What the "
                "engine does for a request beside steps counts as part of the prompt's step."
            )
        method = (
            f"{self.options.steps} steps of random sizes, {self.options.repeats} times each {how}; one of {_HELD_OUT} "
            "judges the fit"
        )
        return Report(
            "Profile", self.question, _answer(summary), setup_of(run, method), blocks, caveats, summary["failed"]
        )


_LENGTHS = (64, 512, 1024)
"""Tokens of the prompts to an idle service."""
_OVERHEAD_TEXTS = {
    "arrive_s": "from the client to the choice of workers",
    "dispatch_s": "from there to an engine",
    "answer_s": "from a token to the client",
    "announce_s": "from decode's allocation of blocks to prefill",
    "handoff_s": "from the last bytes of a hand-off to decode's engine",
    "between_s": "between two steps of an engine",
}


def draw_cases(count: int, seed: int) -> tuple[StepCase, ...]:
    """Steps of random sizes: a part of a prompt, requests that decode, and both together, in turn."""
    draw = random.Random(f"profile/{seed}")

    cases = []
    for number in range(count):
        context = draw.randrange(1, _LONGEST)
        if number % 3 == 0:
            cases.append(StepCase(1, drawn_size(draw, 512, 8), context * draw.randrange(2)))
        elif number % 3 == 1:
            cases.append(StepCase(drawn_size(draw, _LARGEST), 1, context))
        else:
            cases.append(StepCase(1, drawn_size(draw, 448, 8), context, drawn_size(draw, _LARGEST)))
    return tuple(cases)


def _fitted(steps: Sequence[Mapping[str, Any]]) -> Figures:
    """The fit to measured steps, and all of them beside a fit that has not seen those that judge it."""
    cases = [StepCase(*(int(step[key]) for key in StepCase.__struct_fields__)) for step in steps]
    shapes = [StepShape.plain(case.batch, case.tokens, case.context, case.beside) for case in cases]
    times = [[float(each) for each in step["times_s"]] for step in steps]
    judges = [place % _HELD_OUT == _HELD_OUT - 1 for place in range(len(steps))]

    def fit(chosen: Sequence[bool]) -> MeasuredSteps:
        return MeasuredSteps.fit(
            [(shape, each) for shape, mine, use in zip(shapes, times, chosen, strict=True) if use for each in mine]
        )

    judged = fit([not judge for judge in judges])
    held = [(s, statistics.median(t)) for s, t, judge in zip(shapes, times, judges, strict=True) if judge]
    rows = [
        {
            **msgspec.structs.asdict(case),
            "kind": case.kind,
            "measured_ms": 1e3 * statistics.median(mine),
            "predicted_ms": 1e3 * judged.seconds(shape),
            "held_out": judge,
        }
        for case, shape, mine, judge in zip(cases, shapes, times, judges, strict=True)
    ]
    bias = statistics.fmean(judged.seconds(shape) / seconds - 1 for shape, seconds in held)
    final = msgspec.to_builtins(fit([True] * len(steps)))
    return {"steps": {**final, "knots": list(KNOTS), "error": judged.error(held), "bias": bias}, "cases": rows}


_HAND_OFF = ("kv_exposed", "decode_queue", "leg_gap", "decode_leg")
"""Stages of a hand-off. Those of engines that are not pdserve's are the last two, the last with a decode step."""


def _handoff_rate(run: RunData) -> float:
    """Bytes per second of hand-offs, by their times for the shortest and the longest prompts; 0 if they are not known.
    For links whose rate the service does not measure."""
    sizes: dict[int, list[float]] = defaultdict(list)
    for row in run.rows_of(SERVED):
        if row.error is None and row.arm == PD:
            stages_ms = row.stages_ms.get(Figure.TTFT_DECODE, {})
            sizes[row.kv_bytes_expected].append(sum(stages_ms.get(name, 0.0) for name in _HAND_OFF) / 1e3)
    if len(sizes) < 2:
        return 0.0
    least, most = min(sizes), max(sizes)
    longer_s = statistics.median(sizes[most]) - statistics.median(sizes[least])
    return (most - least) / max(longer_s, _LEAST_S)


def _overheads(run: RunData, between: Mapping[str, Any] | None) -> Overheads:
    """From the breakdowns of requests to an idle service. What lies between two processes counts as half before and
    half after. Without ``between``, the time between two steps is part of them."""
    rows = [row for row in run.rows_of(SERVED) if row.error is None]
    stages = _medians_s(rows, Figure.TTFT)
    handed = _medians_s([row for row in rows if (row.arm, row.kind) == (PD, str(_LENGTHS[0]))], Figure.TTFT_DECODE)
    gaps = [] if between is None else [gap for row in run.rows_of(BETWEEN) for gap in row.itl_ms]
    alone_s = 0.0 if between is None else float(between["alone_s"])
    network_s, dispatch_s = stages["network"], stages["dispatch"]
    return Overheads(
        arrive_s=network_s / 2 + stages["gateway"] + stages["route"],
        dispatch_s=dispatch_s / 2 + stages["prefill_queue"],
        answer_s=dispatch_s / 2 + network_s / 2,
        announce_s=dispatch_s / 2,
        handoff_s=sum(handed[name] for name in _HAND_OFF),
        between_s=max(0.0, statistics.median(gaps) / 1e3 - alone_s) if gaps else 0.0,
    )


def _spread(rows: Sequence[RequestRow]) -> list[float]:
    """Gaps between the tokens of requests that were alone, divided by their mean in the same mode and at the same
    prompt length. The first gap is left out, since it may contain a hand-off."""
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.error is None:
            gaps[row.arm, row.kind].extend(row.itl_ms[1:])
    ratios = [gap / statistics.fmean(mine) for mine in gaps.values() for gap in mine]
    if not ratios:
        return []
    found = np.quantile(ratios, (np.arange(_SPREAD) + 0.5) / _SPREAD)
    return [round(float(ratio), 4) for ratio in found / found.mean()]


def _medians_s(rows: Sequence[RequestRow], figure: Figure) -> Mapping[str, float]:
    """The median of each stage, in seconds; 0 for one that no request has."""
    stages: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.stages_ms.get(figure, {}).items():
            stages[name].append(value)
    medians = {name: statistics.median(values) / 1e3 for name, values in stages.items()}
    return defaultdict(float, medians)


def _answer(summary: Figures) -> str:
    steps, overheads = summary["steps"], summary["overheads"]
    if steps is None:
        return "Nothing was measured."
    held = sum(case["held_out"] for case in summary["cases"])
    told = (
        f"The time of a step is predicted with a median error of {steps['error']:.1%} at {held} steps that the fit has "
        f"not seen (on average {steps['bias']:+.1%})."
    )
    if overheads is None:
        return told
    around = sum(overheads[key] for key in ("arrive_s", "dispatch_s", "answer_s"))
    told = (
        f"{told} By the medians of {counted(summary['requests'], 'request')}, a service adds {1e3 * around:.1f} ms to "
        f"the time to first token and {1e3 * overheads['handoff_s']:.1f} ms to a hand-off of one block"
    )
    if summary["by_requests"]:
        return f"{told}."
    return f"{told}, and there are {1e3 * overheads['between_s']:.2f} ms between two steps."


def _picture(cases: Sequence[Figures]) -> Picture:
    held = [case for case in cases if case["held_out"]]
    return Picture(
        "steps",
        "Predicted over measured steps",
        "Steps that the fit has not seen. On the line, the prediction is right.",
        [
            Panel(
                [Rule("diagonal"), Mark(held, "measured_ms", "predicted_ms", "kind", kind="points")],
                "measured, ms",
                "predicted, ms",
                log="xy",
                legend="upper left",
            )
        ],
    )
