"""The engine beside transformers and beside what the machine can do at all: `python -m benchmarks.engine`.

On one core (or one GPU), in one run: every case is measured on pdserve's engine, on transformers and as a floor, one
after the other, again and again; figures are medians over the rounds. Both sides run under the allocator settings that
an engine process gets. A table, then one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.quick import Quick

ROOT = Path(__file__).resolve().parents[1]
_CORES = "PDSERVE_BENCH_CORES"  # set: this process is bound already; these are all cores it might have used


def main(
    cuda: Annotated[bool, typer.Option(help="on a GPU, with the 8b shape")] = False,
    quick: Quick = False,
    rounds: Annotated[int, typer.Option(min=1, help="how often each case is measured")] = 5,
    model: Annotated[str | None, typer.Option(help="tiny, dummy:135m, dummy:8b or dummy:PATH/config.json")] = None,
    core: Annotated[int | None, typer.Option(help="the core to run on; default: the first allowed one")] = None,
) -> None:
    """Measure the engine."""
    _pin(core, cuda)
    default = "tiny" if quick else "dummy:8b" if cuda else "dummy:135m"
    run(model or default, "cuda" if cuda else "cpu", quick, 1 if quick else rounds)


def run(model: str, device: str, quick: bool, rounds: int) -> None:
    """All cases, the table and the JSON line."""
    import torch
    import transformers
    from rich.console import Console
    from rich.progress import Progress

    from benchmarks.engine_cases import CPU_CASES, CUDA_CASES, QUICK_CASES
    from benchmarks.engine_floor import Floor
    from benchmarks.engine_pdserve import PdserveSide
    from benchmarks.engine_process import process_costs
    from benchmarks.engine_transformers import TransformersSide
    from benchmarks.isolation import measure_isolation
    from checkpoints.source import resolve_model
    from experiments.engine_alone.ceilings import QUICK_SIZES, Ceilings

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    console = Console()
    shape = resolve_model(model).shape
    bound = () if device == "cuda" else tuple(sorted(os.sched_getaffinity(0)))
    console.print(f"{model} in bfloat16 on {torch.cuda.get_device_name() if device == 'cuda' else f'core {bound[0]}'}")
    prompt_tokens = 64 if quick else 2048
    costs = [asyncio.run(process_costs(model, shape, bound, device, prompt_tokens)) for _ in range(1 if quick else 3)]
    cases = QUICK_CASES if quick else CUDA_CASES if device == "cuda" else CPU_CASES
    sides: dict[str, Any] = {"ours": PdserveSide(model, device, cases)}
    sides["transformers"] = TransformersSide(shape, device)
    ceilings = Ceilings(torch.device(device), sizes=QUICK_SIZES) if quick and device == "cpu" else None
    sides["floor"] = Floor(shape, device, sides["ours"].chunk, ceilings)
    times: dict[tuple[str, str], list[float]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=(rounds + 1) * len(cases))
        for turn in range(rounds + 1):
            for case in cases:
                progress.update(task, description=f"{'warm-up' if not turn else f'round {turn}'} {case.name:>14}")
                for name, side in sides.items():
                    seconds = side.measure_s(case)
                    if turn:  # the first round is warm-up
                        times.setdefault((name, case.name), []).append(seconds)
                progress.advance(task)
    result = _result(cases, times)
    result["ready_s"] = round(statistics.median(c.ready_s for c in costs), 2)
    result["peak_over_weights_and_kv"] = round(
        statistics.median(c.peak_bytes / c.weights_and_kv_bytes for c in costs), 3
    )
    console.print(_table(result))
    console.print(
        f"ready after {result['ready_s']} s; at most {costs[0].peak_bytes / 2**20:.0f} MiB resident, "
        f"{result['peak_over_weights_and_kv']} of weights and KV pool"
    )
    cores = [int(core) for core in os.environ[_CORES].split(",")]
    if device == "cpu" and len(cores) > 1:
        isolation = measure_isolation(model, cores, turns=1 if quick else 8, turn_s=1.0 if quick else 4.0)
        result["isolation"] = isolation._asdict()
        console.print(
            f"step time under {isolation.pings_per_s:.0f} pings/s to the control server: p99 "
            f"{isolation.quiet_p99_ms} → {isolation.hammered_p99_ms} ms ({isolation.rise:+.1%}; "
            f"{isolation.rise_over_busy:+.1%} over {isolation.busy_p99_ms} ms beside an unrelated load)"
        )
    elif device == "cpu":
        console.print("step time under a busy control server: not measured, for that takes a second core")
    result |= {
        "model": model,
        "device": device,
        "rounds": rounds,
        "bare_product_gflops": round(sides["floor"].product_flops() / 1e9, 1),
        "read_gbs": round(sides["floor"].read_bytes_per_s() / 1e9, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }
    sys.stdout.write(json.dumps(result) + "\n")


def _result(cases: Sequence[Any], times: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for case in cases:
        ours, theirs, floor = (times[side, case.name] for side in ("ours", "transformers", "floor"))
        result.setdefault(type(case).__name__.lower(), {})[case.name] = {
            "ms": round(statistics.median(ours) * 1e3, 2),
            "x_transformers": round(_ratio(theirs, ours), 2),
            "x_floor": round(_ratio(ours, floor), 2),
            "transformers_ms": round(statistics.median(theirs) * 1e3, 2),
            "floor_ms": round(statistics.median(floor) * 1e3, 2),
        }
    return result


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios, which cancels what slows a whole round down."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _table(result: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("case", "", *("pdserve ms", "transformers ms", "floor ms", "x transformers", "x floor"))
    for column in table.columns[2:]:
        column.justify = "right"
    for kind in ("prefill", "decode", "mixed"):
        for name, row in result.get(kind, {}).items():
            values = (row[key] for key in ("ms", "transformers_ms", "floor_ms", "x_transformers", "x_floor"))
            table.add_row(kind, name, *(f"{value:.2f}" if value < 10 else f"{value:.1f}" for value in values))
    return table


def _pin(core: int | None, cuda: bool) -> None:
    """Restart this program with the settings of an engine process, which Python reads when it starts."""
    if os.environ.get(_CORES):
        return
    from engine.process.client import ALLOCATOR_SETTINGS

    cores = sorted(os.sched_getaffinity(0))
    if core is not None:
        cores = [core, *(c for c in cores if c != core)]
    if not cuda:
        os.sched_setaffinity(0, cores[:1])
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), _CORES: ",".join(map(str, cores))}
    settings |= ALLOCATOR_SETTINGS
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks.engine", *sys.argv[1:]], {**os.environ, **settings})


if __name__ == "__main__":
    typer.run(main)
