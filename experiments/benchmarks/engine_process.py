"""Engines without a worker around them: under the settings of an engine process in a benchmark's own process, and in a
process of their own, with requests to it and what it costs besides its steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from checkpoints.shape import ModelShape
from contract.engine import KVRole, Ready, Step, Submit
from engine.process.client import EngineClient
from engine.spec import EngineSpec
from experiments.child_process import ROOT
from experiments.engine_alone.program import ONE_THREAD
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams

_LIMIT_S = 300.0  # of a start, and of requests


def on_one_core(module: str, *, cuda: bool = False) -> int:
    """Bind this process to the first allowed core (not with ``cuda``), which is returned, and restart its program
    ``module`` with the settings that Python and glibc read when they start."""
    core = min(os.sched_getaffinity(0))
    if not cuda:
        os.sched_setaffinity(0, [core])
    if not ONE_THREAD.items() <= os.environ.items():
        settings = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], settings)
    return core


class RunningEngine:
    """An engine in a process of its own. ``ready`` is what it says of itself."""

    def __init__(self, client: EngineClient, ready: Ready) -> None:
        self._client, self.ready, self._sent = client, ready, 0

    @property
    def peak_bytes(self) -> int:
        """The largest resident size of its process so far."""
        status = dict(line.split(":") for line in Path(f"/proc/{self._client.pid}/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024

    async def steps(
        self,
        prompts: Sequence[tuple[int, ...]],
        output_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        speculation: bool | None = None,
    ) -> Sequence[Step]:
        """Send requests, all at once; returns the steps until they have ended."""
        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            max_tokens=output_tokens,
            seed=0,
            ignore_eos=True,
            speculation=speculation,
        )
        for prompt in prompts:
            self._sent += 1
            name = f"r{self._sent}"
            self._client.send(Submit(Request(name, prompt, sampling, attempt_id=name), KVRole.LOCAL))
        steps: list[Step] = []
        running = len(prompts)
        async with asyncio.timeout(_LIMIT_S):
            async for event in self._client.events():
                if isinstance(event, Step):
                    steps.append(event)
                    running -= sum(bool(token.finish_reason) for token in event.tokens)
                if not running:
                    return steps
        raise RuntimeError(f"the engine ended (exit status {self._client.returncode})")


@contextlib.asynccontextmanager
async def running_engine(spec: EngineSpec) -> AsyncIterator[RunningEngine]:
    """Start an engine as a worker does, and end it."""
    client = EngineClient()
    try:
        yield RunningEngine(client, await client.start(spec, _LIMIT_S))
    finally:
        await client.stop(5.0)


async def process_costs(
    model: str, shape: ModelShape, cores: tuple[int, ...], device: str, prompt_tokens: int
) -> tuple[float, float]:
    """Of an engine that works on prompts of so many tokens: seconds from spawn to ready; and the process's largest
    resident size, its pool and PyTorch itself included, over the size of its weights and KV pool."""
    started_s = time.perf_counter()
    async with running_engine(EngineSpec(model=model, dtype="bfloat16", cores=cores, device=device)) as engine:
        ready_s = time.perf_counter() - started_s
        await engine.steps([(1 + number,) * prompt_tokens for number in range(4)], 4)
        pool_bytes = engine.ready.layout.block_bytes * engine.ready.num_blocks
        return ready_s, engine.peak_bytes / (shape.weight_bytes("bfloat16") + pool_bytes)
