"""What all benchmarks share: options, services, loads, rounds, tables, and the last line.

`python -m experiments.benchmarks.NAME` calls `run` with a function that returns its figures: mappings, or mappings of
mappings, with numbers at the end; rows of a data frame are mappings too. They are printed as tables, and as JSON on the
last line. What happens meanwhile goes to standard error.

Benchmarks collect rows, one for each request or measurement, with the ``arm`` and the ``repeat`` to which it belongs.
Their figures are expressions over data frames of such rows."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import pandas
import psutil
import typer
from rich.console import Console
from rich.progress import track

from experiments.deployment import Deployment
from experiments.load import run_load
from experiments.report.drawing import frame_of
from experiments.run_folder import RequestRow
from experiments.runner import signals_interrupt
from experiments.workloads.arrivals import Schedule
from experiments.workloads.conversation import Conversation
from gateway.token_file import digest_of
from ops.launch.ports import free_ports
from ops.launch.state import ServiceState
from pdserve import AsyncClient, Client, Generation
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import CapacityExceeded

Quick = Annotated[bool, typer.Option("--quick", help="smallest sizes, shortest windows: does it run?")]
"""The option of every benchmark that `make` names. Such a run has all figures, and they mean nothing."""
Only = Annotated[str, typer.Option("--only", help="these parts, separated by commas")]
T = TypeVar("T")
_out = Console(highlight=False)
_progress = Console(stderr=True, highlight=False)


def run(measure: Callable[..., Mapping[str, Any]]) -> None:
    """The program of a benchmark. The parameters of ``measure`` are its options. Ctrl-C, SIGTERM and SIGHUP end it, and
    the services that it has started."""

    @functools.wraps(measure)
    def program(**options: Any) -> None:
        with signals_interrupt():
            figures = _plain(measure(**options))
        _show(figures)
        print(json.dumps(figures))  # noqa: T201 - the last line is for programs

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(program)
    app()


def note(text: str) -> None:
    """Tell what happens."""
    _progress.print(text, markup=False, soft_wrap=True)


def parts(only: str, **measures: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the parts of a benchmark that ``only`` names; of all, if it is empty."""
    chosen = only.split(",") if only else list(measures)
    if unknown := set(chosen) - measures.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {', '.join(measures)}", param_hint="--only")
    return {name: measures[name]() for name in chosen}


# --- rounds ----------------------------------------------------------------------------------------------------------


def in_turns(arms: Iterable[T], rounds: int, warm_up: int = 0) -> Iterator[tuple[int, T]]:
    """Each arm once in every round, with the round's number. Every second round goes backwards, so that whatever else
    the machine does meets all arms. Rounds with a negative number are warm-up and do not count."""
    order = list(arms)
    turns = [
        (number, arm) for number in range(-warm_up, rounds) for arm in (order if number % 2 == 0 else reversed(order))
    ]
    yield from track(turns, "measuring", console=_progress, transient=True)


def measured(arms: Iterable[Any], measure: Callable[[Any], Any], rounds: int, warm_up: int = 0) -> pandas.DataFrame:
    """What ``measure`` gives for each arm (its column) in every round that counts (its row), `in_turns`."""
    found: dict[Any, list[Any]] = {arm: [] for arm in arms}
    for number, arm in in_turns(found, rounds, warm_up):
        value = measure(arm)
        if number >= 0:
            found[arm].append(value)
    return pandas.DataFrame(found)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """The CPU time of the processes so far."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


@contextlib.asynccontextmanager
async def sampling(every_s: float, sample: Callable[[], T]) -> AsyncIterator[list[T]]:
    """What ``sample`` gives again and again: now, meanwhile, and at the end. It runs in a thread."""
    found = [sample()]

    async def again() -> None:
        while True:
            await asyncio.sleep(every_s)
            found.append(await asyncio.to_thread(sample))

    task = asyncio.create_task(again())
    try:
        yield found
    finally:
        task.cancel()
        found.append(sample())


# --- requests --------------------------------------------------------------------------------------------------------


def row(done: Generation, arm: object = "", repeat: int = 0) -> RequestRow:
    """The row of a request."""
    return RequestRow.of(done, None, cell="", arm=str(arm), repeat=repeat, index=0)


def frame(rows: Sequence[RequestRow]) -> pandas.DataFrame:
    """Rows of requests without those of warm-up, whose ``repeat`` is negative. What is nested has dotted columns:
    ``stages_ms.ttft.prefill``."""
    found = pandas.json_normalize([msgspec.structs.asdict(each) for each in rows if each.repeat >= 0])
    return found.reindex(columns=found.columns.union(RequestRow.__struct_fields__, sort=False))


def added(requests: pandas.DataFrame, figure: str, arm: str = "pd", other: str = "colocated") -> pandas.Series:
    """The differences of a figure between two arms, by repeat."""
    wide = requests.pivot(index="repeat", columns="arm", values=figure)
    return wide[arm] - wide[other]


def quantiles(values: pandas.Series, prefix: str, *percents: int) -> dict[str, float]:
    """Percentiles of milliseconds, as ``PREFIXp50_ms``."""
    return {f"{prefix}p{percent}_ms": values.quantile(percent / 100) for percent in percents}


async def load(
    clients: Sequence[AsyncClient],
    schedules: Iterable[Schedule],
    requests: Iterable[Iterable[Conversation]],
    **options: Any,
) -> pandas.DataFrame:
    """Loads of several clients at once, each by its own schedule and with its own requests. ``options`` are those of
    `run_load`. Rows of requests; besides, ``ended_s``, ``lag_ms`` (how late it was sent), ``took_ms`` (from then to its
    end), and ``refused``: whether it may come again."""
    sending = (run_load(*each, **options) for each in zip(clients, requests, schedules, strict=True))
    outcomes = [outcome for load in await asyncio.gather(*sending) for outcome in load.outcomes]
    rows = [
        RequestRow.of(each.generation, each.error, cell="", arm="", repeat=0, index=each.index,
                      scheduled_s=each.scheduled_s, sent_s=each.sent_s)
        for each in outcomes
    ]  # fmt: skip
    return frame(rows).assign(
        ended_s=[each.ended_s for each in outcomes],
        lag_ms=[each.lag_s * 1e3 for each in outcomes],
        took_ms=[(each.ended_s - each.sent_s) * 1e3 for each in outcomes],
        refused=[
            isinstance(each.error, CapacityExceeded) and each.error.retry_after_s is not None for each in outcomes
        ],
    )


def errors_of(requests: pandas.DataFrame) -> dict[str, int]:
    """How often each error came that is no refusal."""
    counts: dict[str, int] = requests.error[~requests.refused.astype(bool)].value_counts().to_dict()
    return counts


# --- services --------------------------------------------------------------------------------------------------------


class Service(NamedTuple):
    """A service that runs, and where clients reach it. Its ``state`` has the operator's targets."""

    target: str
    http: str
    state: ServiceState

    def status(self) -> ServiceStatus:
        """The status with addresses and processes."""
        with Client(self.state.operator) as operator:
            return operator.status()

    @property
    def processes(self) -> list[psutil.Process]:
        """Those of the gateway and the workers, without the engines."""
        status = self.status()
        return [psutil.Process(pid) for pid in (status.pid, *(worker.pid for worker in status.workers))]

    def client(self, measure: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """What ``measure`` gives, with a client of the service."""

        async def measuring() -> T:
            async with AsyncClient(self.target) as client:
                return await measure(client)

        return asyncio.run(measuring())


@contextlib.contextmanager
def service(
    settings: Mapping[str, Any], *, http: bool = False, tokens: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Service]:
    """A service on this host with these settings (dotted keys). ``tokens`` are those that it accepts, with the limits
    of each."""
    chosen = {"gateway.port": 0, **settings}
    http_port = free_ports("127.0.0.1") if http else 0
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        if tokens:
            path = Path(folder) / "tokens.yaml"
            path.touch(mode=0o600)
            entries = [{"name": token, "sha256": digest_of(token).hex(), **tokens[token]} for token in tokens]
            path.write_text(json.dumps({"tokens": entries}))
            chosen["gateway.tokens"] = str(path)
        with Deployment(settings={**chosen, "gateway.http_port": http_port}, report=note) as deployment:
            target = str(deployment.provide({}))
            yield Service(target, f"127.0.0.1:{http_port}", ServiceState.of(str(target)))


# --- figures ---------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """The same without data frames, and with five significant digits."""
    if isinstance(value, pandas.DataFrame | pandas.Series):
        value = value.T.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return None if value != value else float(f"{value:.5g}")
    return value


def _show(figures: Mapping[str, Any]) -> None:
    """A table of each mapping, with its own mappings side by side; first one of the figures beside them."""
    plain = {name: each for name, each in figures.items() if not isinstance(each, Mapping)}
    for title, each in {"": plain, **{name: each for name, each in figures.items() if name not in plain}}.items():
        columns = each if each and all(isinstance(value, Mapping) for value in each.values()) else {title: each}
        table = frame_of(list(columns.values())).T.set_axis(list(columns), axis=1)
        if len(table):
            _out.print(f"{title}\n{table.to_string(na_rep='–')}\n", markup=False, soft_wrap=True)
