"""`pdserve bench`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.options import (
    DEFAULT_TARGET,
    JsonOption,
    TargetOption,
    plain_table,
    print_json,
    stderr_console,
    stdout_console,
)
from pdserve.core.errors import PdserveError

if TYPE_CHECKING:
    from rich.table import Table

    from ops.bench.load import BenchLoad
    from ops.bench.report import SLO, BenchReport, Distribution

_ROWS = {"ttft_ms": "TTFT", "ttft_decode_ms": "TTFT_DECODE", "itl_ms": "ITL", "tpot_ms": "TPOT"}


def bench(
    requests: Annotated[int, typer.Option(help="how many requests")] = 64,
    concurrency: Annotated[int | None, typer.Option(help="requests running at a time (default: 8)")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second (Poisson arrivals)")] = None,
    input_len: Annotated[int, typer.Option(help="tokens of each prompt (random ids)")] = 256,
    output_len: Annotated[int, typer.Option(help="tokens to generate for each")] = 32,
    seed: Annotated[int, typer.Option(help="seed of prompts and arrivals")] = 0,
    mode: Annotated[str, typer.Option(help="auto, pd, colocated, or both: each prompt once in each")] = "auto",
    slo: Annotated[
        str | None, typer.Option(help="limits in ms for goodput: ttft=200,itl=50 (ttft_decode, tpot)")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="deadline of each request in seconds")] = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Put a load on the service and report latencies, throughput, goodput, failures, and leaked KV blocks.

    Each request has its own salt, so that no prefix cache holds any of its KV. Ctrl-C ends the run and reports the
    requests that had finished (marked as partial, exit code 130); a second Ctrl-C skips the count of leaked blocks."""
    from ops.bench.load import BenchLoad
    from ops.bench.report import SLO

    load = BenchLoad(
        requests=requests,
        input_len=input_len,
        output_len=output_len,
        concurrency=8 if concurrency is None and rate is None else concurrency,
        rate=rate,
        seed=seed,
        mode=mode,
        timeout_s=timeout,
    )
    load.validate()
    report = asyncio.run(_run(target, load, SLO.parse(slo) if slo is not None else None))
    if as_json:
        print_json(report.to_dict())
    else:
        console = stdout_console()
        console.print(_latencies(report))
        for line in _summary(report):
            console.print(line)
    if report.partial:
        raise typer.Exit(130)
    if report.failures or report.leaked_blocks != 0:
        raise typer.Exit(1)


async def _run(target: str, load: BenchLoad, slo: SLO | None) -> BenchReport:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ops.bench.load import leaked_blocks, run_load, settled
    from ops.bench.report import BenchReport
    from pdserve.client.async_client import AsyncClient

    columns = (
        TextColumn("bench"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    console = stderr_console()
    async with AsyncClient(target) as client:
        before = await settled(client)
        load.check_fits(before)
        stop, hurry = asyncio.Event(), asyncio.Event()

        def interrupted() -> None:
            stop.set()
            console.print("interrupted; waiting for the service's KV blocks (Ctrl-C skips this)")

        with _interrupts(interrupted, hurry.set), Progress(*columns, console=console) as progress:
            task = progress.add_task("bench", total=load.requests, failed="")
            failed = 0

            def on_done(outcome: object) -> None:
                nonlocal failed
                failed += getattr(outcome, "error", None) is not None
                progress.update(task, advance=1, failed=f"[red]{failed} failed[/]" if failed else "")

            outcomes, duration_s = await run_load(client, load, before.vocab_size, on_done, stop)
            leaked = await _unless(hurry, leaked_blocks(client, before))
        return BenchReport(outcomes, duration_s, slo, leaked, load.requests if stop.is_set() else None)


@contextmanager
def _interrupts(first: Callable[[], None], second: Callable[[], None]) -> Iterator[None]:
    """Call ``first`` on the first Ctrl-C and ``second`` on the next one; a third ends the command as usual."""
    loop, usual, calls = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT), iter((first, second))

    def back_to_usual() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, usual)

    def on_interrupt() -> None:
        call = next(calls)
        if call is second:
            back_to_usual()
        call()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        back_to_usual()


async def _unless(hurry: asyncio.Event, leaked: Coroutine[Any, Any, int]) -> int | None:
    """The number of leaked blocks; None once ``hurry`` is set, or if the service no longer answers. The measurements
    are kept in both cases."""
    counting, skip = asyncio.create_task(leaked), asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait((counting, skip), return_when=asyncio.FIRST_COMPLETED)
        return counting.result() if counting.done() else None
    except PdserveError as error:
        typer.echo(f"the service's KV blocks could not be counted: {error}", err=True)
        return None
    finally:
        counting.cancel()
        skip.cancel()


def _latencies(report: BenchReport) -> Table:
    modes = [None, *report.modes] if len(report.modes) > 1 else [None]
    left = ("ms", "mode") if len(modes) > 1 else ("ms",)
    table = plain_table(left, ("mean", "p50", "p90", "p99", "count"))
    for key, name in _ROWS.items():
        for mode in modes:
            distribution = report.distributions(mode)[key]
            labels = [name if mode is None else ""] + ([mode or "all"] if len(modes) > 1 else [])
            table.add_row(*labels, *_cells(distribution))
    return table


def _cells(distribution: Distribution | None) -> list[str]:
    if distribution is None:
        return ["–"] * 4 + ["0"]
    values = (distribution.mean, distribution.p50, distribution.p90, distribution.p99)
    return [*(f"{value:.2f}" for value in values), str(distribution.count)]


def _summary(report: BenchReport) -> list[str]:
    from pdserve.core.timeline import Figure

    lines = []
    if report.partial:
        lines.append(f"partial     interrupted when {len(report.outcomes)} of {report.planned} requests had finished")
    lines.append(
        f"throughput  {report.per_second(report.output_tokens):.1f} output tokens/s, "
        f"{report.per_second(report.total_tokens):.1f} tokens/s in all, "
        f"{report.per_second(len(report.generations)):.2f} requests/s over {report.duration_s:.2f} s"
    )
    good = report.good_requests
    if good is not None and report.slo is not None:
        limits = ", ".join(f"{key} ≤ {limit:g} ms" for key, limit in report.slo.limits_ms.items())
        share = "–" if report.good_share is None else f"{100 * report.good_share:.1f}"
        lines.append(f"goodput     {report.per_second(good):.2f} requests/s, {share} % within {limits}")
    added = {figure.value: report.added_ms(figure) for figure in Figure}
    if any(value is not None for value in added.values()):
        text = ", ".join(f"{name} {value:+.2f} ms" for name, value in added.items() if value is not None)
        lines.append(f"added       {text} (median over prompts of pd minus colocated)")
    failures = ", ".join(f"{count} {kind}" for kind, count in report.failures.items()) or "none"
    lines.append(f"failures    {failures}")
    errors = {str(outcome.error) for outcome in report.outcomes if outcome.error is not None}
    lines.extend(f"            {message}" for message in sorted(errors)[:3])
    if report.refusals:
        wait = "" if report.retry_after_ms is None else f"; retry after {report.retry_after_ms:.0f} ms (median)"
        lines.append(f"refused     {len(report.refusals)} requests{wait}")
    wrong = [g for g in report.generations if g.kv_bytes != g.kv_bytes_expected]
    if wrong:
        lines.append(f"kv bytes    {len(wrong)} requests transferred a different number of bytes than expected")
    leaked = "unknown" if report.leaked_blocks is None else f"{report.leaked_blocks} blocks"
    lines.append(f"leaked      {leaked}")
    return lines
