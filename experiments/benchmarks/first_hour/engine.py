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
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from checkpoints.arithmetic import ModelArithmetic
from contract.engine import Step
from engine.spec import EngineSpec
from experiments.benchmarks.engine_process import running_engine
from experiments.benchmarks.first_hour.step import Findings, Options, last_line
from experiments.child_process import ROOT
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
PERPLEXITY_GOAL = 0.01
"""Most difference of perplexities in bfloat16, relative to transformers'."""
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

    for query in (["-q"], ["topo", "-m"]):
        asked = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=30, check=False)
        findings.figures[" ".join(("nvidia-smi", *query))] = asked.stdout.splitlines()
    if torch.distributed.is_nccl_available():
        findings.figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if torch.cuda.device_count() > 1:
        findings.figures["peer access"] = torch.cuda.can_device_access_peer(0, 1)
    capability = torch.cuda.get_device_capability(0)
    findings.require(capability >= (7, 0), f"compute capability {capability}: Triton needs 7.0")
    if capability < (8, 0):
        findings.notes.append("no native bfloat16 before compute capability 8.0: model.dtype auto means float16")
    findings.require(importlib.util.find_spec("triton") is not None, "Triton is missing: use a CUDA build of torch")
    for kind, lacks in (("Triton", report.triton_lacks), ("FlashInfer", report.flashinfer_lacks)):
        findings.require(not lacks, f"{kind} cannot compile kernels without {' and '.join(lacks)}")
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


def checkpoints(options: Options) -> Findings:
    """The log-probability of each token of a text, beside transformers' in the same type."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from experiments.engine_alone.bare_engine import BareEngine, blocks_for

    folders = options.checkpoints if options.on_gpu else (str(ROOT / "models" / "tiny"),)
    if not folders:
        return Findings(skipped="--checkpoint names no folder")
    findings = Findings()
    for folder in folders:
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][: 2048 if options.on_gpu else 256]
        ours = BareEngine(folder, options.device, num_blocks=blocks_for(1, len(ids)), dtype="bfloat16")
        told = torch.tensor(ours.prompt_logprobs(ids))
        del ours
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(options.device).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device=options.device)).logits[0, :-1].float().cpu()
        del model
        expected = logits.log_softmax(dim=1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        name, ratio = Path(folder).name, float((expected.mean() - told.mean()).exp())
        findings.figures[f"{name}: perplexity"] = round(float((-told.mean()).exp()), 4)
        findings.figures[f"{name}: of transformers'"] = round(ratio, 5)
        findings.figures[f"{name}: largest difference"] = round(float((told - expected).abs().max()), 4)
        findings.require(abs(ratio - 1) < PERPLEXITY_GOAL, f"{name}: the perplexity is {ratio:.4f} of transformers'")
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


# --- settings beside their alternatives ------------------------------------------------------------------------------

Times = Mapping[str, float]
"""Milliseconds: of ``step of BATCH`` the median between two steps, and of ``prefill of TOKENS``."""


class Comparison(NamedTuple):
    """The times of a variant over those of another one, of steps or of prefills, and the most that the ratio may be."""

    name: str
    default: str
    other: str
    kind: str
    most: float


def budgets(options: Options) -> Findings:
    """Prefills by token budget: that of GPUs for prefill beside others."""
    default, others = (8192, (512, 2048, 4096, 16384)) if options.has_goals else (256, (64, 128))
    variants = {f"budget {tokens}": {"max_num_batched_tokens": tokens} for tokens in (default, *others)}
    rows = [
        Comparison(f"budget {default} / {other}", f"budget {default}", f"budget {other}", "prefill", 1 / BUDGET_GOAL)
        for other in others
    ]
    return _compared(options, variants, rows, batches=(8,))


def sampling(options: Options) -> Findings:
    """Decode steps of 32 requests that sample, beside greedy ones."""
    rows = [Comparison("sampled / greedy", "sampled", "greedy", "step", SAMPLING_GOAL)]
    return _compared(options, {"greedy": {}, "sampled": {}}, rows, batches=(32,))


def speculation(options: Options) -> Findings:
    """Greedy tokens in float32 without guesses, with those of n-grams, and with those of a draft model, which is the
    model itself and so is right. Four requests, of which two have prompts that repeat."""
    from experiments.engine_alone.bare_engine import blocks_for

    model, prompt, outputs = ("dummy:135m", 512, 128) if options.on_gpu else ("tiny", 64, 40)
    spec = EngineSpec(model, "float32", options.device, num_blocks=blocks_for(8, prompt + outputs))
    texts = [random_tokens(f"{number}", prompt, 300) for number in range(4)]
    prompts = [text if number % 2 else (text[:16] * prompt)[:prompt] for number, text in enumerate(texts)]
    variants: dict[str, dict[str, Any]] = {"n-grams": {"ngram_drafts": True}, "draft model": {"draft_model": model}}
    findings = Findings()

    async def made(changes: Mapping[str, Any]) -> tuple[list[list[int]], int, int]:
        """The outputs, and how many drafts were verified and accepted."""
        async with running_engine(replace(spec, **changes)) as engine:
            tokens = [
                t for s in await engine.steps(prompts, outputs, speculation=bool(changes) or None) for t in s.tokens
            ]
        named: dict[str, list[int]] = {}
        for token in tokens:
            named.setdefault(token.attempt_id, []).append(token.token_id)
        drafts, accepted = sum(t.draft_tokens for t in tokens), sum(t.accepted_draft_tokens for t in tokens)
        return [named[name] for name in sorted(named)], drafts, accepted

    expected, _, _ = asyncio.run(made({}))
    for name, changes in variants.items():
        told, drafts, accepted = asyncio.run(made(changes))
        findings.figures[name] = {"drafts": drafts, "accepted": accepted}
        findings.require(told == expected, f"{name}: tokens are not those without guesses")
        findings.require(drafts > 0, f"{name}: no guess was verified")
    right = findings.figures["draft model"]
    findings.require(right["accepted"] > 0.9 * right["drafts"], f"a draft model that is the model itself: {right}")
    return findings


def choices(options: Options) -> Findings:
    """Engines that run ahead beside engines that wait for each step, and on GPUs both kernels for prompts."""
    from engine.kernels.cuda_flashinfer import installed_version

    variants: dict[str, dict[str, Any]] = {f"run_ahead {on}": {"run_ahead": on} for on in (True, False)}
    rows = [Comparison("run_ahead on / off", "run_ahead True", "run_ahead False", "step", DEFAULT_SLACK)]
    missing = options.on_gpu and installed_version() is None
    if options.on_gpu and not missing:
        variants |= {name: {"prefill_attention": name} for name in ("triton", "flashinfer")}
        rows.append(Comparison("flashinfer / triton", "flashinfer", "triton", "prefill", DEFAULT_SLACK))
    findings = _compared(options, variants, rows, batches=(1, 8, 32) if options.on_gpu else (1, 4))
    if missing:
        findings.notes.append("FlashInfer is not installed (extra cuda): prompts' attention was not compared")
    return findings


def _compared(
    options: Options, variants: Mapping[str, Mapping[str, Any]], rows: Sequence[Comparison], batches: Sequence[int]
) -> Findings:
    """Start an engine with each variant of the settings, one after the other, and compare their times. Whole engine
    processes are measured, because steps run ahead of the loop around them."""
    from experiments.engine_alone.bare_engine import blocks_for

    context, steps, prompt = (1024, 200, 8192) if options.on_gpu else (64, 24, 256)
    if options.quick:
        steps, prompt = 24, min(prompt, 2048)
    spec = EngineSpec(
        options.model,
        dtype="bfloat16",
        device=options.device,
        num_blocks=blocks_for(max(batches), context + 2 * steps) + blocks_for(1, prompt),
        max_num_batched_tokens=8192 if options.on_gpu else 256,
        prefix_caching=False,
    )

    async def measured(name: str, changes: Mapping[str, Any]) -> Times:
        numbers, times = itertools.count(), {}
        drawn: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9} if name == "sampled" else {}

        async def made(count: int, tokens: int, outputs: int) -> Sequence[Step]:
            prompts = [random_tokens(f"{next(numbers)}", tokens, 300) for _ in range(count)]
            return await engine.steps(prompts, outputs, **drawn)

        async with running_engine(replace(spec, **changes)) as engine:
            for text in engine.ready.notes:
                if text.startswith("prefill attention"):
                    findings.figures[f"{name}: kernels"] = text
            prefills_ms = []
            for _ in range(3 if options.quick else 6):  # the first one is warm-up
                started_s = time.monotonic()
                await made(1, prompt, 1)
                prefills_ms.append((time.monotonic() - started_s) * 1e3)
            for batch in batches:  # the first ones decode while the last ones are prefilled
                ends_s = [step.sampled_s for step in await made(batch, context, 2 * steps) if len(step.tokens) == batch]
                times[f"step of {batch}"] = statistics.median(b - a for a, b in itertools.pairwise(ends_s)) * 1e3
        return {**times, f"prefill of {prompt}": statistics.median(prefills_ms[1:])}

    findings = Findings()
    times = {name: asyncio.run(measured(name, changes)) for name, changes in variants.items()}
    for name, each in times.items():
        findings.figures[f"{name}, ms"] = {what: round(ms, 3) for what, ms in each.items()}
    judge(findings, times, rows, has_goals=options.has_goals)
    return findings


def judge(findings: Findings, times: Mapping[str, Times], rows: Sequence[Comparison], *, has_goals: bool) -> None:
    """Defaults must not be slower than their alternatives, by more than is allowed."""
    for row in rows:
        for what, ms in times[row.default].items():
            if what.startswith(row.kind):
                ratio = ms / times[row.other][what]
                findings.aim(f"{row.name}, {what}", ratio, row.most, at_most=True, judged=has_goals)
