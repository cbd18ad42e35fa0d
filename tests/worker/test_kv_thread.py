"""Hand-offs on the KV thread: nothing accesses the blocks of a hand-off after it has ended, in whichever way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import worker.kv
from contract.engine import Command, Computed, KVEvent, Progress, Release, Reserved
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import TransferConfig
from pdserve.core.errors import PdserveError, TransferError, WorkerLost
from pdserve.core.handoff import KVPeer
from pdserve.core.kv_layout import KVLayout
from tests.host_pool import HostPool
from tests.loopback import LoopbackTransport
from worker.kv import KVEnds, KVHandoff, KVThread

LAYOUT = KVLayout.uniform("model", "float32", block_size=4, num_layers=2, num_kv_heads=2, head_dim=8)


class Pool(HostPool):
    """A pool without a file to unmap."""

    closed = False

    def close(self) -> None:
        """Record the call."""
        self.closed = True


class Engine:
    """The part of an engine client that the thread needs. The test makes its KV events and reads its commands."""

    def __init__(self) -> None:
        self.told: list[Command] = []
        self.tell: Callable[[KVEvent], None] = lambda event: None
        self.closed = False

    def take_kv_events(self) -> Engine:
        """The engine is its own reader of events."""
        return self

    def follow(self, on_event: Callable[[KVEvent], None]) -> None:
        """Set the receiver of events."""
        self.tell = on_event

    def close(self) -> None:
        """Record the call."""
        self.closed = True

    def send(self, command: Command) -> None:
        """Record the command."""
        self.told.append(command)


class Handoff(KVHandoff[object]):
    """Waits for ``events`` events, then ends with ``outcome``, or raises it."""

    def __init__(self, events: int = 0, outcome: object = "done", *, bug: Exception | None = None) -> None:
        super().__init__("r", KVPeer("d", "e", ()), 0.0)
        self.seen: list[Reserved | Progress] = []
        self.running, self.at_rest = threading.Event(), threading.Event()
        self.began = False
        self._events, self._outcome, self._bug = events, outcome, bug

    def begin(self, ends: KVEnds) -> None:
        """Record the beginning."""
        self.began = True
        self._ends = ends
        self._enough = asyncio.Event()

    def on_event(self, event: Reserved | Progress) -> None:
        """Record the event, or raise an error."""
        assert self.began
        self.seen.append(event)
        if self._bug is not None:
            raise self._bug
        if len(self.seen) == self._events:
            self._enough.set()

    async def run(self) -> object:
        """Wait for the events; take some time to end when cancelled."""
        self.running.set()
        try:
            if self._events:
                await self._enough.wait()
            if isinstance(self._outcome, Exception):
                raise self._outcome
            return self._outcome
        finally:
            await asyncio.sleep(0.05)
            self._ends.command(Release(self.attempt_id))
            self.at_rest.set()


class Harness:
    """A KV thread and its engine."""

    def __init__(self) -> None:
        self.engine, self.pool = Engine(), Pool(LAYOUT, 4)
        anything: Any = self.engine
        pool: Any = self.pool
        self.kv = KVThread(
            pool,
            [LoopbackTransport(self.pool.memory)],
            TransferConfig(),
            anything,
            worker_id="w",
            epoch="e",
            clock=MonotonicClock(),
            eos_token_ids=(),
        )

    def tell(self, *events: KVEvent) -> None:
        """Send these events within one turn of the KV loop."""

        def tell() -> None:
            for event in events:
                self.engine.tell(event)

        self.kv._loop.call_soon_threadsafe(tell)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A KV thread that listens."""
    harness = Harness()
    await harness.kv.start("127.0.0.1")
    yield harness
    await harness.kv.aclose()
    assert harness.engine.closed
    assert harness.pool.closed
    assert not harness.kv._thread.runs


def progress(num_tokens: int, attempt_id: str = "r") -> Progress:
    """The event that so many tokens are computed."""
    return Progress(attempt_id, num_tokens, [])


RESERVED = Reserved("r", [1, 2], 0, 0.0)


async def come(event: threading.Event) -> None:
    """Wait for something on the KV loop."""
    assert await asyncio.to_thread(event.wait, 10)


async def test_events_come_in_order_and_the_result_goes_back(harness: Harness) -> None:
    handoff = Handoff(3)
    async with harness.kv.begin(handoff) as done:
        harness.tell(RESERVED, Computed([progress(1), progress(9, "another"), progress(2)]))
        async with asyncio.timeout(10):
            assert await done == "done"
    assert handoff.seen == [RESERVED, progress(1), progress(2)]
    assert harness.engine.told == [Release("r")]
    harness.tell(Computed([progress(3)]))  # it is over
    await asyncio.sleep(0.05)
    assert len(handoff.seen) == 3
    assert not harness.kv._handoffs


async def test_a_hand_off_begins_before_an_event_that_is_read_first(harness: Harness) -> None:
    handoff, hold = Handoff(2), threading.Event()
    harness.kv._loop.call_soon_threadsafe(hold.wait, 10)
    harness.tell(RESERVED, Computed([progress(1)]))
    async with harness.kv.begin(handoff) as done:
        hold.set()
        async with asyncio.timeout(10):
            assert await done == "done"
    assert handoff.seen == [RESERVED, progress(1)]


async def test_a_bug_is_raised_on_the_control_loop(harness: Harness) -> None:
    async with harness.kv.begin(Handoff(outcome=ZeroDivisionError("a bug"))) as done, asyncio.timeout(10):
        with pytest.raises(PdserveError, match="ZeroDivisionError: a bug"):
            await done


@pytest.mark.parametrize("begun", [True, False])
async def test_a_bug_in_event_handling_ends_a_hand_off_once(harness: Harness, begun: bool) -> None:
    """Even if the first events arrive in the turn of the loop in which it begins, and more while it ends."""
    handoff = Handoff(5, bug=ZeroDivisionError("a bug"))
    if not begun:
        hold = threading.Event()
        harness.kv._loop.call_soon_threadsafe(hold.wait, 10)
    async with harness.kv.begin(handoff) as done:
        if begun:
            await come(handoff.running)
        harness.tell(RESERVED, RESERVED)
        if not begun:
            hold.set()
        await asyncio.sleep(0.02)
        harness.tell(RESERVED)
        async with asyncio.timeout(10):
            with pytest.raises(TransferError, match="the KV hand-off of r failed: ZeroDivisionError: a bug"):
                await done
    assert handoff.at_rest.is_set()
    assert harness.engine.told == [Release("r")]
    assert not harness.kv._handoffs


async def test_a_hand_off_that_cannot_begin_fails_at_once(harness: Harness) -> None:
    handoff = Handoff()
    handoff.begin = lambda ends: 1 / 0  # type: ignore[assignment, method-assign]
    async with harness.kv.begin(handoff) as done:
        harness.tell(RESERVED)
        async with asyncio.timeout(10):
            with pytest.raises(PdserveError, match="ZeroDivisionError"):
                await done
    assert not handoff.running.is_set()
    assert not harness.kv._handoffs


async def test_closing_fails_handoffs_hand_offs(harness: Harness) -> None:
    handoff = Handoff(1)
    async with harness.kv.begin(handoff) as done:
        await come(handoff.running)
        await harness.kv.aclose()
        async with asyncio.timeout(10):
            with pytest.raises(WorkerLost, match="the engine is gone"):
                await done
    assert handoff.at_rest.is_set()
    with pytest.raises(WorkerLost):
        async with harness.kv.begin(Handoff()):
            raise AssertionError("it begins nothing")


async def test_a_request_does_not_wait_for_a_thread_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug blocks the KV loop: its hand-offs end with the incarnation."""
    harness = Harness()
    await harness.kv.start("127.0.0.1")
    monkeypatch.setattr(worker.kv, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(worker.kv, "JOIN_TIMEOUT_S", 0.1)
    handoff, hold = Handoff(1), threading.Event()
    try:
        async with asyncio.timeout(30):
            async with harness.kv.begin(handoff) as done:
                await come(handoff.running)
                harness.kv._loop.call_soon_threadsafe(hold.wait, 60)
                await harness.kv.aclose()
            with pytest.raises(WorkerLost):
                await done
    finally:
        hold.set()
        await asyncio.to_thread(harness.kv._thread._thread.join, 10)
        await asyncio.to_thread(_finish, harness.kv._loop)


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """End the tasks of a loop that was stopped."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.wait(tasks, timeout=10))
    loop.close()


async def test_a_thread_that_never_started_closes_too() -> None:
    harness = Harness()
    await harness.kv.aclose()
    assert harness.engine.closed
    assert harness.pool.closed
