"""What an engine process costs besides its steps: the time until it is ready, and the memory it takes at most."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

from checkpoints.shape import ModelShape
from engine.messages import KVRole, Step, Submit
from engine.process.client import EngineClient
from engine.spec import EngineSpec
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams

_TIMEOUT_S = 300.0
_OUTPUT_TOKENS = 4
_REQUESTS = 4


class ProcessCosts(NamedTuple):
    """``ready_s`` from spawn to ready; ``peak_bytes`` the process's largest resident size, its pool and PyTorch itself
    included, after long prompts and decodes; ``weights_and_kv_bytes`` what it has to hold."""

    ready_s: float
    peak_bytes: int
    weights_and_kv_bytes: int


async def process_costs(
    model: str, shape: ModelShape, cores: tuple[int, ...], device: str, prompt_tokens: int
) -> ProcessCosts:
    """Start an engine as a worker does, have it work on prompts of so many tokens, and end it."""
    engine = EngineClient()
    started_s = time.perf_counter()
    ready = await engine.start(EngineSpec(model=model, dtype="bfloat16", cores=cores, device=device), _TIMEOUT_S)
    ready_s = time.perf_counter() - started_s
    try:
        for i in range(_REQUESTS):
            engine.send(
                Submit(
                    Request(
                        f"r{i}",
                        (1 + i,) * prompt_tokens,
                        SamplingParams(max_tokens=_OUTPUT_TOKENS, seed=0, ignore_eos=True),
                        attempt_id=f"r{i}",
                    ),
                    KVRole.LOCAL,
                )
            )
        await asyncio.wait_for(_finished(engine), _TIMEOUT_S)
        peak_bytes = _peak_bytes(engine.pid)
    finally:
        await engine.stop(5.0)
    pool_bytes = ready.layout.block_bytes * ready.num_blocks
    return ProcessCosts(ready_s, peak_bytes, shape.weight_bytes("bfloat16") + pool_bytes)


async def _finished(engine: EngineClient) -> None:
    running = _REQUESTS
    async for event in engine.events():
        if isinstance(event, Step):
            running -= sum(bool(token.finish_reason) for token in event.tokens)
        if not running:
            return
    raise RuntimeError(f"the engine ended (exit status {engine.returncode})")


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel reports no VmHWM")
