"""Steps of the machine and of one engine: benchmark, token budgets, sampling, and settings whose default is a guess
until a GPU has measured them (`engine.run_ahead` and `engine.prefill_attention`)."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import platform
import statistics
import subprocess
import timeit
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from engine.spec import EngineSpec
from experiments.benchmarks.engine_process import running_engine
from experiments.benchmarks.first_hour.step import Findings, Options, last_line
from experiments.engine_alone.arithmetic import ModelArithmetic
from experiments.engine_alone.program import Rates, Sample, Task, measure_alone
from experiments.engine_alone.steps import StepCase
from experiments.workloads.conversation import random_tokens
from ops.doctor.node_report import report_node
from runtime.mps import foreign_daemon, gpu_modes

DECODE_GOAL, PREFILL_GOAL = 0.75, 0.60
DEFAULT_SLACK = 1.02
"""Most time of a default relative to its alternative."""
SAMPLING_GOAL = 1.15
"""Most time of a step that samples, relative to a greedy one."""
BUDGET_GOAL = 0.95
"""Least prefill rate at the default token budget, relative to the best budget."""
_VARIABLES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "UCX_")
_BUSY_BYTES = 2**30


def environment(options: Options) -> Findings:
    """Versions, GPUs, modes and variables, and what of them would keep the rest from working."""
    report = report_node("tiny")
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    node = msgspec.to_builtins(report)
    findings = Findings({"node": node, "kernel": platform.release(), "variables": variables})
    findings.require(not report.torch_error, report.torch_error)
    if not report.ray:
        findings.notes.append("Ray is not installed; no step needs it, and `pdserve up` does")
    if not options.on_gpu:
        return findings
    import torch

    asked = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=30, check=False)
    findings.figures["nvidia-smi"] = asked.stdout.splitlines()
    if torch.distributed.is_nccl_available():
        findings.figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if torch.cuda.device_count() > 1:
        findings.figures["peer access"] = torch.cuda.can_device_access_peer(0, 1)
    capability = torch.cuda.get_device_capability(0)
    findings.require(capability >= (7, 0), f"compute capability {capability}: Triton needs 7.0")
    if capability < (8, 0):
        findings.notes.append("no native bfloat16 before compute capability 8.0: model.dtype auto means float16")
    findings.require(importlib.util.find_spec("triton") is not None, "Triton is missing: use a CUDA build of torch")
    findings.figures["mps"] = foreign_daemon(os.environ) or report.mps or "possible"
    modes = gpu_modes(os.environ)
    mode = "" if modes is None else modes.compute_mode
    findings.require(mode != "Prohibited", "the GPU's compute mode is Prohibited")
    findings.require(
        mode != "Exclusive_Process" or not report.mps,
        f"the GPU's compute mode is Exclusive_Process, which admits one process: MPS is needed, and {report.mps}",
    )
    for index, device in enumerate(report.devices):
        if (used := device.total_bytes - device.free_bytes) > _BUSY_BYTES:
            findings.notes.append(f"GPU {index} has {used / 2**30:.1f} GiB in use already: figures will be off")
    findings.require(torch.ones(1024, device="cuda").sum().item() == 1024.0, "the GPU adds wrongly")
    return findings


def benchmark(options: Options) -> Findings:
    """The engine's benchmark, and its shares of the roofline."""
    from checkpoints.source import resolve_model

    command = ["-m", "experiments.benchmarks.engine", "--model", options.model, "--rounds", "3"]
    command += ["--cuda"] if options.on_gpu else []
    command += ["--quick"] if options.quick or not options.on_gpu else []
    arithmetic = ModelArithmetic.of(resolve_model(options.model).shape, "bfloat16")
    return judge_benchmark(last_line(*command), arithmetic, has_goals=options.has_goals)


def judge_benchmark(result: Mapping[str, Any], arithmetic: ModelArithmetic, *, has_goals: bool) -> Findings:
    """Judge decode steps by the time to read weights and cache, prefills by the rate of a bare product. Prefills are
    named by their tokens, decode steps by batch and context, as in ``b8_c1024``."""
    gflops, read_gbs = result["bare_product_gflops"], result["read_gbs"]
    findings = Findings({"bare product, TFLOP/s": round(gflops / 1e3, 2), "read, GB/s": read_gbs})
    for name, row in result["decode"].items():
        batch, context = (int(part[1:]) for part in name.split("_"))
        share = arithmetic.decode(batch, context).num_bytes / (read_gbs * 1e6) / row["ms"]
        findings.aim(f"decode {name}: share of bandwidth", share, DECODE_GOAL, judged=has_goals)
    for name, row in result["prefill"].items():
        share = arithmetic.prefill(int(name), int(name)).flops / (gflops * 1e6) / row["ms"]
        judged = has_goals and int(name) >= 8192
        findings.aim(f"prefill {name}: share of product rate", share, PREFILL_GOAL, judged=judged)
    findings.figures["x transformers"] = {
        f"{kind} {name}": row["x_transformers"]
        for kind in ("prefill", "decode", "mixed")
        for name, row in result[kind].items()
    }
    findings.figures["ready, s"] = result["ready_s"]
    return findings


def budgets(options: Options) -> Findings:
    """Prefill rates, and the longest step beside decodes, by token budget."""
    large = options.has_goals
    tokens, candidates = (8192, (512, 2048, 4096, 8192, 16384)) if large else (256, (64, 128, 256))
    core = None if options.on_gpu else min(os.sched_getaffinity(0))
    medians_s: dict[int, list[float]] = {}
    for budget in candidates:
        cases = (StepCase(1, tokens), StepCase(1, max(1, budget - 8), 128, beside=8))
        task = Task(model=options.model, device=options.device, core=core, repeats=3, seed=0, cases=cases, chunk=budget)
        found: list[Rates | Sample] = []
        asyncio.run(measure_alone(task, found.append))
        samples = [each.values for each in found if isinstance(each, Sample) and each.repeat >= 0]
        medians_s[budget] = [
            statistics.median(each["time_s"] for each in samples if each["case"] == case) for case in range(len(cases))
        ]
    rates = {budget: tokens / prefill_s for budget, (prefill_s, _) in medians_s.items()}
    findings = Findings({
        "prefill, tokens/s": {str(budget): round(rate) for budget, rate in rates.items()},
        "step with 8 decodes, ms": {str(budget): round(gap_s * 1e3, 2) for budget, (_, gap_s) in medians_s.items()},
    })  # fmt: skip
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
    engine = BareEngine(options.model, options.device, num_blocks=blocks_for(case.batch, case.context + 64))
    params = {"greedy": {}, "sampled": {"sampling": SamplingParams(temperature=0.7, top_p=0.9, seed=7)}}
    times: dict[str, list[float]] = {name: [] for name in params}
    for name in [*params] * 3:
        times[name] += engine.steps_s(case, 24, 4, **params[name])
    medians = {name: statistics.median(each) for name, each in times.items()}
    findings = Findings({"step of 32, ms": {name: round(median * 1e3, 3) for name, median in medians.items()}})
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
        options.model,
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
        def prompts(count: int, tokens: int) -> list[tuple[int, ...]]:
            return [random_tokens(f"{next(numbers)}", tokens, 300) for _ in range(count)]

        numbers, prefills_ms, times = itertools.count(), [], {}
        async with running_engine(variants[name]) as engine:
            for text in engine.ready.notes:
                if text.startswith("prefill attention"):
                    findings.figures[f"{name}: kernels"] = text
            for _ in range(rounds + 1):  # the first one is warm-up
                started_s = timeit.default_timer()
                await engine.steps(prompts(1, prompt), 1)
                prefills_ms.append((timeit.default_timer() - started_s) * 1e3)
            for batch in batches:  # the first ones decode while the last ones are prefilled
                made = await engine.steps(prompts(batch, context), 2 * steps)
                ends_s = [step.sampled_s for step in made if len(step.tokens) == batch]
                times[f"step of {batch}"] = statistics.median(b - a for a, b in itertools.pairwise(ends_s)) * 1e3
        return {**times, f"prefill of {prompt}": statistics.median(prefills_ms[1:])}

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
