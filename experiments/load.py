"""The load generator: sends conversations by a schedule and records the outcome of every request.

A closed loop sends what the service's speed allows. An open loop sends at times of its own, whatever the service does;
its `Outcome.scheduled_s` says when a request should have been sent and `Outcome.sent_s` when it was. The latencies of a
`Generation` count from the latter. Whoever judges an open loop adds `Outcome.lag_s`: otherwise time that requests
waited in the client is left out (coordinated omission). `Lag` tells how large it was."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.workloads.arrivals import ClosedLoop, Schedule
from experiments.workloads.conversation import Conversation
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.request import Prompt
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.request import Mode

LAG_LIMIT_MS = 10.0
LAG_LIMIT_OF_GAP = 0.05
TIMER_MS = 2.0
"""An event loop's timers are accurate to one or two milliseconds; no load is called behind for less."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one request: turn ``turn`` of conversation ``index``. Times are seconds since the start of the run
    on the client's monotonic clock. ``prompt_tokens`` is None if a text's request failed."""

    index: int
    turn: int
    mode: Mode
    scheduled_s: float
    sent_s: float
    ended_s: float
    prompt_tokens: int | None
    generation: Generation | None
    error: PdserveError | None = None

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
    client: AsyncClient,
    conversations: Iterable[Conversation],
    schedule: Schedule,
    *,
    mode: Mode | Callable[[int], Mode],
    max_concurrency: int | None = None,
    duration_s: float | None = None,
    timeout_s: float | None = None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
    stop: asyncio.Event | None = None,
) -> Load:
    """Send ``conversations`` until they or the times of ``schedule`` end, and wait for all answers. A failed request is
    an outcome, not an exception; it ends its conversation.

    ``mode`` is that of all requests, or a function of the conversation's index. ``max_concurrency`` bounds the requests
    of an open loop that run at a time; others wait, which counts as lag. After ``duration_s`` nothing more is sent.
    ``timeout_s`` is the deadline of each request. ``on_done`` is called with each outcome. Once ``stop`` is set,
    running requests are cancelled and the outcomes so far returned.

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
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    sender = _Sender(client, mode_of, slots, duration_s, timeout_s, on_done)
    if isinstance(schedule, ClosedLoop):
        sending = sender.closed_loop(iter(conversations), schedule.concurrency)
    else:
        sending = sender.open_loop(iter(conversations), iter(schedule))
    stopped = await _until(sending, stop or asyncio.Event())
    outcomes = sorted(sender.outcomes, key=lambda outcome: (outcome.index, outcome.turn))
    return Load(outcomes, sender.now_s(), sender.unsent, stopped)


class _Sender:
    """Sends the conversations of one load, and collects ``outcomes``."""

    def __init__(
        self,
        client: AsyncClient,
        mode_of: Callable[[int], Mode],
        slots: contextlib.AbstractAsyncContextManager[None],
        duration_s: float | None,
        timeout_s: float | None,
        on_done: Callable[[Outcome], None],
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.unsent = 0
        self._client = client
        self._mode_of = mode_of
        self._slots = slots
        self._end_s = float("inf") if duration_s is None else duration_s
        self._timeout_s = timeout_s
        self._on_done = on_done
        self._own_salt = secrets.token_hex(8)
        self._started_s = time.monotonic()

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    async def closed_loop(self, conversations: Iterator[Conversation], concurrency: int) -> None:
        """Keep ``concurrency`` conversations running; each is made before there is room for it."""
        slots = asyncio.Semaphore(concurrency)
        self._started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index, conversation in enumerate(conversations):
                await slots.acquire()
                if self.now_s() >= self._end_s:
                    return
                task = group.create_task(self._converse(index, conversation, self.now_s()))
                task.add_done_callback(lambda done: slots.release())
                await asyncio.sleep(0)  # it sends before the next conversation is made

    async def open_loop(self, conversations: Iterator[Conversation], times_s: Iterator[float]) -> None:
        """Begin the next conversation at each of ``times_s``; each is made before its time has come."""
        pairs = zip(conversations, times_s, strict=False)
        pair = next(pairs, None)
        self._started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index in itertools.count():
                if pair is None or pair[1] >= self._end_s:
                    return
                conversation, at_s = pair
                await asyncio.sleep(max(0.0, at_s - self.now_s()))
                group.create_task(self._converse(index, conversation, at_s))
                pair = next(pairs, None)

    async def _converse(self, index: int, conversation: Conversation, scheduled_s: float) -> None:
        mode = self._mode_of(index)
        salt = secrets.token_hex(8) if conversation.salt is None else f"{self._own_salt}/{mode}/{conversation.salt}"
        token_ids: list[int] = []
        text = ""
        for number, turn in enumerate(conversation.turns):
            if number:
                scheduled_s = self.now_s() + turn.pause_s
                if scheduled_s >= self._end_s:
                    return
                await asyncio.sleep(turn.pause_s)
            token_ids += turn.token_ids
            text += turn.text
            async with self._slots:
                sent_s = self.now_s()
                if sent_s >= self._end_s:
                    self.unsent += 1
                    return
                prompt = text if turn.text else token_ids
                result = await self._result(prompt, turn.output_len, mode, salt, conversation.session_id)
                ended_s = self.now_s()
            if isinstance(result, PdserveError):
                prompt_tokens = None if isinstance(prompt, str) else len(prompt)
                outcome = Outcome(index, number, mode, scheduled_s, sent_s, ended_s, prompt_tokens, None, result)
            else:
                outcome = Outcome(index, number, mode, scheduled_s, sent_s, ended_s, result.prompt_tokens, result, None)
            self.outcomes.append(outcome)
            self._on_done(outcome)
            if outcome.generation is None:
                return
            token_ids += outcome.generation.token_ids
            text += outcome.generation.text

    async def _result(
        self, prompt: Prompt, output_len: int, mode: Mode, salt: str, session_id: str
    ) -> Generation | PdserveError:
        try:
            return await self._client.generate(
                prompt,
                max_tokens=output_len,
                ignore_eos=True,
                mode=mode,
                timeout_s=self._timeout_s,
                salt=salt,
                session_id=session_id,
            ).result()
        except PdserveError as error:
            return error


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
