"""The load generator: sends conversations by a schedule and records the outcome of every request.

A closed loop sends what the service's speed allows. An open loop sends at times of its own, whatever the service does;
its `Outcome.scheduled_s` says when a request should have been sent and `Outcome.sent_s` when it was. The latencies of a
`Generation` count from the latter. Whoever judges an open loop adds `Outcome.lag_s`: otherwise time that requests
waited in the client is left out (coordinated omission). `Lag` tells how large it was."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from experiments.workloads.arrivals import ClosedLoop, Schedule
from experiments.workloads.conversation import Conversation, LoadTarget
from ops.machine_load import CpuUse
from pdserve.client.generation import Generation
from pdserve.client.request import Prompt
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.request import Mode

_Slots = contextlib.AbstractAsyncContextManager[None]

LAG_LIMIT_MS = 10.0
LAG_LIMIT_OF_GAP = 0.05
TIMER_MS = 2.0
"""An event loop's timers are accurate to one or two milliseconds; no load is called behind for less."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one request: turn ``turn`` of conversation ``index``. Times are seconds since the start of the run
    on the client's monotonic clock. ``prompt_tokens`` is None if a text's request failed. ``others_cpu_s`` are the CPU
    seconds that processes which are not the measurement's used on this host meanwhile, if that is known."""

    index: int
    turn: int
    mode: Mode
    scheduled_s: float
    sent_s: float
    ended_s: float
    prompt_tokens: int | None
    generation: Generation | None
    error: PdserveError | None = None
    others_cpu_s: float | None = None

    @property
    def lag_s(self) -> float:
        """How much later than scheduled the request was sent."""
        return self.sent_s - self.scheduled_s


@dataclass(frozen=True, slots=True)
class Lag:
    """How much later than scheduled requests were sent. ``behind``: the 99th percentile is above `LAG_LIMIT_MS`, or
    above `LAG_LIMIT_OF_GAP` of the mean gap between requests (but at least `TIMER_MS`), so that the load was not the
    one that was asked for."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    behind: bool

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Lag | None:
        """The lag of ``outcomes``; None if there are none."""
        return cls.between([each.scheduled_s for each in outcomes], [each.sent_s for each in outcomes])

    @classmethod
    def between(cls, scheduled_s: Sequence[float], sent_s: Sequence[float]) -> Lag | None:
        """The lag of requests of one load, given when each was due and when it was sent; None without requests."""
        if not scheduled_s:
            return None
        lags_ms = [(sent - due) * 1e3 for due, sent in zip(scheduled_s, sent_s, strict=True)]
        p50_ms, p99_ms = (float(value) for value in np.percentile(lags_ms, (50, 99)))
        gaps = max(1, len(scheduled_s) - 1)
        gap_ms = (max(scheduled_s) - min(scheduled_s)) * 1e3 / gaps
        limit_ms = min(LAG_LIMIT_MS, max(TIMER_MS, LAG_LIMIT_OF_GAP * gap_ms))
        return cls(p50_ms, p99_ms, max(lags_ms), p99_ms > limit_ms)


@dataclass(frozen=True, slots=True)
class Load:
    """A finished load: outcomes in order of conversation and turn, and the seconds from start to end. ``unsent`` counts
    requests that were due, but still waited when ``duration_s`` was over: for ``max_concurrency``, or because the load
    generator was late. ``stopped``: it was stopped before its end."""

    outcomes: Sequence[Outcome]
    duration_s: float
    unsent: int = 0
    stopped: bool = False

    @property
    def lag(self) -> Lag | None:
        """How much later than scheduled requests were sent; None without outcomes."""
        return Lag.of(self.outcomes)


async def run_load(
    client: LoadTarget,
    conversations: Iterable[Conversation],
    schedule: Schedule,
    *,
    mode: Mode | Callable[[int], Mode],
    max_concurrency: int | None = None,
    duration_s: float | None = None,
    timeout_s: float | None = None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
    stop: asyncio.Event | None = None,
    own: Sequence[psutil.Process] | None = None,
) -> Load:
    """Send ``conversations`` until they or the times of ``schedule`` end, and wait for all answers. A failed request is
    an outcome, not an exception; it ends its conversation.

    ``mode`` is that of all requests, or a function of the conversation's index. ``max_concurrency`` bounds the requests
    of an open loop that run at a time; others wait, which counts as lag. After ``duration_s`` nothing more is sent.
    ``timeout_s`` is the deadline of each request. ``on_done`` is called with each outcome. Once ``stop`` is set,
    running requests are cancelled and the outcomes so far returned. With ``own``, all processes of the measurement,
    outcomes tell what others used.

    Salts that conversations share are made unique to this load and to the mode: each load, and each mode, begins with a
    cold prefix cache. Raises `InvalidRequest` naming the option that is out of range, and `NotReady` if the service
    does not answer."""
    for name, value in (("duration", duration_s), ("timeout", timeout_s)):
        if value is not None and not 0 < value < float("inf"):
            raise InvalidRequest(f"{name}: {value} is not a positive number of seconds")
    if max_concurrency is not None and max_concurrency < 1:
        raise InvalidRequest(f"max_concurrency: {max_concurrency} is below 1")
    if max_concurrency is not None and isinstance(schedule, ClosedLoop):
        raise InvalidRequest("max_concurrency: a closed loop is bounded by its concurrency; give a rate with it")
    await client.connect()
    mode_of = mode if callable(mode) else lambda index: mode
    own_salt, end_s = secrets.token_hex(8), float("inf") if duration_s is None else duration_s
    outcomes: list[Outcome] = []
    unsent, started_s = 0, time.monotonic()

    def now_s() -> float:
        return time.monotonic() - started_s

    async def converse(index: int, conversation: Conversation, due_s: float, slots: _Slots) -> None:
        nonlocal unsent
        of = mode_of(index)
        salt = secrets.token_hex(8) if conversation.salt is None else f"{own_salt}/{of}/{conversation.salt}"
        token_ids: list[int] = []
        text = ""
        for number, turn in enumerate(conversation.turns):
            if number:
                due_s = now_s() + turn.pause_s
                if due_s >= end_s:
                    return
                await asyncio.sleep(turn.pause_s)
            token_ids += turn.token_ids
            text += turn.text
            prompt: Prompt = text if turn.text else token_ids
            generation, error, others_cpu_s = None, None, None
            async with slots:
                before = None if own is None else CpuUse.now(own)
                sent_s = now_s()
                if sent_s >= end_s:
                    unsent += 1
                    return
                try:
                    generation = await client.generate(
                        prompt, max_tokens=turn.output_len, ignore_eos=True, mode=of, timeout_s=timeout_s, salt=salt,
                        session_id=conversation.session_id,
                    ).result()  # fmt: skip
                except PdserveError as failure:
                    error = failure
                ended_s = now_s()
                if own is not None and before is not None:
                    others_cpu_s = round(CpuUse.now(own).others_s(before), 3)
            known = None if isinstance(prompt, str) else len(prompt)
            tokens = known if generation is None else generation.prompt_tokens
            times_s = due_s, sent_s, ended_s
            outcomes.append(Outcome(index, number, of, *times_s, tokens, generation, error, others_cpu_s))
            on_done(outcomes[-1])
            if generation is None:
                return
            token_ids += generation.token_ids
            text += generation.text

    async def send() -> None:
        nonlocal started_s
        sent = enumerate(conversations)
        async with asyncio.TaskGroup() as group:
            if isinstance(schedule, ClosedLoop):  # each conversation is made before there is room for it
                slots = asyncio.Semaphore(schedule.concurrency)
                started_s = time.monotonic()
                for index, conversation in sent:
                    await slots.acquire()
                    if now_s() >= end_s:
                        return
                    task = group.create_task(converse(index, conversation, now_s(), contextlib.nullcontext()))
                    task.add_done_callback(lambda done: slots.release())
                    await asyncio.sleep(0)  # it sends before the next conversation is made
                return
            bound = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
            pairs = zip(sent, schedule, strict=False)
            pair = next(pairs, None)
            started_s = time.monotonic()
            while pair is not None and pair[1] < end_s:
                (index, conversation), at_s = pair
                await asyncio.sleep(max(0.0, at_s - now_s()))
                group.create_task(converse(index, conversation, at_s, bound))
                pair = next(pairs, None)  # made before its time has come

    stopped = await _until(send(), stop or asyncio.Event())
    return Load(sorted(outcomes, key=lambda each: (each.index, each.turn)), now_s(), unsent, stopped)


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Run ``work`` until it ends or ``stop`` is set, which cancels it. Whether it was cancelled. Of errors in tasks of
    ``work`` the first one is raised."""
    tasks = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = tasks[0].done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if ended:
        try:
            tasks[0].result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
    return not ended
