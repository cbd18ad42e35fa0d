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

from experiments.workloads.options import WorkloadOptions
from ops.cli.options import (
    JsonOption,
    TargetOption,
    in_panels,
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
    from experiments.bench_report import BenchRecorder
    from experiments.modes import SLO

Report = Mapping[str, Any]
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
_DATA = {
    name: (
        str if each.default is None else type(each.default),
        f"{each.description}" + ("" if each.default is None else f" (default: {each.default})"),
    )
    for name, each in WorkloadOptions.model_fields.items()
}


@with_access
@with_options("data", _DATA, "Data")
@in_panels(
    {
        "Load": "requests duration warmup concurrency rate ramp speed burstiness max_concurrency mode timeout",
    }
)
def bench(
    context: typer.Context,
    access: AccessOptions,
    data: Mapping[str, Any],
    requests: Annotated[
        int | None,
        typer.Option(
            help="how many requests (conversations with --turns; prompts with --mode both) (default: 64)",
        ),
    ] = None,
    duration: Annotated[float | None, typer.Option(help="seconds after which nothing more is sent")] = None,
    warmup: Annotated[int, typer.Option(help="requests sent before the measurement, in each mode")] = 0,
    concurrency: Annotated[
        int | None, typer.Option(help="closed loop: requests running at a time (default: 8; 1 with --mode both)")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="open loop: requests per second (Poisson arrivals; inf: all at once)"),
    ] = None,
    ramp: Annotated[str | None, typer.Option(help="open loop: a rate that changes from A to B (A:B)")] = None,
    speed: Annotated[
        float | None, typer.Option(help="open loop: the arrivals of the trace, so many times as fast (default: 1)")
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(help="gamma shape of the gaps of --rate, --ramp; below 1 is burstier (default: 1)"),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="open loop: most requests running at a time; others wait in the client")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of prompts and arrivals")] = 0,
    mode: Annotated[str, typer.Option(help="auto, pd, colocated, or both (see above)")] = "auto",
    slo: Annotated[
        str | None, typer.Option(help="limits in ms for goodput: ttft=200,itl=50 (ttft_decode, tpot, e2e)")
    ] = None,
    percentiles: Annotated[str, typer.Option(help="percentiles to report")] = "50,90,99",
    timeout: Annotated[float | None, typer.Option(help="deadline of each request in seconds")] = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="folder in which bench/STAMP is made: raw data, summary and report, as of an experiment",
        ),
    ] = None,
    save_result: Annotated[bool, typer.Option("--save-result", hidden=True)] = False,
    goodput: Annotated[str | None, typer.Option(hidden=True)] = None,
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
    from experiments.bench_plan import BenchPlan, Pace
    from experiments.bench_report import latency_table, parse_percentiles
    from experiments.cli.progress import printed
    from experiments.workloads.catalog import workload_of

    workload = workload_of(WorkloadOptions(**{name: value for name, value in data.items() if value is not None}))
    pace = Pace(
        concurrency=concurrency,
        rate=rate,
        ramp=None if ramp is None else _ramp(ramp),
        speed=speed,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
    )
    plan = BenchPlan(
        workload=workload,
        pace=pace,
        requests=requests,
        duration_s=duration,
        warmup=warmup,
        seed=seed,
        mode=mode,
        timeout_s=timeout,
        slo=_objectives(slo, goodput, context.args),
        percentiles=parse_percentiles(percentiles),
    )
    plan.validate()
    into = output or (Path("results") if save_result else None)
    reports, page = asyncio.run(_run(Target.of(target, **access), plan, into))
    if as_json:
        arms = {report["mode"]: report for report in reports}
        from ops.machine_load import LOAD

        ends = {"partial": any(map(itemgetter("partial"), reports))}
        ends |= {key: reports[-1][key] for key in ("leaked_blocks", LOAD)}
        print_json(reports[0] if plan.loads == 1 else {**ends, "arms": arms})
    else:
        console = stdout_console()
        parts = {report["mode"]: report for report in reports}
        if plan.loads == 1 and len(reports[0]["by_mode"]) > 1:
            parts = {"all": reports[0], **reports[0]["by_mode"]}
        console.print(printed(latency_table(parts), 2))
        for line in _summary(reports):
            console.print(line, soft_wrap=True, markup=False)
        if page is not None:
            console.print(f"report      {page}", soft_wrap=True, markup=False)
    if any(report["partial"] for report in reports):
        raise typer.Exit(130)
    if any(report["failed"] for report in reports) or reports[-1]["leaked_blocks"] != 0:
        raise typer.Exit(1)


def _ramp(text: str) -> tuple[float, float]:
    first, _, last = text.partition(":")
    try:
        return float(first), float(last)
    except ValueError:
        raise InvalidRequest(f"ramp: {text!r} is not of the form A:B, two rates per second, like 1:10") from None


def _objectives(slo: str | None, goodput: str | None, more: list[str]) -> SLO | None:
    """The objectives of ``--slo ttft=200,itl=50``, or of ``--goodput ttft:200 tpot:50`` (with commas or spaces)."""
    from experiments.modes import SLO

    if more and goodput is None:
        raise InvalidRequest(f"{more[0]}: bench takes options only, see `pdserve bench --help`")
    if goodput is None:
        return SLO.parse(slo) if slo is not None else None
    if slo is not None:
        raise InvalidRequest("slo: is the same as --goodput; give one of them")
    parts = [part.partition(":") for part in " ".join([goodput, *more]).replace(",", " ").split()]
    return SLO.parse(",".join(f"{'e2e' if key == 'e2el' else key}={value}" for key, _, value in parts))


async def _run(target: Target, plan: BenchPlan, into: Path | None) -> tuple[list[Report], Path | None]:
    """Reports of the loads, of which the last one has the leaked blocks and the machine's load of all; and the page of
    the run's folder, if one is to be made in ``into``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from experiments.bench_plan import fitted, run_bench
    from experiments.bench_report import BenchRecorder, report_of
    from experiments.load import Outcome
    from ops.machine_load import MachineLoad
    from ops.settled import leaked_blocks, settled
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
        plan = await fitted(client, plan, before)
        stop, hurry = asyncio.Event(), asyncio.Event()
        meter = MachineLoad.begin(target)
        recorder = None
        if into is not None:
            recorder = BenchRecorder(into, plan, str(target))
            recorder.begin(before)

        def interrupted() -> None:
            stop.set()
            console.print("interrupted; waiting for the service's KV blocks (Ctrl-C skips this)")

        with _interrupts(interrupted, hurry.set), Progress(*columns, console=console) as progress:
            total = None if plan.planned is None else plan.planned * plan.loads
            task = progress.add_task("bench", total=total, failed="")
            failed = 0

            def on_done(outcome: Outcome) -> None:
                nonlocal failed
                failed += outcome.error is not None
                if recorder is not None:
                    recorder.record(outcome)
                progress.update(task, advance=1, failed=f"[red]{failed} failed[/]" if failed else "")

            loads = await run_bench(client, plan, before, on_done, stop)
            load_facts = meter.facts()
            reports: list[Report] = [report_of(plan, *load) for load in loads]
            leaked = await _unless(hurry, leaked_blocks(client, before))
        reports[-1] = {**reports[-1], "leaked_blocks": leaked, **load_facts}
        return reports, None if recorder is None else _draw(recorder, reports)


def _draw(recorder: BenchRecorder, reports: Sequence[Report]) -> Path:
    """The page of the recorded run."""
    from experiments.bench_report import BenchRun
    from experiments.cli.progress import link_report
    from experiments.report.page import PAGE
    from experiments.runner import redraw

    recorder.finish(reports)
    redraw(BenchRun.of(recorder.folder), recorder.folder)
    page = recorder.folder.path / PAGE
    link_report(page)
    return page


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
        lines.extend(_of_load(report))
    if beside := beside_text(reports[-1]):
        lines.append(f"machine     {beside}")
    leaked = reports[-1]["leaked_blocks"]
    lines.append(f"leaked      {'unknown' if leaked is None else counted(leaked, 'block')}")
    return lines


def _of_load(report: Report) -> list[str]:
    from experiments.environment import OtherRequests
    from pdserve.core.interval import CONFIDENCE, Interval
    from pdserve.core.request import counted_requests

    lines = []
    if report["partial"]:
        lines.append(f"partial     interrupted when {report['requests']} of {report['planned']} requests had finished")
    lines.append(
        f"throughput  {report['output_tokens_per_s']:.1f} output tokens/s, {report['total_tokens_per_s']:.1f} tokens/s "
        f"in all, {report['requests_per_s']:.2f} requests/s over {report['duration_s']:.2f} s"
    )
    if (good := report["goodput"]) is not None:
        limits = ", ".join(f"{key} ≤ {limit:g} ms" for key, limit in report["slo_ms"].items())
        share = "–" if good["share"] is None else f"{100 * good['share']:.1f}"
        lines.append(f"goodput     {good['requests_per_s']:.2f} requests/s, {share} % within {limits}")
    for name, plain in report["added_ms"].items():
        if plain is not None:
            interval = Interval.from_dict(plain)
            unclear = " (no difference could be measured)" if interval.known and not interval.sign else ""
            sure = f"; {100 * CONFIDENCE:.0f} % interval" if interval.known else ""
            pairs = f"median of {interval.n} pairs, pd - colocated{sure}"
            lines.append(f"added       {name} {interval.text()}{unclear}, {pairs}")
    if report["busy"] is not None:
        lines.append(f"busy        {OtherRequests(**report['busy']).text('this load')}")
    lag = report["lag"]
    if lag is not None and report["scheduled"]:
        text = (
            f"{lag['p50_ms']:.2f} ms p50, {lag['p99_ms']:.2f} p99, {lag['max_ms']:.2f} max between schedule and sending"
        )
        behind = "; the load is behind its schedule, and latencies contain that wait" if lag["behind"] else ""
        lines.append(f"lag         {text}{behind}")
    if report["unsent"]:
        unsent = counted_requests(report["unsent"])
        lines.append(f"unsent      {unsent} still waited for --max-concurrency at the end")
    failures = ", ".join(f"{count} {kind}" for kind, count in report["failures"].items()) or "none"
    lines.append(f"failures    {failures}")
    lines.extend(f"            {message}" for message in report["errors"][:3])
    refused, wait_ms = report["refused"]["requests"], report["refused"]["retry_after_ms"]
    if refused:
        wait = "" if wait_ms is None else f"; retry after {wait_ms:.0f} ms (median)"
        lines.append(f"refused     {counted_requests(refused)}{wait}")
    if wrong := report["kv_bytes_wrong"]:
        lines.append(f"kv bytes    {counted_requests(wrong)} transferred a different number of bytes than expected")
    return lines
