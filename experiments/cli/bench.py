"""`pdserve bench`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.workloads.options import LoadOptions, WorkloadOptions, declared
from ops.cli.options import (
    CONNECTION,
    JsonOption,
    TargetOption,
    print_json,
    stderr_console,
    stdout_console,
    with_access,
    with_options,
)
from pdserve.client.target import DEFAULT_TARGET, AccessOptions, Target
from pdserve.core.errors import InvalidRequest, PdserveError

if TYPE_CHECKING:
    from experiments.bench_plan import BenchPlan
    from experiments.openai_server import OpenAIServer

Report = dict[str, Any]
"""What ``--json`` prints of a load."""
_ALIASES = {
    "num-prompts": "requests",
    "request-rate": "rate",
    "dataset-name": "dataset",
    "random-input-len": "input-len",
    "random-output-len": "output-len",
    "random-prefix-len": "prefix-len",
    "result-dir": "output",
    "pause": "pause-s",
}
"""Names of `vllm bench serve`, and an earlier one."""
CONTEXT = {"allow_extra_args": True, "token_normalize_func": lambda name: _ALIASES.get(name, name)}
"""Settings of the command: aliases of options, and the objectives that follow the first one of ``--goodput``."""


@with_access
@with_options("data", declared(WorkloadOptions), "Data")
@with_options("load", declared(LoadOptions), "Load")
def bench(
    context: typer.Context,
    access: AccessOptions,
    data: Mapping[str, Any],
    load: Mapping[str, Any],
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None,
        typer.Option(help="folder in which bench/STAMP is made: raw data, summary and report, as of an experiment"),
    ] = None,
    save_result: Annotated[bool, typer.Option("--save-result", hidden=True)] = False,
    goodput: Annotated[str | None, typer.Option(hidden=True)] = None,
    openai_url: Annotated[
        str | None,
        typer.Option(
            help="a server with OpenAI's API to measure instead of the target, like http://HOST:8000",
            rich_help_panel=CONNECTION,
        ),
    ] = None,
) -> None:
    """Put a load on the service and report latencies, throughput, goodput, failures, and leaked KV blocks.

    Each request has its own salt, so that no prefix cache holds any of its KV; only prompts with a shared prefix, the
    prompts of a trace, and the turns of a conversation find each other's KV.

    --mode both compares the modes. Without a rate, and at concurrency 1, each prompt is sent once in each mode, one
    request at a time on an otherwise idle service, in the order pd, colocated, colocated, pd; "added" is the median of
    the differences. With a rate or a higher concurrency each mode has the service to itself, one after the other, and
    the report has both side by side; there is no "added", since requests that queue measure each other.

    An open loop sends at its own times. "lag" is how much later requests were really sent; latencies count from then.

    Ctrl-C ends the run and reports the requests that had finished (marked as partial, exit code 130); a second Ctrl-C
    skips the count of leaked blocks. With --output they are on disk as soon as they finish; `pdserve report DIR` draws
    the report again.

    The options' names of `vllm bench serve` are understood as well, also --goodput ttft:200 tpot:50 and
    --save-result."""
    from experiments.bench_plan import BenchPlan
    from experiments.bench_report import latency_table
    from experiments.cli.progress import printed
    from experiments.openai_server import OpenAIServer
    from experiments.workloads.catalog import workload_of
    from ops.machine_load import LOAD
    from pdserve.core.request import Mode

    workload = workload_of(WorkloadOptions(**{name: value for name, value in data.items() if value is not None}))
    plan = BenchPlan.of(workload, **{**load, "slo": _objectives(load["slo"], goodput, context.args)})
    into = output or (Path("results") if save_result else None)
    measured = OpenAIServer(openai_url, access) if openai_url is not None else Target.of(target, **access)
    if openai_url is not None and plan.mode != Mode.AUTO:
        raise InvalidRequest(f"mode: a server with OpenAI's API has no modes; leave out {plan.mode}")
    reports, page = asyncio.run(_run(measured, plan, into))
    partial, leaked = any(map(itemgetter("partial"), reports)), reports[-1]["leaked_blocks"]
    parts = {report["mode"]: report for report in reports}
    if as_json:
        ends = {"partial": partial, **{key: reports[-1][key] for key in ("leaked_blocks", LOAD)}}
        print_json(reports[0] if plan.loads == 1 else {**ends, "arms": parts})
    else:
        console = stdout_console()
        if plan.loads == 1 and len(reports[0]["by_mode"]) > 1:
            parts = {"all": reports[0], **reports[0]["by_mode"]}
        console.print(printed(latency_table(parts), 2))
        for line in (*_summary(reports), *([] if page is None else [f"report      {page}"])):
            console.print(line, soft_wrap=True, markup=False)
    if partial:
        raise typer.Exit(130)
    if any(report["failed"] for report in reports) or (leaked != 0 and openai_url is None):
        raise typer.Exit(1)


def _objectives(slo: str | None, goodput: str | None, more: list[str]) -> str | None:
    """The objectives of ``--slo ttft=200,itl=50``, or of ``--goodput ttft:200 tpot:50`` (with commas or spaces)."""
    if more and goodput is None:
        raise InvalidRequest(f"{more[0]}: bench takes options only, see `pdserve bench --help`")
    if goodput is None:
        return slo
    if slo is not None:
        raise InvalidRequest("slo: is the same as --goodput; give one of them")
    parts = [part.partition(":") for part in " ".join([goodput, *more]).replace(",", " ").split()]
    return ",".join(f"{'e2e' if key == 'e2el' else key}={value}" for key, _, value in parts)


async def _run(measured: Target | OpenAIServer, plan: BenchPlan, into: Path | None) -> tuple[list[Report], Path | None]:
    """Measure a service, or a server with OpenAI's API. Returns the reports of the loads, of which the last one has the
    leaked blocks and the machine's load of all; and the page of the run's folder, if one is to be made in ``into``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from experiments.bench_plan import fitted, run_bench
    from experiments.bench_report import BenchRecorder, BenchRun, report_of
    from experiments.cli.progress import link_report
    from experiments.load import Outcome
    from experiments.report.page import PAGE
    from experiments.runner import redraw
    from ops.machine_load import MachineLoad, own_processes
    from ops.settled import leaked_blocks, settled
    from pdserve.client.async_client import AsyncClient

    bars = TextColumn("bench"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = stderr_console()
    target = measured if isinstance(measured, Target) else measured.target
    async with AsyncClient(measured) if isinstance(measured, Target) else measured as client:
        before = await settled(client)
        plan = await fitted(client, plan, before)
        stop, hurry = asyncio.Event(), asyncio.Event()
        meter, (own, complete) = MachineLoad.begin(target), own_processes(target)
        recorder = None if into is None else BenchRecorder(into, plan, str(target), before)

        def interrupted() -> None:
            stop.set()
            console.print("interrupted; waiting for the service's KV blocks (Ctrl-C skips this)")

        failed_text = TextColumn("{task.fields[failed]}")
        with _interrupts(interrupted, hurry.set), Progress(*bars, failed_text, console=console) as progress:
            total = None if plan.planned is None else plan.planned * plan.loads
            task, failed = progress.add_task("bench", total=total, failed=""), 0

            def on_done(outcome: Outcome) -> None:
                nonlocal failed
                failed += outcome.error is not None
                if recorder is not None:
                    recorder.record(outcome)
                progress.update(task, advance=1, failed=f"[red]{failed} failed[/]" if failed else "")

            loads = await run_bench(client, plan, before, on_done, stop, own if complete else None)
            load_facts = meter.facts()
            reports = [report_of(plan, *load) for load in loads]
            leaked = None
            if isinstance(client, AsyncClient):
                leaked = await _unless(hurry, leaked_blocks(client, before))
            reports[-1] |= {"leaked_blocks": leaked, **load_facts}
    if recorder is None:
        return reports, None
    recorder.finish(reports)
    redraw(BenchRun.of(recorder.folder), recorder.folder)
    page = recorder.folder.path / PAGE
    link_report(page)
    return reports, page


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


def _summary(reports: Sequence[Report]) -> list[str]:
    from ops.machine_load import beside_text
    from pdserve.core.request import counted

    lines = [f"workload    {reports[0]['workload']}"]
    for report in reports:
        if len(reports) > 1:
            lines.append(f"{report['mode']} (alone on the service)")
        lines += [f"{name:11} {text}" for name, text in _of_load(report) if text]
    if beside := beside_text(reports[-1]):
        lines.append(f"machine     {beside}")
    leaked = reports[-1]["leaked_blocks"]
    return [*lines, f"leaked      {'unknown' if leaked is None else counted(leaked, 'block')}"]


def _of_load(report: Report) -> Iterator[tuple[str, Any]]:
    """The lines about a load: their names and texts, which are false or empty if there is nothing to tell."""
    from experiments.environment import OtherRequests
    from pdserve.core.interval import CONFIDENCE, Interval
    from pdserve.core.request import counted

    good, lag, refused = report["goodput"], report["lag"], report["refused"]
    yield (
        "partial",
        report["partial"] and f"interrupted when {report['requests']} of {report['planned']} requests had finished",
    )
    yield (
        "throughput",
        f"{report['output_tokens_per_s']:.1f} output tokens/s, {report['total_tokens_per_s']:.1f} tokens/s "
        f"in all, {report['requests_per_s']:.2f} requests/s over {report['duration_s']:.2f} s and "
        f"{counted(report['requests'], 'request')}",
    )
    if good is not None:
        limits = ", ".join(f"{key} ≤ {limit:g} ms" for key, limit in report["slo_ms"].items())
        share = "–" if good["share"] is None else f"{100 * good['share']:.1f}"
        yield "goodput", f"{good['requests_per_s']:.2f} requests/s, {share} % within {limits}"
    for name, plain in report["added_ms"].items():
        if plain is not None:
            interval = Interval.from_dict(plain)
            unclear = interval.known and not interval.sign
            told = " (no difference could be measured; more --requests narrow the interval)" if unclear else ""
            sure = f"; {100 * CONFIDENCE:.0f} % interval" if interval.known else ""
            if marks := plain["disturbed"]:
                sure += f"; other processes used the machine beside {len(marks)} of them"
            yield "added", f"{name} {interval.text()}{told}, median of {interval.n} pairs, pd - colocated{sure}"
    yield "busy", report["busy"] and OtherRequests(**report["busy"]).text("this load")
    if lag is not None and report["scheduled"]:
        behind = "; the load is behind its schedule, and latencies contain that wait" if lag["behind"] else ""
        yield (
            "lag",
            f"{lag['p50_ms']:.2f} ms p50, {lag['p99_ms']:.2f} p99, {lag['max_ms']:.2f} max between schedule and "
            f"sending{behind}",
        )
    if unsent := report["unsent"]:
        yield "unsent", f"{counted(unsent, 'request')} still waited for --max-concurrency at the end"
    failures = ", ".join(f"{count} {kind}" for kind, count in report["failures"].items()) or "none"
    retried = f"; {counted(report['retried'], 'request')} served after a retry" if report["retried"] else ""
    yield "failures", failures + retried
    for message in report["errors"][:3]:
        yield "", message
    if refused["requests"]:
        wait_ms = refused["retry_after_ms"]
        wait = "" if wait_ms is None else f"; retry after {wait_ms:.0f} ms (median)"
        yield "refused", f"{counted(refused['requests'], 'request')}{wait}"
    if wrong := report["kv_bytes_wrong"]:
        yield "kv bytes", f"{counted(wrong, 'request')} transferred a different number of bytes than expected"
