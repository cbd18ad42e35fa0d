"""Steps of one engine: benchmark, token budgets, sampling, and settings whose default is a guess until a GPU has
measured them (`engine.run_ahead` and `engine.prefill_attention`)."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from engine.spec import EngineSpec
from experiments.benchmarks.engine_process import running_engine
from experiments.benchmarks.first_hour.step import Findings, Options, last_line
from experiments.engine_alone.arithmetic import ModelArithmetic
from experiments.engine_alone.program import Rates, Sample, Task, measure_alone
from experiments.engine_alone.steps import StepCase

DEFAULT_SLACK = 1.02
"""Most time of a default relative to its alternative."""
_TOKEN_IDS = range(5, 300)
DECODE_GOAL, PREFILL_GOAL = 0.75, 0.60
SAMPLING_GOAL = 1.15
"""Most time of a step that samples, relative to a greedy one."""
BUDGET_GOAL = 0.95
"""Least prefill rate at the default token budget, relative to the best budget."""
_LARGE_BYTES = 70 * 2**30


def model_for(options: Options) -> str:
    """The model of measurements: the 8b shape where two engines of it fit onto the GPU."""
    if not options.on_gpu:
        return "tiny"
    return "dummy:8b" if options.gpu_bytes >= _LARGE_BYTES and not options.quick else "dummy:135m"


class EngineLine(msgspec.Struct):
    """What is judged of the JSON line of `experiments.benchmarks.engine`. Prefills are named by their tokens, decode
    steps by batch and context, as in ``b8_c1024``."""

    bare_product_gflops: float
    read_gbs: float
    ready_s: float
    prefill: dict[str, dict[str, float]]
    decode: dict[str, dict[str, float]]
    mixed: dict[str, dict[str, float]]


def benchmark(options: Options) -> Findings:
    """The engine's benchmark, and its shares of the roofline."""
    model = model_for(options)
    command = ["-m", "experiments.benchmarks.engine", "--model", model, "--rounds", "3"]
    command += ["--cuda"] if options.on_gpu else []
    command += ["--quick"] if options.quick or not options.on_gpu else []
    result = last_line(EngineLine, *command)
    findings = Findings()
    from checkpoints.source import resolve_model

    arithmetic = ModelArithmetic.of(resolve_model(model).shape, "bfloat16")
    judge_benchmark(findings, result, arithmetic, has_goals=options.has_goals)
    return findings


def judge_benchmark(findings: Findings, result: EngineLine, arithmetic: ModelArithmetic, *, has_goals: bool) -> None:
    """Judge decode steps by the time to read weights and cache, prefills by the rate of a bare product."""
    figures = findings.figures
    figures["bare product, TFLOP/s"] = round(result.bare_product_gflops / 1e3, 2)
    figures["read, GB/s"] = result.read_gbs
    for name, row in result.decode.items():
        batch, context = (int(part[1:]) for part in name.split("_"))
        least_s = arithmetic.decode(batch, context).num_bytes / (result.read_gbs * 1e9)
        share = least_s * 1e3 / row["ms"]
        findings.aim(f"decode {name}: share of bandwidth", share, DECODE_GOAL, judged=has_goals)
    for name, row in result.prefill.items():
        flops = arithmetic.prefill(int(name), int(name)).flops
        share = flops / (row["ms"] / 1e3) / (result.bare_product_gflops * 1e9)
        judged = has_goals and int(name) >= 8192
        findings.aim(f"prefill {name}: share of product rate", share, PREFILL_GOAL, judged=judged)
    figures["x transformers"] = {
        f"{kind} {name}": row["x_transformers"]
        for kind, rows in (("prefill", result.prefill), ("decode", result.decode), ("mixed", result.mixed))
        for name, row in rows.items()
    }
    figures["ready, s"] = result.ready_s


def budgets(options: Options) -> Findings:
    """Prefill rates, and the longest step beside decodes, by token budget."""
    large = options.has_goals
    tokens, candidates = (8192, (512, 2048, 4096, 8192, 16384)) if large else (256, (64, 128, 256))
    findings = Findings()
    rates: dict[int, float] = {}
    gaps: dict[int, float] = {}
    model = model_for(options)
    core = None if options.on_gpu else min(os.sched_getaffinity(0))
    for budget in candidates:
        cases = (StepCase(1, tokens), StepCase(1, max(1, budget - 8), 128, beside=8))
        task = Task(model=model, device=options.device, core=core, repeats=3, seed=0, cases=cases, chunk=budget)
        times_s: list[list[float]] = [[], []]

        def take(message: Rates | Sample, times_s: list[list[float]] = times_s) -> None:
            if isinstance(message, Sample) and message.repeat >= 0:
                times_s[message.values["case"]].append(message.values["time_s"])

        asyncio.run(measure_alone(task, take))
        prefill_s, gaps[budget] = map(statistics.median, times_s)
        rates[budget] = tokens / prefill_s
    findings.figures["prefill, tokens/s"] = {budget: round(rate) for budget, rate in rates.items()}
    findings.figures["step with 8 decodes, ms"] = {budget: round(gap * 1e3, 2) for budget, gap in gaps.items()}
    judge_budgets(findings, rates, has_goals=large)
    return findings


def judge_budgets(findings: Findings, rates: Mapping[int, float], *, has_goals: bool) -> None:
    """Judge prefill rates by token budget: the default of GPUs for prefill against the best."""
    best = max(rates, key=lambda budget: rates[budget])
    findings.figures["best budget"] = best
    if has_goals:
        findings.aim("rate at the default of 8192, of the best", rates[8192] / rates[best], BUDGET_GOAL)


def sampling(options: Options) -> Findings:
    """Decode steps of 32 requests that sample, beside greedy ones."""
    from experiments.engine_alone.bare_engine import BareEngine, blocks_for
    from pdserve.core.sampling import SamplingParams

    case = StepCase(32, 1, 1024 if options.on_gpu else 64)
    engine = BareEngine(model_for(options), options.device, num_blocks=blocks_for(case.batch, case.context + 64))
    sampled = SamplingParams(temperature=0.7, top_p=0.9, seed=7)
    times: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for _ in range(3):
        times["greedy"] += engine.steps_s(case, 24, 4)
        times["sampled"] += engine.steps_s(case, 24, 4, sampled)
    findings = Findings()
    medians = {name: statistics.median(each) for name, each in times.items()}
    findings.figures["step of 32, ms"] = {name: round(median * 1e3, 3) for name, median in medians.items()}
    ratio = medians["sampled"] / medians["greedy"]
    findings.aim("sampled / greedy", ratio, SAMPLING_GOAL, at_most=True, judged=options.on_gpu)
    return findings


Times = Mapping[str, float]
"""Milliseconds: of ``step of BATCH`` the median between two steps, and of ``prefill of TOKENS``."""


def choices(options: Options) -> Findings:
    """Engines that run ahead beside engines that wait for each step, and on GPUs both kernels for prompts. Whole engine
    processes are measured, because steps run ahead of the loop around them."""
    from engine.kernels.cuda_flashinfer import installed_version
    from experiments.engine_alone.bare_engine import blocks_for

    batches, context, steps, prompt, rounds = (
        ((1, 8, 32), 1024, 200, 8192, 5) if options.on_gpu else ((1, 4), 64, 24, 256, 2)
    )
    if options.quick:
        steps, prompt, rounds = 24, min(prompt, 2048), 2
    spec = EngineSpec(
        model_for(options),
        dtype="bfloat16",
        device=options.device,
        num_blocks=blocks_for(max(batches), context + 2 * steps) + blocks_for(1, prompt),
        max_num_batched_tokens=8192 if options.on_gpu else 256,
        prefix_caching=False,
    )
    findings = Findings()
    variants = {f"run_ahead {on}": replace(spec, run_ahead=on) for on in (True, False)}
    if options.on_gpu:
        variants["triton"] = replace(spec, prefill_attention="triton")
        if installed_version() is None:
            findings.notes.append("FlashInfer is not installed (extra cuda): prompts' attention was not compared")
        else:
            variants["flashinfer"] = replace(spec, prefill_attention="flashinfer")

    async def measured(name: str) -> Times:
        draw = random.Random(1)

        def prompts(count: int, tokens: int) -> list[tuple[int, ...]]:
            return [tuple(draw.choice(_TOKEN_IDS) for _ in range(tokens)) for _ in range(count)]

        async with running_engine(variants[name]) as engine:
            for text in engine.ready.notes:
                if text.startswith("prefill attention"):
                    findings.figures[f"{name}: kernels"] = text
            prefills_s: list[float] = []
            for _ in range(rounds + 1):  # the first one is warm-up
                started_s = time.monotonic()
                await engine.steps(prompts(1, prompt), 1)
                prefills_s.append(time.monotonic() - started_s)
            times = {}
            for batch in batches:  # the first ones decode while the last ones are prefilled
                made = await engine.steps(prompts(batch, context), 2 * steps)
                ends_s = [step.sampled_s for step in made if len(step.tokens) == batch]
                times[f"step of {batch}"] = statistics.median(b - a for a, b in itertools.pairwise(ends_s)) * 1e3
            return {**times, f"prefill of {prompt}": statistics.median(prefills_s[1:]) * 1e3}

    times = {name: asyncio.run(measured(name)) for name in variants}
    for name, each in times.items():
        findings.figures[f"{name}, ms"] = {what: round(ms, 3) for what, ms in each.items()}
    judge_choices(findings, times, has_goals=options.has_goals)
    return findings


def judge_choices(findings: Findings, times: Mapping[str, Times], *, has_goals: bool) -> None:
    """The defaults of GPUs must not be slower than their alternatives."""
    for choice, default, other, kind in (
        ("run_ahead on / off", "run_ahead True", "run_ahead False", "step"),
        ("flashinfer / triton", "flashinfer", "triton", "prefill"),
    ):
        for what, ms in times.get(default, {}).items():
            if what.startswith(kind):
                ratio = ms / times[other][what]
                findings.aim(f"{choice}, {what}", ratio, DEFAULT_SLACK, at_most=True, judged=has_goals)
