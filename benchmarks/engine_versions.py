"""Steps of two checkouts of this project, in turns: `python -m benchmarks.engine_versions BASE [--new FOLDER]`.

An engine of each checkout runs on one core, and a step is measured with both before the next one, so that what else the
machine does meets both. Greedy decode steps of the 135m shape, and the loop of an engine process with the tiny model,
where the host's work shows. The figures are medians and minima over the rounds. A table, then one JSON line.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from engine.process.client import EngineClient

ROOT = Path(__file__).resolve().parents[1]
CASES = ("b1", "b4", "b16", "b32", "loop of 1", "loop of 8")
_SERVE = "PDSERVE_BENCH_SERVE"
_CONTEXT, _LOOP_STEPS = 64, 120
T = TypeVar("T")


def main(
    base: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="the other checkout")],
    new: Annotated[Path, typer.Option(exists=True, file_okay=False, help="the one that is compared with it")] = ROOT,
    rounds: Annotated[int, typer.Option(min=1, help="how often each step is measured with both")] = 14,
    core: Annotated[int | None, typer.Option(help="the core to run on; default: the last allowed one")] = None,
) -> None:
    """Compare two checkouts."""
    chosen = max(os.sched_getaffinity(0)) if core is None else core
    sides = [_Side(folder.resolve(), chosen) for folder in (base, new)]
    seconds: dict[str, tuple[list[float], list[float]]] = {case: ([], []) for case in CASES}
    for turn, case in itertools.product(range(rounds + 1), CASES):
        for which in (0, 1) if turn % 2 else (1, 0):
            taken_s = sides[which].measure_s(case)
            if turn:  # the first round is warm-up
                seconds[case][which].append(taken_s)
    for side in sides:
        side.close()
    result: dict[str, dict[str, float]] = {}
    for case, (base_s, new_s) in seconds.items():
        result[case] = {
            "base_ms": round(statistics.median(base_s) * 1e3, 2),
            "new_ms": round(statistics.median(new_s) * 1e3, 2),
            "base_least_ms": round(min(base_s) * 1e3, 2),
            "new_least_ms": round(min(new_s) * 1e3, 2),
            "new_over_base": round(statistics.median(b / a for a, b in zip(base_s, new_s, strict=True)), 3),
        }
        sys.stdout.write(f"{case:<10} {result[case]}\n")
    sys.stdout.write(json.dumps(result) + "\n")


class _Side:
    """The engines of one checkout, in a process of their own."""

    def __init__(self, folder: Path, core: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", _SERVE: str(core)}
        self._name = f"the engine of {folder}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read(str)

    def measure_s(self, case: str) -> float:
        """Seconds of a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return self._read(float)

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=30)

    def _read(self, expected: type[T]) -> T:
        from experiments.messages import message_of  # the other checkout, which runs this file too, may not have it

        assert self._process.stdout is not None
        return message_of(self._process.stdout.readline().encode(), expected, self._name)


async def _serve(core: int) -> None:
    """Measure what standard input asks for. Imports the checkout that PYTHONPATH names."""
    os.sched_setaffinity(0, {core})
    import torch

    from benchmarks.engine_cases import Decode
    from benchmarks.engine_pdserve import PdserveSide
    from engine.process.client import EngineClient
    from engine.spec import EngineSpec

    torch.set_num_threads(1)
    decodes = {f"b{batch}": Decode(batch, _CONTEXT) for batch in (1, 4, 16, 32)}
    side = PdserveSide("dummy:135m", "cpu", tuple(decodes.values()))
    engine = EngineClient()
    spec = EngineSpec("tiny", dtype="bfloat16", cores=(core,), num_blocks=256, prefix_caching=False)
    await engine.start(spec, 120.0)
    try:
        _say("ready")
        for number, line in enumerate(sys.stdin):
            case = line.strip()
            if case in decodes:
                taken_s = side.measure_s(decodes[case])
            else:
                taken_s = await _loop_s(engine, int(case.rpartition(" ")[2]), f"{number}")
            _say(taken_s)
    finally:
        await engine.stop(5.0)


def _say(value: str | float) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _loop_s(engine: EngineClient, batch: int, name: str) -> float:
    """Median seconds between the steps of ``batch`` requests."""
    from engine.messages import KVRole, Step, Submit
    from pdserve.core.request import Request
    from pdserve.core.sampling import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=_LOOP_STEPS, seed=0, ignore_eos=True)
    for number in range(batch):
        request = Request(f"{name}-{number}", (5 + number,) * _CONTEXT, sampling, attempt_id=f"{name}-{number}")
        engine.send(Submit(request, KVRole.LOCAL))
    running, ends_s = batch, list[float]()
    async with asyncio.timeout(120):
        async for event in engine.events():
            if isinstance(event, Step):
                running -= sum(bool(token.finish_reason) for token in event.tokens)
                ends_s += [event.sampled_s] if len(event.tokens) == batch else []
            if not running:
                break
    return statistics.median(b - a for a, b in itertools.pairwise(ends_s))


if __name__ == "__main__":
    if os.environ.get(_SERVE):
        asyncio.run(_serve(int(os.environ[_SERVE])))
    else:
        typer.run(main)
