"""What `pdserve bench` sends: warm-up, one load, or a comparison of both modes."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import psutil
from pydantic import ConfigDict, ValidationError, model_validator

from experiments.load import Load, Outcome, run_load
from experiments.modes import SLO
from experiments.workloads import catalog
from experiments.workloads.arrivals import ClosedLoop, Schedule, all_at_once, ramp, random_arrivals, timed_arrivals
from experiments.workloads.conversation import Conversation, LoadTarget
from experiments.workloads.options import LoadOptions
from experiments.workloads.trace import Trace
from ops.settled import settled
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.request import Mode

BOTH = "both"
REQUESTS = 64
CONCURRENCY = 8
BOTH_MODES = (Mode.PD, Mode.COLOCATED)


def parse_percentiles(text: str) -> tuple[float, ...]:
    """``50,90,99.9`` in ascending order; `InvalidRequest` unless all are between 0 and 100."""
    try:
        numbers = sorted({float(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < 100 for number in numbers):
        raise InvalidRequest(f"percentiles: {text!r} is not a list of numbers between 0 and 100, like 50,90,99")
    return tuple(numbers)


class BenchPlan(LoadOptions):
    """What to send. ``requests`` is the number of conversations (None: with ``duration`` as many as fit, else all of a
    file that has a number of its own, else `REQUESTS`). At most one of ``concurrency`` (a closed loop), ``rate`` (per
    second, with ``burstiness``; infinite: all at once), ``ramp`` (first and last rate) and ``speed`` (times of a trace,
    divided by it) is set; without any, the times of a trace, and otherwise a closed loop."""

    model_config = ConfigDict(frozen=True)

    workload: Any

    @classmethod
    def of(cls, workload: Any, **given: Any) -> Self:
        """The plan with the options that are not None. `InvalidRequest` names the first option that is out of range or
        contradicts another."""
        try:
            return cls(workload=workload, **{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            what = first["msg"].removeprefix("Value error, ")
            raise InvalidRequest(f"{first['loc'][0]}: {what} (got {first['input']!r})") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        paces = [name for name in ("concurrency", "rate", "ramp", "speed") if getattr(self, name) is not None]
        if len(paces) > 1:
            raise InvalidRequest(f"{paces[0]}: contradicts --{paces[1]}; give one of them")
        if self.burstiness is not None and not self.ramp and self.rate in (None, math.inf):
            raise InvalidRequest("burstiness: needs a finite --rate, or --ramp")
        if self.mode not in (*Mode, BOTH):
            raise InvalidRequest(f"mode: {self.mode!r} is none of {', '.join((*Mode, BOTH))}")
        if isinstance(self.workload, Trace):
            if self.count > len(self.workload.requests):
                raise InvalidRequest(
                    f"requests: the trace has {len(self.workload.requests)}; use at most as many, or leave it out"
                )
        elif self.speed is not None:
            raise InvalidRequest("speed: needs the dataset trace, which has times")
        if self.max_concurrency is not None and not self.open:
            raise InvalidRequest("max_concurrency: bounds an open loop; give --rate with it, or --concurrency instead")
        if self.rate == math.inf and self.requests is None and self.duration is not None:
            raise InvalidRequest("requests: all at once needs a number of them; give --requests")
        _ = self.objectives, self.schedule(), parse_percentiles(self.percentiles)  # check them
        return self

    @property
    def objectives(self) -> SLO | None:
        """The SLO, if there is one."""
        return None if self.slo is None else SLO.parse(self.slo)

    @property
    def open(self) -> bool:
        """Whether conversations begin at times of their own, whatever the service does."""
        timed = isinstance(self.workload, Trace) and self.concurrency is None
        return timed or any(each is not None for each in (self.rate, self.ramp, self.speed))

    @property
    def scheduled(self) -> bool:
        """Whether each request has a time at which it is due, from which its latencies count: in an open loop, except
        one that has all requests due at once and bounds how many run. That one is a closed loop in all but name."""
        return self.open and not (self.rate == math.inf and self.max_concurrency is not None)

    @property
    def paired(self) -> bool:
        """Whether both modes are compared in pairs: one request at a time, on an otherwise idle service."""
        return self.mode == BOTH and not self.open and self.concurrency in (None, 1)

    @property
    def count(self) -> int:
        """Number of conversations, or a number that is never reached if only the duration bounds them."""
        if self.requests is not None:
            return self.requests
        if self.duration is not None and not isinstance(self.workload, Trace):
            return sys.maxsize
        return REQUESTS if self.workload.own_count is None else int(self.workload.own_count)

    @property
    def planned(self) -> int | None:
        """Most requests of a load; None if only its duration bounds them."""
        count = self.count * self.workload.most_turns * (2 if self.paired else 1)
        return count if count < sys.maxsize else None

    @property
    def loads(self) -> int:
        """How many loads are sent after each other."""
        return 2 if self.mode == BOTH and not self.paired else 1

    def schedule(self) -> Schedule:
        """The schedule of a load, from its beginning."""
        burstiness = 1.0 if self.burstiness is None else self.burstiness
        if self.paired:
            return ClosedLoop(1)
        if self.rate == math.inf:
            return all_at_once()
        if self.rate is not None:
            return random_arrivals(self.rate, self.seed, burstiness)
        if self.ramp is not None:
            first, _, last = self.ramp.partition(":")
            try:
                rates = float(first), float(last)
            except ValueError:
                raise InvalidRequest(
                    f"ramp: {self.ramp!r} is not of the form A:B, two rates per second, like 1:10"
                ) from None
            duration_s = self.duration or 2 * self.count / (sum(rates) or 1.0)
            return ramp(*rates, duration_s, self.seed, burstiness)
        if self.open:
            return timed_arrivals(self.workload.times_s, 1.0 if self.speed is None else self.speed)
        return ClosedLoop(self.concurrency or CONCURRENCY)


async def fitted(client: LoadTarget, plan: BenchPlan, status: ServiceStatus) -> BenchPlan:
    """``plan`` with a workload that fits the service (`experiments.workloads.catalog.fitted`)."""
    workload = plan.workload.first(plan.count) if isinstance(plan.workload, Trace) else plan.workload
    return plan.model_copy(update={"workload": await catalog.fitted(workload, client, status)})


async def run_bench(
    client: LoadTarget,
    plan: BenchPlan,
    status: ServiceStatus,
    on_done: Callable[[Outcome], None],
    stop: asyncio.Event,
    own: Sequence[psutil.Process] | None = None,
) -> list[tuple[str, Load, ServiceStatus]]:
    """Send what ``plan``, which has to be `fitted`, asks for. ``status`` is that of a service which has had time to
    settle. Once ``stop`` is set, running requests are cancelled. Returns the loads, each with its mode (or `BOTH`) and
    the status before it. An error of the warm-up is raised.

    With both modes on a busy service each mode has the service to itself, one after the other, with the same
    conversations at the same times, pd first. Otherwise there is a single load. With ``own``, all processes of the
    measurement, requests of pairs tell the CPU time that others used meanwhile."""

    def conversations(count: int, seed: int) -> Iterator[Conversation]:
        yield from plan.workload.conversations(count, seed, status.vocab_size)

    async def load(
        sent: Iterator[Conversation], schedule: Schedule, mode: Mode | Callable[[int], Mode], **options: Any
    ) -> Load:
        return await run_load(client, sent, schedule, mode=mode, timeout_s=plan.timeout, stop=stop, **options)

    modes = BOTH_MODES if plan.mode == BOTH else (Mode(plan.mode),)
    for mode in modes if plan.warmup else ():
        concurrency = 1 if plan.paired else plan.concurrency or CONCURRENCY
        prompts = conversations(plan.warmup, plan.seed + 1)  # not the load's random tokens
        for outcome in (await load(prompts, ClosedLoop(concurrency), mode)).outcomes:
            if outcome.error is not None:
                raise outcome.error
    bounds: Any = {"max_concurrency": plan.max_concurrency, "duration_s": plan.duration, "on_done": on_done}
    if plan.paired:
        pairs = (conversation for conversation in conversations(plan.count, plan.seed) for _ in BOTH_MODES)
        return [(BOTH, await load(pairs, plan.schedule(), interleaved, own=own, **bounds), status)]
    loads: list[tuple[str, Load, ServiceStatus]] = []
    for mode in modes:
        if loads and not stop.is_set():
            status = await settled(client)
        sent = conversations(plan.count, plan.seed)
        loads.append((mode, await load(sent, plan.schedule(), mode, **bounds), status))
    return loads


def interleaved(index: int) -> Mode:
    """The mode of conversation ``index`` of pairs: pd, colocated, colocated, pd, and so on, so that neither mode is
    always first."""
    return BOTH_MODES[(index + index // 2) % 2]
