"""The engine beside transformers and beside what the machine can do at all:
`python -m experiments.benchmarks.engine`.

On one core (or one GPU), in one run: every case is measured on pdserve's engine, on transformers and as a floor, one
after the other, again and again; figures are medians over the rounds. Both sides run under the allocator settings that
an engine process gets."""

from __future__ import annotations

import asyncio
import platform
import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from experiments.benchmarks.engine_process import on_one_core, process_costs
from experiments.benchmarks.frame import Quick, measured, note, run


def engine(
    cuda: Annotated[bool, typer.Option(help="on a GPU, with the 8b shape")] = False,
    quick: Quick = False,
    rounds: Annotated[int, typer.Option(min=1, help="how often each case is measured")] = 5,
    model: Annotated[str, typer.Option(help="tiny, dummy:135m, dummy:8b or dummy:PATH/config.json")] = "",
) -> dict[str, Any]:
    """Measure the engine."""
    cores = on_one_core("experiments.benchmarks.engine", cuda=cuda)
    import torch
    import transformers

    from checkpoints.source import resolve_model
    from experiments.benchmarks.engine_sides import CPU_CASES, CUDA_CASES, QUICK_CASES, Floor, TransformersSide, name_of
    from experiments.benchmarks.isolation import measure_isolation
    from experiments.engine_alone.bare_engine import BareEngine, blocks_of
    from experiments.engine_alone.ceilings import QUICK_SIZES, Ceilings

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    device = "cuda" if cuda else "cpu"
    model = model or ("tiny" if quick else "dummy:8b" if cuda else "dummy:135m")
    shape = resolve_model(model).shape
    note(f"{model} in bfloat16 on {torch.cuda.get_device_name() if cuda else f'core {cores[0]}'}")
    bound, prompt_tokens = (() if cuda else (cores[0],)), 64 if quick else 2048
    starts = 1 if quick else 3
    costs = [asyncio.run(process_costs(model, shape, bound, device, prompt_tokens)) for _ in range(starts)]
    rounds, cases = (1, QUICK_CASES) if quick else (rounds, CUDA_CASES if cuda else CPU_CASES)
    ours = BareEngine(model, device, num_blocks=blocks_of(cases), dtype="bfloat16")
    ceilings = Ceilings(torch.device(device), sizes=QUICK_SIZES if quick and not cuda else None)
    sides: list[Any] = [ours, TransformersSide(shape, device), Floor(shape, device, ours.chunk, ceilings)]
    taken = measured(cases, lambda case: [side.measure_s(case) for side in sides], rounds, warm_up=1)
    result: dict[str, Any] = {}
    for case, times_s in taken.items():
        kind, name = name_of(case)
        ours_s, transformers_s, floor_s = zip(*times_s, strict=True)
        result.setdefault(kind, {})[name] = {
            "ms": statistics.median(ours_s) * 1e3,
            "x_transformers": _ratio(transformers_s, ours_s),
            "x_floor": _ratio(ours_s, floor_s),
            "transformers_ms": statistics.median(transformers_s) * 1e3,
            "floor_ms": statistics.median(floor_s) * 1e3,
        }
    result["ready_s"], result["peak_over_weights_and_kv"] = map(statistics.median, zip(*costs, strict=True))
    if not cuda and len(cores) > 1:
        result["isolation"] = measure_isolation(model, cores, turns=1 if quick else 8, turn_s=1.0 if quick else 4.0)
    elif not cuda:
        note("step time under a busy control server: not measured, for that takes a second core")
    return result | {
        "model": model,
        "device": device,
        "rounds": rounds,
        "bare_product_gflops": ceilings.product_flops() / 1e9,
        "read_gbs": ceilings.read_bytes_per_s() / 1e9,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios, which cancels what slows a whole round down."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


if __name__ == "__main__":
    run(engine)
