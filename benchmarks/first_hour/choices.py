"""Settings whose default is a guess until a GPU has measured them: `engine.run_ahead` and `engine.prefill_attention`.

Whole engine processes are measured, because steps run ahead of the loop around them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from benchmarks.engine_process import START_S, finished_steps, submit
from benchmarks.first_hour.engine import model_for
from benchmarks.first_hour.step import Findings, Options
from engine.process.client import EngineClient
from engine.spec import EngineSpec

DEFAULT_SLACK = 1.02
"""Most time of a default relative to its alternative."""
_TOKEN_IDS = range(5, 300)


class Sizes(NamedTuple):
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
    """Engines that run ahead beside engines that wait for each step, and on GPUs both kernels for prompts."""
    from engine.kernels.cuda_flashinfer import installed_version
    from experiments.engine_alone.bare_engine import blocks_for

    sizes = Sizes((1, 8, 32), 1024, 200, 8192, 5) if options.on_gpu else Sizes((1, 4), 64, 24, 256, 2)
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


async def _measured(spec: EngineSpec, sizes: Sizes) -> EngineTimes:
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
