"""The time of single engine steps: ``python -m experiments.engine_steps PLAN`` measures them in a process of its own.

The process gets the settings of an engine process and a core of its own (or the GPU), and drives the model runner as
the scheduler would. It measures all cases again in every round, forwards and backwards in turn, and prints one line of
JSON per case and round."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from engine.process.client import ALLOCATOR_SETTINGS
from pdserve.core.errors import LaunchError

_ROOT = str(Path(__file__).resolve().parents[1])
_WARM_STEPS = 2
_STEPS = 6


class StepCase(msgspec.Struct, frozen=True):
    """A step with a part for each of ``batch`` requests: of ``tokens`` tokens, after ``context`` others whose KV is in
    the pool. A decode step is one with single tokens."""

    batch: int
    tokens: int
    context: int

    @property
    def kind(self) -> Literal["prefill", "decode"]:
        """What the step does."""
        return "decode" if self.tokens == 1 else "prefill"

    @property
    def rows(self) -> int:
        """Tokens that the step computes."""
        return self.batch * self.tokens

    @property
    def pairs(self) -> float:
        """Pairs of a computed token and an earlier one that it attends to."""
        return self.rows * (self.context + (self.tokens + 1) / 2)


class StepPlan(msgspec.Struct, frozen=True):
    """What to measure."""

    model: str
    cases: tuple[StepCase, ...]
    rounds: int


class StepTime(msgspec.Struct, frozen=True):
    """A measurement: case ``case`` (its index) in round ``round``."""

    case: int
    round: int
    step_ms: float


class Measuring(msgspec.Struct, frozen=True):
    """The first line: the engine is ready."""

    device: str
    dtype: str
    core: int | None


async def measure_steps(plan: StepPlan) -> AsyncIterator[Measuring | StepTime]:
    """Run the process and yield what it says. `LaunchError` if it fails; its standard error tells why."""
    path = os.environ.get("PYTHONPATH")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        __name__,
        msgspec.json.encode(plan).decode(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            **ALLOCATOR_SETTINGS,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{_ROOT}{os.pathsep}{path}" if path else _ROOT,
        },
    )
    assert process.stdout is not None
    try:
        kind: type[Measuring] | type[StepTime] = Measuring
        async for line in process.stdout:
            yield msgspec.json.decode(line, type=kind)
            kind = StepTime
        if await process.wait() != 0:
            raise LaunchError(f"the measurement of engine steps ended with exit status {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _measure(plan: StepPlan) -> None:
    import torch

    from engine.model.source import resolve_model
    from engine.process.build import build_engine
    from engine.scheduling.batch import ScheduledSeq
    from engine.spec import DEFAULT_BLOCK_SIZE, EngineSpec
    from pdserve.core import memory_file
    from pdserve.core.sampling import SamplingParams

    size = DEFAULT_BLOCK_SIZE
    core = None
    if not torch.cuda.is_available():
        core = max(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
    num_blocks = max(case.batch * -(-_end(case) // size) for case in plan.cases)
    fd = memory_file.create("engine-steps")
    try:
        built = build_engine(
            EngineSpec(
                model=plan.model,
                device="cpu" if core is not None else "cuda",
                cores=() if core is None else (core,),
                num_blocks=num_blocks,
                max_num_seqs=max(case.batch for case in plan.cases),
            ),
            fd,
        )
    finally:
        os.close(fd)
    _say(Measuring(built.ready.device, built.ready.layout.dtype, core))
    vocab_size = resolve_model(plan.model).shape.vocab_size
    greedy = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)

    def step_ms(case: StepCase, step: int) -> float:
        start = case.context + (step if case.tokens == 1 else 0)
        blocks = -(-_end(case) // size)
        parts = [
            ScheduledSeq(
                str(i),
                torch.randint(0, vocab_size, (case.tokens,)).tolist(),
                start,
                list(range(i, case.batch * blocks, case.batch)),  # interleaved, as blocks are that were taken in turn
                True,
                greedy,
            )
            for i in range(case.batch)
        ]
        started_s = time.perf_counter()
        built.runner.execute(parts)
        return (time.perf_counter() - started_s) * 1e3

    numbered = list(enumerate(plan.cases))
    for turn in range(plan.rounds):
        for index, case in numbered if turn % 2 == 0 else reversed(numbered):
            warm, steps = (_WARM_STEPS, _STEPS) if case.tokens == 1 else (1, 2)
            times_ms = [step_ms(case, step) for step in range(warm + steps)]
            _say(StepTime(index, turn, statistics.median(times_ms[warm:])))


def _end(case: StepCase) -> int:
    """Tokens of each request after the last step."""
    return case.context + (_WARM_STEPS + _STEPS if case.tokens == 1 else case.tokens)


def _say(line: Measuring | StepTime) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> None:
    """Measure the plan that the only argument describes, as JSON."""
    from pdserve.core.process import end_with_parent

    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C concerns the experiment, which ends this process
    _measure(msgspec.json.decode(arguments[0], type=StepPlan))


if __name__ == "__main__":
    main(sys.argv[1:])
