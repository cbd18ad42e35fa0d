"""Steps of one engine: kernels, decoder, benchmark, token budgets, sampling."""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor

import msgspec

from benchmarks.first_hour.programs import last_line, run_pytest
from benchmarks.first_hour.step import Findings, Options
from experiments.engine_alone.arithmetic import ModelArithmetic

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
    """Of a case of `benchmarks.engine`: its time, and how many times as fast it is as transformers."""

    ms: float
    x_transformers: float


class EngineLine(msgspec.Struct):
    """What is judged of the JSON line of `benchmarks.engine`. Prefills are named by their tokens, decode steps by batch
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
    command = ["-m", "benchmarks.engine", "--model", model, "--rounds", "3"]
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
