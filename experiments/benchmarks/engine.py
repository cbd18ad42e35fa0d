"""The engine beside transformers and beside what the machine can do at all:
`python -m experiments.benchmarks.engine`.

On one core (or one GPU), in one run: every case is measured on pdserve's engine, on transformers and as a floor, one
after the other, again and again; figures are medians over the rounds. Both sides run under the allocator settings that
an engine process gets."""

from __future__ import annotations

import asyncio
import platform
from typing import Annotated, Any

import pandas
import typer

from experiments.benchmarks.engine_process import on_one_core, process_costs
from experiments.benchmarks.frame import Quick, in_turns, note, run


def engine(
    cuda: Annotated[bool, typer.Option(help="on a GPU, with the 8b shape")] = False,
    quick: Quick = False,
    rounds: Annotated[int, typer.Option(min=1, help="how often each case is measured")] = 5,
    model: Annotated[str, typer.Option(help="tiny, dummy:135m, dummy:8b or dummy:PATH/config.json")] = "",
) -> dict[str, Any]:
    """Measure the engine."""
    core = on_one_core("experiments.benchmarks.engine", cuda=cuda)
    import torch
    import transformers

    from checkpoints.source import resolve_model
    from experiments.benchmarks.engine_sides import CPU_CASES, CUDA_CASES, QUICK_CASES, Floor, TransformersSide, name_of
    from experiments.engine_alone.bare_engine import BareEngine, blocks_of
    from experiments.engine_alone.ceilings import QUICK_SIZES, Ceilings

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    device = "cuda" if cuda else "cpu"
    model = model or ("tiny" if quick else "dummy:8b" if cuda else "dummy:135m")
    shape = resolve_model(model).shape
    note(f"{model} in bfloat16 on {torch.cuda.get_device_name() if cuda else f'core {core}'}")
    starts, prompt_tokens = (1, 64) if quick else (3, 2048)
    bound = () if cuda else (core,)
    costs = [asyncio.run(process_costs(model, shape, bound, device, prompt_tokens)) for _ in range(starts)]
    rounds, cases = (1, QUICK_CASES) if quick else (rounds, CUDA_CASES if cuda else CPU_CASES)
    most = max(case.batch + case.beside for case in cases)
    ours = BareEngine(model, device, num_blocks=blocks_of(cases), dtype="bfloat16", max_num_seqs=most)
    ceilings = Ceilings(torch.device(device), sizes=QUICK_SIZES if quick and not cuda else None)
    sides: dict[str, Any] = {
        "ms": ours,
        "transformers_ms": TransformersSide(shape, device),
        "floor_ms": Floor(shape, device, ours.chunk, ceilings),
    }
    times = pandas.DataFrame([
        {"repeat": number, "case": name_of(case), **{key: side.measure_s(case) * 1e3 for key, side in sides.items()}}
        for number, case in in_turns(cases, rounds, warm_up=1)
    ]).query("repeat >= 0")  # fmt: skip
    # Ratios are of each round, which cancels what slows a whole round down.
    times = times.assign(x_transformers=times.transformers_ms / times.ms, x_floor=times.ms / times.floor_ms)
    medians = times.groupby("case").median().drop(columns="repeat")
    return {
        **{
            kind: {name: figures for (of, name), figures in medians.iterrows() if of == kind}
            for kind in ("prefill", "decode", "mixed")
        },
        **pandas.DataFrame(costs, columns=["ready_s", "peak_over_weights_and_kv"]).median(),
        "model": model,
        "device": device,
        "rounds": rounds,
        "bare_product_gflops": ceilings.product_flops() / 1e9,
        "read_gbs": ceilings.read_bytes_per_s() / 1e9,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


if __name__ == "__main__":
    run(engine)
