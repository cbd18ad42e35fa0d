"""Engines without a worker around them: under the settings of an engine process in a benchmark's own process, and in a
process of their own, with requests to it and what it costs besides its steps."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.benchmarks.frame import ROOT
from checkpoints.shape import ModelShape
from engine.messages import KVRole, Step, Submit
from engine.process.client import ALLOCATOR_SETTINGS, EngineClient
from engine.spec import EngineSpec
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams

_CORES = "PDSERVE_BENCH_CORES"  # set: this process is bound already; these are all cores it might have used


def on_one_core(module: str, *, cuda: bool = False) -> list[int]:
    """Restart the program ``module`` bound to the first allowed core (not with ``cuda``), and with settings that Python
    and glibc read when they start. Returns all cores that were allowed, the chosen one first."""
    if not os.environ.get(_CORES):
        cores = sorted(os.sched_getaffinity(0))
        if not cuda:
            os.sched_setaffinity(0, cores[:1])
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), _CORES: ",".join(map(str, cores))}
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **settings, **ALLOCATOR_SETTINGS})
    return [int(core) for core in os.environ[_CORES].split(",")]


START_S = 300.0
_REQUEST_S = 300.0
_OUTPUT_TOKENS = 4
_REQUESTS = 4


class ProcessCosts(NamedTuple):
    """``ready_s`` from spawn to ready; ``peak_bytes`` the process's largest resident size, its pool and PyTorch itself
    included, after long prompts and decodes; ``held_bytes`` its weights and KV pool."""

    ready_s: float
    peak_bytes: int
    held_bytes: int


async def process_costs(
    model: str, shape: ModelShape, cores: tuple[int, ...], device: str, prompt_tokens: int
) -> ProcessCosts:
    """Start an engine as a worker does, have it work on prompts of so many tokens, and end it."""
    engine = EngineClient()
    started_s = time.perf_counter()
    ready = await engine.start(EngineSpec(model=model, dtype="bfloat16", cores=cores, device=device), START_S)
    ready_s = time.perf_counter() - started_s
    try:
        for number in range(_REQUESTS):
            submit(engine, f"r{number}", (1 + number,) * prompt_tokens, _OUTPUT_TOKENS)
        await finished_steps(engine, _REQUESTS)
        peak_bytes = _peak_bytes(engine.pid)
    finally:
        await engine.stop(5.0)
    held_bytes = shape.weight_bytes("bfloat16") + ready.layout.block_bytes * ready.num_blocks
    return ProcessCosts(ready_s, peak_bytes, held_bytes)


def _peak_bytes(pid: int) -> int:
    status = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def submit(engine: EngineClient, name: str, prompt: tuple[int, ...], output_tokens: int) -> None:
    """Send a greedy request."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, seed=0, ignore_eos=True)
    engine.send(Submit(Request(name, prompt, sampling, attempt_id=name), KVRole.LOCAL))


async def finished_steps(engine: EngineClient, count: int) -> Sequence[Step]:
    """The steps until ``count`` requests have ended."""
    steps: list[Step] = []
    async with asyncio.timeout(_REQUEST_S):
        async for event in engine.events():
            if isinstance(event, Step):
                steps.append(event)
                count -= sum(bool(token.finish_reason) for token in event.tokens)
            if not count:
                return steps
    raise RuntimeError(f"the engine ended (exit status {engine.returncode})")
