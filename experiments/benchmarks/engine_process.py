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

_CORES = "PDSERVE_BENCH_CORES"  # set: this process is bound already; these are all cores it might have used


def on_one_core(module: str, *, cuda: bool = False) -> list[int]:
    """Restart the program ``module`` bound to the first allowed core (not with ``cuda``), and with settings that Python
    and glibc read when they start. Returns all cores that were allowed, the chosen one first."""
    if not os.environ.get(_CORES):
        cores = sorted(os.sched_getaffinity(0))
        if not cuda:
            os.sched_setaffinity(0, cores[:1])
        settings = {**ONE_THREAD, "PYTHONPATH": str(ROOT), _CORES: ",".join(map(str, cores))}
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **settings})
    return [int(core) for core in os.environ[_CORES].split(",")]


_START_S = 300.0
_REQUEST_S = 300.0
_OUTPUT_TOKENS = 4
_REQUESTS = 4


class RunningEngine:
    """An engine in a process of its own. ``ready`` is what it says of itself."""

    def __init__(self, client: EngineClient, ready: Ready) -> None:
        self._client, self.ready = client, ready
        self._sent = 0

    @property
    def peak_bytes(self) -> int:
        """The largest resident size of its process so far."""
        status = dict(line.split(":") for line in Path(f"/proc/{self._client.pid}/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024

    async def steps(self, prompts: Sequence[tuple[int, ...]], output_tokens: int) -> Sequence[Step]:
        """Send greedy requests, all at once; returns the steps until they have ended."""
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, seed=0, ignore_eos=True)
        for prompt in prompts:
            self._sent += 1
            name = f"r{self._sent}"
            self._client.send(Submit(Request(name, prompt, sampling, attempt_id=name), KVRole.LOCAL))
        steps: list[Step] = []
        running = len(prompts)
        async with asyncio.timeout(_REQUEST_S):
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
        yield RunningEngine(client, await client.start(spec, _START_S))
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
        await engine.steps([(1 + number,) * prompt_tokens for number in range(_REQUESTS)], _OUTPUT_TOKENS)
        pool_bytes = engine.ready.layout.block_bytes * engine.ready.num_blocks
        return ready_s, engine.peak_bytes / (shape.weight_bytes("bfloat16") + pool_bytes)
