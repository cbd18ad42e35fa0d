"""Steps of one engine: kernels, decoder, benchmark, token budgets, sampling, and settings whose default is a guess
until a GPU has measured them (`engine.run_ahead` and `engine.prefill_attention`)."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import shutil
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import msgspec

from experiments.benchmarks.engine_process import START_S, finished_steps, submit
from experiments.benchmarks.first_hour.programs import last_line, run_pytest
from experiments.benchmarks.first_hour.step import Findings, Options
from engine.process.client import EngineClient
from engine.spec import EngineSpec
from experiments.engine_alone.arithmetic import ModelArithmetic

DEFAULT_SLACK = 1.02
"""Most time of a default relative to its alternative."""
_TOKEN_IDS = range(5, 300)
DECODE_GOAL, PREFILL_GOAL = 0.75, 0.60
SAMPLING_GOAL = 1.15
"""Most time of a step that samples, relative to a greedy one."""
BUDGET_GOAL = 0.95
"""Least prefill rate at the default token budget, relative to the best budget."""
_KERNELS = "tests/engine/cuda/test_kernels.py"
_INTERPRETED = {"TRITON_INTERPRET": "1"}
_LARGE_BYTES = 70 * 2**30


def model_for(options: Options) -> str:
    """The model of measurements: the 8b shape where two engines of it fit onto the GPU."""
    if not options.on_gpu:
        return "tiny"
    return "dummy:8b" if options.gpu_bytes >= _LARGE_BYTES and not options.quick else "dummy:135m"


def kernels(options: Options) -> Findings:
    """The kernels against PyTorch: on a GPU as they are, else in Triton's interpreter."""
    findings = Findings()
    if options.on_gpu:
        run_pytest(findings, options, _KERNELS, "-m", "cuda")
    else:
        run_pytest(findings, options, _KERNELS, "-k", "norm_and_gate or padding", environment=_INTERPRETED)
    return findings


def sanitizer(options: Options) -> Findings:
    """A part of the same under compute-sanitizer, which finds accesses out of bounds."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return Findings(skipped="compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    findings = Findings()
    before = (program, "--tool", "memcheck", "--error-exitcode", "86", "--target-processes", "all")
    selection = ("-k", "norm_and_gate or padding or decodes_and_chunks")
    allocator = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else accesses into the cache of the allocator look right
    run_pytest(findings, options, _KERNELS, "-m", "cuda", *selection, before=before, environment=allocator)
    return findings


def decoder(options: Options) -> Findings:
    """The decoder against transformers, token for token."""
    findings = Findings()
    if options.on_gpu:
        run_pytest(findings, options, "tests/engine/cuda/test_decoder.py", "-m", "cuda")
    else:
        run_pytest(findings, options, "tests/engine/test_model_vs_transformers.py", "-k", "one_prompt and gqa")
    return findings


class CaseFigures(msgspec.Struct):
    """Of a case of `experiments.benchmarks.engine`: its time, and how many times as fast it is as transformers."""

    ms: float
    x_transformers: float


class EngineLine(msgspec.Struct):
    """What is judged of the JSON line of `experiments.benchmarks.engine`. Prefills are named by their tokens, decode steps by batch
    and context, as in ``b8_c1024``."""

    bare_product_gflops: float
    read_gbs: float
    ready_s: float
    prefill: dict[str, CaseFigures]
    decode: dict[str, CaseFigures]
    mixed: dict[str, CaseFigures]


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
        share = least_s * 1e3 / row.ms
        findings.aim(f"decode {name}: share of bandwidth", share, DECODE_GOAL, judged=has_goals)
    for name, row in result.prefill.items():
        flops = arithmetic.prefill(int(name), int(name)).flops
        share = flops / (row.ms / 1e3) / (result.bare_product_gflops * 1e9)
        judged = has_goals and int(name) >= 8192
        findings.aim(f"prefill {name}: share of product rate", share, PREFILL_GOAL, judged=judged)
    figures["x transformers"] = {
        f"{kind} {name}": row.x_transformers
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
    for budget in candidates:  # each in a process of its own, whose memory is free afterwards
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            measured = process.submit(_with_budget, model, options.device, budget, tokens)
            rates[budget], gaps[budget] = measured.result()
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


def _with_budget(model: str, device: str, budget: int, tokens: int) -> tuple[float, float]:
    from experiments.engine_alone.bare_engine import BareEngine, blocks_for

    blocks = blocks_for(1, tokens) + blocks_for(9, 256 + budget)
    engine = BareEngine(model, device, num_blocks=blocks, chunk=budget, max_num_seqs=16)
    engine.prefill_s(tokens)
    rate = tokens / statistics.median(engine.prefill_s(tokens) for _ in range(3))
    chunk = max(1, budget - 8)
    engine.mixed_s(chunk, 8, 128)
    return rate, statistics.median(engine.mixed_s(chunk, 8, 128) for _ in range(3))


def sampling(options: Options) -> Findings:
    """Decode steps of 32 requests that sample, beside greedy ones."""
    from experiments.engine_alone.bare_engine import BareEngine, blocks_for
    from pdserve.core.sampling import SamplingParams

    batch, context, steps = 32, 1024 if options.on_gpu else 64, 24
    engine = BareEngine(model_for(options), options.device, num_blocks=blocks_for(batch, context + 64))
    sampled = SamplingParams(temperature=0.7, top_p=0.9, seed=7)
    times: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for _ in range(3):
        times["greedy"] += engine.decode_steps_s(batch, context, 4, steps)
        times["sampled"] += engine.decode_steps_s(batch, context, 4, steps, sampled)
    findings = Findings()
    medians = {name: statistics.median(each) for name, each in times.items()}
    findings.figures["step of 32, ms"] = {name: round(median * 1e3, 3) for name, median in medians.items()}
    ratio = medians["sampled"] / medians["greedy"]
    findings.aim("sampled / greedy", ratio, SAMPLING_GOAL, at_most=True, judged=options.on_gpu)
    return findings


class ChoiceSizes(NamedTuple):
    """``batches`` decode ``steps`` tokens each after ``context``; ``prompt`` tokens are prefilled ``rounds`` times."""

    batches: tuple[int, ...]
    context: int
    steps: int
    prompt: int
    rounds: int


class EngineTimes(NamedTuple):
    """Milliseconds: the median time between two steps, by batch, and that of a prefill. ``attention`` is what the
    engine says of its kernels for prompts."""

    steps_ms: Mapping[int, float]
    prefill_ms: float
    attention: str


def choices(options: Options) -> Findings:
    """Engines that run ahead beside engines that wait for each step, and on GPUs both kernels for prompts. Whole engine
    processes are measured, because steps run ahead of the loop around them."""
    from engine.kernels.cuda_flashinfer import installed_version
    from experiments.engine_alone.bare_engine import blocks_for

    sizes = ChoiceSizes((1, 8, 32), 1024, 200, 8192, 5) if options.on_gpu else ChoiceSizes((1, 4), 64, 24, 256, 2)
    if options.quick:
        sizes = sizes._replace(steps=24, prompt=min(sizes.prompt, 2048), rounds=2)
    blocks = blocks_for(max(sizes.batches), sizes.context + 2 * sizes.steps) + blocks_for(1, sizes.prompt)
    spec = EngineSpec(
        model_for(options),
        dtype="bfloat16",
        device=options.device,
        num_blocks=blocks,
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
    times = {name: asyncio.run(_measured(variant, sizes)) for name, variant in variants.items()}
    for name, each in times.items():
        findings.figures[f"{name}, ms"] = {
            **{f"step of {batch}": round(ms, 3) for batch, ms in each.steps_ms.items()},
            f"prefill of {sizes.prompt}": round(each.prefill_ms, 2),
        }
        if each.attention:
            findings.figures[f"{name}: kernels"] = each.attention
    judge_choices(findings, times, has_goals=options.has_goals)
    return findings


def judge_choices(findings: Findings, times: Mapping[str, EngineTimes], *, has_goals: bool) -> None:
    """The defaults of GPUs must not be slower than their alternatives."""
    ahead, waiting = times["run_ahead True"], times["run_ahead False"]
    ratios = {
        f"run_ahead on / off, step of {batch}": ms / waiting.steps_ms[batch] for batch, ms in ahead.steps_ms.items()
    }
    if "flashinfer" in times:
        ratios["flashinfer / triton, prefill"] = times["flashinfer"].prefill_ms / times["triton"].prefill_ms
    for name, ratio in ratios.items():
        findings.aim(name, ratio, DEFAULT_SLACK, at_most=True, judged=has_goals)


async def _measured(spec: EngineSpec, sizes: ChoiceSizes) -> EngineTimes:
    engine = EngineClient()
    draw, numbers = random.Random(1), itertools.count()
    try:
        ready = await engine.start(spec, START_S)

        def send(tokens: int, output: int) -> None:
            submit(engine, f"r{next(numbers)}", tuple(draw.choice(_TOKEN_IDS) for _ in range(tokens)), output)

        prefills_s: list[float] = []
        for _ in range(sizes.rounds + 1):  # the first one is warm-up
            started_s = time.monotonic()
            send(sizes.prompt, 1)
            await finished_steps(engine, 1)
            prefills_s.append(time.monotonic() - started_s)
        steps_ms: dict[int, float] = {}
        for batch in sizes.batches:
            for _ in range(batch):
                send(sizes.context, 2 * sizes.steps)  # the first ones decode while the last ones are prefilled
            ends_s = [step.sampled_s for step in await finished_steps(engine, batch) if len(step.tokens) == batch]
            steps_ms[batch] = statistics.median(b - a for a, b in itertools.pairwise(ends_s)) * 1e3
    finally:
        await engine.stop(5.0)
    attention = next((note for note in ready.notes if note.startswith("prefill attention")), "")
    return EngineTimes(steps_ms, statistics.median(prefills_s[1:]) * 1e3, attention)
