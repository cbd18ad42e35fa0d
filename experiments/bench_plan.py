"""What `pdserve bench` sends: warm-up, one load, or a comparison of both modes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from experiments.load import Load, Outcome, run_load
from experiments.modes import SLO
from experiments.workloads import catalog
from experiments.workloads.arrivals import (
    ClosedLoop,
    Schedule,
    all_at_once,
    check_burstiness,
    check_rate,
    ramp,
    random_arrivals,
    timed_arrivals,
)
from experiments.workloads.conversation import Conversation, Workload
from experiments.workloads.trace import Trace
from ops.settled import settled
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.request import Mode

PERCENTILES = (50.0, 90.0, 99.0)
BOTH = "both"
REQUESTS = 64
CONCURRENCY = 8
BOTH_MODES = (Mode.PD, Mode.COLOCATED)


@dataclass(frozen=True, slots=True)
class Pace:
    """When conversations begin. At most one of ``concurrency`` (a closed loop), ``rate`` (per second, with
    ``burstiness``; infinite: all at once), ``ramp`` (first and last rate) and ``speed`` (times of a trace, divided by
    it) is set; without any, the times of a trace, and otherwise a closed loop."""

    concurrency: int | None = None
    rate: float | None = None
    ramp: tuple[float, float] | None = None
    speed: float | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first option that is out of range or contradicts another."""
        given = [name for name in ("concurrency", "rate", "ramp", "speed") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{given[0]}: contradicts --{given[1]}; give one of them")
        if self.concurrency is not None:
            ClosedLoop(self.concurrency)  # checks it
        if self.rate is not None and self.rate != float("inf"):
            check_rate("rate", self.rate)
        if self.ramp is not None:
            ramp(*self.ramp, 1.0, 0)  # checks it
        if self.burstiness is not None:
            if self.ramp is None and self.rate in (None, float("inf")):
                raise InvalidRequest("burstiness: needs a finite --rate, or --ramp")
            check_burstiness(self.burstiness)
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise InvalidRequest(f"max_concurrency: {self.max_concurrency} is below 1")

    @property
    def open(self) -> bool:
        """Whether conversations begin at times of their own, whatever the service does."""
        return any(option is not None for option in (self.rate, self.ramp, self.speed))


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to send. ``requests`` is the number of conversations (None: with ``duration_s`` as many as fit, else all of
    a file that has a number of its own, else `REQUESTS`). ``mode`` is auto, pd, colocated, or `BOTH`."""

    workload: Workload
    pace: Pace
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    seed: int = 0
    mode: str = Mode.AUTO
    timeout_s: float | None = None
    slo: SLO | None = None
    percentiles: tuple[float, ...] = PERCENTILES

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first option that is out of range or contradicts another."""
        self.pace.validate()
        if self.requests is not None and self.requests < 1:
            raise InvalidRequest(f"requests: {self.requests} is below 1")
        for name, value in (("duration", self.duration_s), ("timeout", self.timeout_s)):
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequest(f"{name}: {value} is not a positive number of seconds")
        if self.warmup < 0:
            raise InvalidRequest(f"warmup: {self.warmup} is below 0")
        if self.mode not in (*Mode, BOTH):
            raise InvalidRequest(f"mode: {self.mode!r} is none of {', '.join((*Mode, BOTH))}")
        if isinstance(self.workload, Trace):
            if self.requests is not None and self.requests > len(self.workload.requests):
                raise InvalidRequest(
                    f"requests: the trace has {len(self.workload.requests)}; use at most as many, or leave it out"
                )
        elif self.pace.speed is not None:
            raise InvalidRequest("speed: needs the dataset trace, which has times")
        if self.pace.max_concurrency is not None and not self.open:
            raise InvalidRequest("max_concurrency: bounds an open loop; give --rate with it, or --concurrency instead")
        if self.pace.rate == float("inf") and self.requests is None and self.duration_s is not None:
            raise InvalidRequest("requests: all at once needs a number of them; give --requests")

    @property
    def open(self) -> bool:
        """Whether conversations begin at times of their own."""
        return self.pace.open or (isinstance(self.workload, Trace) and self.pace.concurrency is None)

    @property
    def scheduled(self) -> bool:
        """Whether each request has a time at which it is due, from which its latencies count: in an open loop, except
        one that has all requests due at once and bounds how many run. That one is a closed loop in all but name."""
        return self.open and not (self.pace.rate == float("inf") and self.pace.max_concurrency is not None)

    @property
    def paired(self) -> bool:
        """Whether both modes are compared in pairs: one request at a time, on an otherwise idle service."""
        return self.mode == BOTH and not self.open and self.pace.concurrency in (None, 1)

    @property
    def count(self) -> int:
        """Number of conversations, or a number that is never reached if only the duration bounds them."""
        if self.requests is not None:
            return self.requests
        if self.duration_s is not None and not isinstance(self.workload, Trace):
            return sys.maxsize
        return REQUESTS if self.workload.own_count is None else self.workload.own_count

    @property
    def planned(self) -> int | None:
        """Most requests of a load; None if only its duration bounds them."""
        count = self.count * self.workload.most_turns * (2 if self.paired else 1)
        return count if self.count < sys.maxsize else None

    @property
    def loads(self) -> int:
        """How many loads are sent after each other."""
        return 2 if self.mode == BOTH and not self.paired else 1

    def schedule(self) -> Schedule:
        """The schedule of a load, from its beginning."""
        pace = self.pace
        if self.paired:
            return ClosedLoop(1)
        if pace.rate == float("inf"):
            return all_at_once()
        burstiness = 1.0 if pace.burstiness is None else pace.burstiness
        if pace.rate is not None:
            return random_arrivals(pace.rate, self.seed, burstiness)
        if pace.ramp is not None:
            duration_s = self.duration_s or 2 * self.count / sum(pace.ramp)
            return ramp(*pace.ramp, duration_s, self.seed, burstiness)
        if self.open and isinstance(self.workload, Trace):
            return timed_arrivals(self.workload.times_s, 1.0 if pace.speed is None else pace.speed)
        return ClosedLoop(CONCURRENCY if pace.concurrency is None else pace.concurrency)


async def fitted(client: AsyncClient, plan: BenchPlan, status: ServiceStatus) -> BenchPlan:
    """``plan`` with a workload that fits the service (`experiments.workloads.catalog.fitted`)."""
    workload = plan.workload.first(plan.count) if isinstance(plan.workload, Trace) else plan.workload
    return replace(plan, workload=await catalog.fitted(workload, client, status))


async def run_bench(
    client: AsyncClient,
    plan: BenchPlan,
    status: ServiceStatus,
    on_done: Callable[[Outcome], None],
    stop: asyncio.Event,
) -> list[tuple[str, Load, ServiceStatus]]:
    """Send what ``plan``, which has to be `fitted`, asks for. ``status`` is that of a service which has had time to
    settle. Once ``stop`` is set, running requests are cancelled. Returns the loads, each with its mode (or `BOTH`) and
    the status before it. An error of the warm-up is raised.

    With both modes on a busy service each mode has the service to itself, one after the other, with the same
    conversations at the same times, pd first. Otherwise there is a single load."""
    vocab_size = status.vocab_size

    async def load(conversations: Iterator[Conversation], mode: Mode | Callable[[int], Mode]) -> Load:
        return await run_load(
            client,
            conversations,
            plan.schedule(),
            mode=mode,
            max_concurrency=plan.pace.max_concurrency,
            duration_s=plan.duration_s,
            timeout_s=plan.timeout_s,
            on_done=on_done,
            stop=stop,
        )

    def conversations() -> Iterator[Conversation]:
        return plan.workload.conversations(plan.count, plan.seed, vocab_size)

    modes = BOTH_MODES if plan.mode == BOTH else (Mode(plan.mode),)
    for mode in modes if plan.warmup else ():
        await _warm_up(client, plan, mode, vocab_size, stop)
    if plan.paired:
        pairs = (conversation for conversation in conversations() for _ in BOTH_MODES)
        return [(BOTH, await load(pairs, interleaved), status)]
    loads: list[tuple[str, Load, ServiceStatus]] = []
    for mode in modes:
        if loads and not stop.is_set():
            status = await settled(client)
        loads.append((mode, await load(conversations(), mode), status))
    return loads


def interleaved(index: int) -> Mode:
    """The mode of conversation ``index`` of pairs: pd, colocated, colocated, pd, and so on, so that neither mode is
    always first."""
    return BOTH_MODES[(index + index // 2) % 2]


async def _warm_up(client: AsyncClient, plan: BenchPlan, mode: Mode, vocab_size: int, stop: asyncio.Event) -> None:
    """Send ``plan.warmup`` conversations in ``mode`` that no report counts; raise the first error."""
    concurrency = 1 if plan.paired else plan.pace.concurrency or CONCURRENCY
    conversations = plan.workload.conversations(plan.warmup, plan.seed + 1, vocab_size)  # not the load's random tokens
    load = await run_load(
        client, conversations, ClosedLoop(concurrency), mode=mode, timeout_s=plan.timeout_s, stop=stop
    )
    for outcome in load.outcomes:
        if outcome.error is not None:
            raise outcome.error
