"""What all benchmarks share: options, services, loads, rounds, tables, and the last line.

`python -m experiments.benchmarks.NAME` calls `run` with a function that returns its figures: mappings, or mappings of
mappings, with numbers at the end. They are printed as tables, and as JSON on the last line. What happens meanwhile goes
to standard error."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import psutil
import typer
from rich.console import Console
from rich.progress import track

from experiments.deployment import Deployment
from experiments.load import Outcome, run_load
from experiments.report.drawing import frame_of
from experiments.workloads.arrivals import Schedule
from experiments.workloads.conversation import Conversation
from gateway.token_file import digest_of
from ops.launch.ports import free_port
from ops.launch.state import ServiceState, port_of
from pdserve import AsyncClient, Client
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import CapacityExceeded, PdserveError

Quick = Annotated[bool, typer.Option("--quick", help="smallest sizes, shortest windows: does it run?")]
"""The option of every benchmark that `make` names. Such a run has all figures, and they mean nothing."""
Only = Annotated[str, typer.Option("--only", help="these parts, separated by commas")]
T = TypeVar("T")
V = TypeVar("V")
_out = Console(highlight=False)
_progress = Console(stderr=True, highlight=False)


def run(measure: Callable[..., Mapping[str, Any]]) -> None:
    """The program of a benchmark. The parameters of ``measure`` are its options."""

    @functools.wraps(measure)
    def program(**options: Any) -> None:
        figures = _rounded(measure(**options))
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


def measured(arms: Iterable[T], measure: Callable[[T], V], rounds: int, warm_up: int = 0) -> dict[T, list[V]]:
    """What ``measure`` gives for each arm in every round that counts, `in_turns`."""
    found: dict[T, list[V]] = {arm: [] for arm in arms}
    for number, arm in in_turns(found, rounds, warm_up):
        value = measure(arm)
        if number >= 0:
            found[arm].append(value)
    return found


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """The CPU time of the processes so far."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


@contextlib.asynccontextmanager
async def memory_of(process: psutil.Process, every_s: float) -> AsyncIterator[list[int]]:
    """The resident bytes of a process, taken again and again: now, meanwhile, and at the end."""
    found = [process.memory_info().rss]

    async def sample() -> None:
        while True:
            await asyncio.sleep(every_s)
            found.append(process.memory_info().rss)

    sampling = asyncio.create_task(sample())
    try:
        yield found
    finally:
        sampling.cancel()
        found.append(process.memory_info().rss)


async def loads(
    clients: Sequence[AsyncClient],
    schedules: Iterable[Schedule],
    requests: Callable[[int], Iterable[Conversation]],
    **options: Any,
) -> list[Outcome]:
    """What came of the loads of several clients at once, each by its own schedule and with its own ``requests``, given
    its number. ``options`` are those of `run_load`."""
    sending = (
        run_load(client, requests(number), schedule, **options)
        for number, (client, schedule) in enumerate(zip(clients, schedules, strict=True))
    )
    return [outcome for load in await asyncio.gather(*sending) for outcome in load.outcomes]


@dataclass(frozen=True)
class Window:
    """What became of the requests of ``seconds``: milliseconds to the first token of answers, and until refusals came;
    how many answers were complete ``within`` the window; and other errors."""

    seconds: float
    first_ms: list[float]
    refused_ms: list[float]
    within: int
    errors: Counter[str]

    @classmethod
    def of(cls, seconds: float, outcomes: Sequence[Outcome]) -> Window:
        """Of requests that were sent in ``seconds``."""
        answered = [(each.ended_s, each.generation.ttft_ms) for each in outcomes if each.generation is not None]
        return cls(
            seconds,
            [ttft_ms for _, ttft_ms in answered],
            [(each.ended_s - each.sent_s) * 1e3 for each in outcomes if _is_refused(each.error)],
            sum(ended_s <= seconds for ended_s, _ in answered),
            Counter(
                f"{type(each.error).__name__}: {each.error}"
                for each in outcomes
                if each.error is not None and not _is_refused(each.error)
            ),
        )

    @property
    def sent(self) -> int:
        """All requests."""
        return len(self.first_ms) + len(self.refused_ms) + self.errors.total()

    @property
    def goodput(self) -> float:
        """Answers per second that were complete within the window: what waits at its end is no throughput."""
        return self.within / self.seconds


def _is_refused(error: PdserveError | None) -> bool:
    """Whether the request may come again."""
    return isinstance(error, CapacityExceeded) and error.retry_after_s is not None


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
    def gateway(self) -> psutil.Process:
        """The gateway's process."""
        return psutil.Process(self.status().pid)

    @property
    def processes(self) -> list[psutil.Process]:
        """Those of the gateway and the workers, without the engines."""
        status = self.status()
        return [psutil.Process(pid) for pid in (status.pid, *(worker.pid for worker in status.workers))]


@contextlib.contextmanager
def service(
    settings: Mapping[str, Any], *, http: bool = False, tokens: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Service]:
    """A service on this host with these settings (dotted keys). ``tokens`` are those that it accepts, with the limits
    of each."""
    chosen = {"gateway.port": 0, **settings}
    http_port = free_port("127.0.0.1", 0) if http else 0
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        if tokens:
            path = Path(folder) / "tokens.yaml"
            path.touch(mode=0o600)
            entries = [{"name": token, "sha256": digest_of(token).hex(), **tokens[token]} for token in tokens]
            path.write_text(json.dumps({"tokens": entries}))
            chosen["gateway.tokens"] = str(path)
        with Deployment(settings={**chosen, "gateway.http_port": http_port}, report=note) as deployment:
            target = str(deployment.provide({}))
            yield Service(target, f"127.0.0.1:{http_port}", ServiceState.read(port_of(target)))


# --- figures ---------------------------------------------------------------------------------------------------------


def _rounded(value: Any) -> Any:
    """The same with five significant digits."""
    if isinstance(value, Mapping):
        return {str(name): _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _show(figures: Mapping[str, Any]) -> None:
    """A table of each mapping, with its own mappings side by side; first one of the figures beside them."""
    plain = {name: each for name, each in figures.items() if not isinstance(each, Mapping)}
    for title, each in {"": plain, **{name: each for name, each in figures.items() if name not in plain}}.items():
        columns = each if each and all(isinstance(value, Mapping) for value in each.values()) else {title: each}
        table = frame_of(list(columns.values())).T.set_axis(list(columns), axis=1)
        if len(table):
            _out.print(f"{title}\n{table.to_string(na_rep='–')}\n", markup=False, soft_wrap=True)
