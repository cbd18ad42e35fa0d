"""``pdserve simulate``: the service's own code in a simulated world, where a seed decides every delay and fault."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ops.cli.options import JsonOption, print_json, print_note, stderr_console

SHOWN_FAILURES = 10


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds to run")] = 500,
    first: Annotated[int, typer.Option(min=0, help="the first of them")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="run this seed alone, and show its faults")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="with --seed: show all that happens")] = False,
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="requests of each seed")] = 50,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes (default: one per core)")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the service in a simulated world under seeds, and check that nothing is lost.

    Gateways, routers, workers and the ends of KV transfers are the real ones; clock, network, model and processes are
    simulated. A seed decides the service, its load, every delay and every fault, so the same seed gives the same run.
    The exit code is 1 if a check fails; the first failing seed is then shown with as few faults as still fail."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets follows from it
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)
    from simulator.plan import Plan
    from simulator.seeds import Batch, Failure, run_seeds, shrink
    from simulator.simulation import simulate as run

    if seed is not None:
        result = run(Plan.draw(seed, requests), trace=trace)
        for line in result.trace if trace else [f"fault at {fault}" for fault in result.plan.faults]:
            typer.echo(line)
        for violation in result.violations:
            typer.echo(f"seed {seed}: {violation}", err=True)
        if not result.violations:
            print_note(stderr_console(), f"seed {seed}: nothing was lost in {result.virtual_s:.1f} virtual s")
        raise typer.Exit(1 if result.violations else 0)
    began_s, batches, failures = time.monotonic(), list[Batch](), list[Failure]()
    columns = TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=stderr_console(), transient=True) as progress:
        task = progress.add_task("seeds", total=seeds)
        for batch in run_seeds(first, seeds, num_requests=requests, jobs=jobs):
            batches.append(batch)
            failures += batch.failures
            progress.advance(task, batch.seeds)
    failures.sort(key=lambda failure: failure.seed)
    cpu_s = sum(batch.cpu_s for batch in batches)
    for failure in failures[:SHOWN_FAILURES]:
        typer.echo(f"seed {failure.seed}: {failure.violations[0]}", err=True)
    if failures:
        shrunk = shrink(run(Plan.draw(failures[0].seed, requests)))
        typer.echo(f"seed {failures[0].seed} with the faults that it needs:", err=True)
        for fault in shrunk.plan.faults:
            typer.echo(f"  {fault}", err=True)
        typer.echo(f"  {shrunk.violations[0]}", err=True)
        typer.echo(f"pdserve simulate --seed {failures[0].seed} --trace shows all of it", err=True)
    figures = {
        "seeds": seeds,
        "failed": [failure.seed for failure in failures],
        "requests": seeds * requests,
        "wall_s": round(time.monotonic() - began_s, 1),
        "seeds_per_core_s": round(seeds / cpu_s, 1) if cpu_s else None,
    }
    if as_json:
        print_json(figures)
    else:
        typer.echo(
            f"{seeds} seeds, {seeds * requests:,} requests, {len(failures)} failed; {figures['wall_s']} s, "
            f"{figures['seeds_per_core_s']} seeds per second and core"
        )
    raise typer.Exit(1 if failures else 0)
