"""The worker's KV thread, which runs hand-offs on an event loop of its own, so that copies never delay control.

The thread exchanges events and commands with the engine directly. The control loop begins hand-offs (`KVThread.begin`)
and awaits their results. Each incarnation of the worker has its own KV thread over its own pool.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from contract.engine import Command, EnginePort, KVEvent, Progress, Reserved
from kv_transfer.base import KVTransport
from kv_transfer.memory import DeviceMemory
from kv_transfer.pool import Pool
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from pdserve.core.chance import SYSTEM
from pdserve.core.clock import Clock
from pdserve.core.config import TransferConfig
from pdserve.core.errors import PdserveError, TransferError, WorkerLost, from_wire, to_wire
from pdserve.core.handoff import KVEndpoint, KVPeer, PeerLink
from runtime.threads import LoopThread, in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 60.0
"""Longer than all timeouts of the KV ends and their transports; only a bug can exceed it."""
JOIN_TIMEOUT_S = 5.0


class KVEnds(NamedTuple):
    """The resources of a hand-off, used on the KV loop only: both KV ends of the pool, their clock, and ``command``,
    which sends a command to the engine."""

    sender: KVSender
    receiver: KVReceiver
    command: Callable[[Command], None]
    clock: Clock


class KVHandoff(ABC, Generic[T]):
    """One end of the hand-off of the attempt ``attempt_id``; the other one is at ``peer``. ``deadline_s`` is a time of
    the worker's clock. All methods run on the KV loop."""

    _ends: KVEnds
    _reserved: asyncio.Future[Reserved]
    """The blocks that the engine has allocated or pinned."""

    def __init__(self, attempt_id: str, peer: KVPeer, deadline_s: float) -> None:
        self.attempt_id, self._peer, self._deadline_s = attempt_id, peer, deadline_s

    def begin(self, ends: KVEnds) -> None:
        """Begin the hand-off. Called once, before any event."""
        self._ends, self._reserved = ends, asyncio.get_running_loop().create_future()

    def on_event(self, event: Reserved | Progress) -> None:
        """Handle an event of the engine about the request's blocks. Events come in order."""
        assert isinstance(event, Reserved), "only a pushed prompt reports progress"
        if not self._reserved.done():
            self._reserved.set_result(event)

    @abstractmethod
    async def run(self) -> T:
        """Run the hand-off, and return its result. Nothing accesses its blocks after this has ended, in whichever
        way."""


class RunningHandoff(Generic[T]):
    """A hand-off that runs on ``kv_loop``. On the control loop, it is the context in which it runs, and has its result,
    or the PdserveError that ended it. Leaving the context ends the hand-off, and waits until nothing accesses its
    blocks. Cancellations do not shorten this wait; the last one is raised afterwards. The KV ends bound the wait, and
    it ends with the KV thread."""

    def __init__(self, handoff: KVHandoff[T], kv_loop: asyncio.AbstractEventLoop) -> None:
        self._handoff, self._kv_loop, self._control = handoff, kv_loop, asyncio.get_running_loop()
        self._done: asyncio.Future[T] = self._control.create_future()  # cancelling its awaiter cancels it
        self._done.add_done_callback(_mark_retrieved)
        self.at_rest: asyncio.Future[None] = self._control.create_future()
        self._begun = False
        self._task: asyncio.Task[T] | None = None
        self._error: PdserveError | None = None  # replaces the task's result

    # --- on the control loop -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> asyncio.Future[T]:
        return self._done

    async def __aexit__(self, *error: object) -> None:
        if not self.at_rest.done():
            self._kv_loop.call_soon_threadsafe(self._end)
            await _outlast(self.at_rest)

    def on_end(self, outcome: T | BaseException) -> None:
        """Set the result, unless there is one. Nothing accesses the blocks any more."""
        if not self.at_rest.done():
            self.at_rest.set_result(None)
        if self._done.done():
            return
        if not isinstance(outcome, BaseException):
            self._done.set_result(outcome)
        elif isinstance(outcome, PdserveError):
            self._done.set_exception(outcome)
        else:
            log.error("the KV hand-off of %s", self._handoff.attempt_id, exc_info=outcome)
            self._done.set_exception(from_wire(*to_wire(outcome)))

    # --- on the KV loop ----------------------------------------------------------------------------------------------

    def begin(self, ends: KVEnds) -> None:
        """Begin the hand-off, if it has not begun."""
        if self._begun:
            return
        self._begun = True
        try:
            self._handoff.begin(ends)
        except Exception as error:  # noqa: BLE001 - a bug, which is logged; the request must not wait for its deadline
            self._tell(error)
            return
        self._task = self._kv_loop.create_task(self._handoff.run())
        self._task.add_done_callback(self._on_done)

    def on_event(self, event: Reserved | Progress) -> None:
        """Pass an event to the hand-off, unless it has ended."""
        if self._task is None or self._task.done() or self._error is not None:
            return
        try:
            self._handoff.on_event(event)
        except Exception as error:  # a bug; the hand-off must not stay open until its deadline
            log.exception("the blocks of %s cannot be handed over", event.attempt_id)
            why = f"the KV hand-off of {event.attempt_id} failed: {type(error).__name__}: {error}"
            self._error = TransferError(why)
            self._end()

    def _end(self) -> None:
        """Cancel the task in the next turn: by then it has begun, so that it can release its resources."""
        self._kv_loop.call_soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and not self._task.cancelling():  # else it may be releasing resources
            self._task.cancel()

    def _on_done(self, task: asyncio.Task[T]) -> None:
        error = self._error or (_gone() if task.cancelled() else task.exception())
        self._tell(error or task.result())

    def _tell(self, outcome: T | BaseException) -> None:
        if not self._control.is_closed():
            self._control.call_soon_threadsafe(self.on_end, outcome)


class KVThread:
    """A `KVSender` and a `KVReceiver` over one pool and the same transports (best first)."""

    def __init__(
        self,
        pool: Pool,
        transports: Sequence[KVTransport],
        config: TransferConfig,
        engine: EnginePort,
        *,
        worker_id: str,
        epoch: str,
        clock: Clock,
        eos_token_ids: Sequence[int],
        chance: random.Random = SYSTEM,
        thread: LoopThread | None = None,
    ) -> None:
        self._pool = pool
        self._transports = tuple(transports)
        self._closed = False
        self._receiver = KVReceiver(
            pool,
            transports,
            config,
            worker_id=worker_id,
            epoch=epoch,
            clock=clock,
            eos_token_ids=eos_token_ids,
            chance=chance,
        )
        self._sender = KVSender(pool, transports, config, worker_id=worker_id, clock=clock, eos_token_ids=eos_token_ids)
        self._ends = KVEnds(self._sender, self._receiver, engine.send, clock)
        self._events = engine.take_kv_events()
        self._handoffs: dict[str, RunningHandoff[Any]] = {}
        """By attempt id. The control loop writes it, the KV loop reads it."""
        self._thread = thread or LoopThread(f"kv-{worker_id}")
        self._loop = self._thread.loop

    # --- called on the control loop ----------------------------------------------------------------------------------

    async def start(self, host: str, port: int = 0) -> tuple[KVEndpoint, ...]:
        """Start the thread and listen for peers on ``host``, on consecutive ports from ``port`` (0: any free ports).
        Returns the endpoint of each transport. PeerLost if a port is taken."""
        self._thread.start()
        return await self._on_loop(self._listen(host, port))

    def begin(self, handoff: KVHandoff[T]) -> RunningHandoff[T]:
        """Begin a hand-off, and return the context in which it runs. It gets all events of a request that is submitted
        to the engine from now on."""
        if self._closed:
            raise _gone()
        running = self._handoffs[handoff.attempt_id] = RunningHandoff(handoff, self._loop)
        running.at_rest.add_done_callback(lambda _: self._handoffs.pop(handoff.attempt_id, None))
        self._loop.call_soon_threadsafe(running.begin, self._ends)
        return running

    async def connect(self, peer: KVPeer) -> None:
        """Open a link to a decode worker. ConfigError, LayoutMismatch, TransferTimeout or PeerLost if that fails."""
        await self._on_loop(self._sender.connect(peer))

    @property
    def links(self) -> tuple[PeerLink, ...]:
        """The open links to decode workers."""
        return self._sender.links()

    @property
    def refused(self) -> Mapping[str, int]:
        """The number of messages that the receiver has refused, by reason."""
        return self._receiver.refused

    async def aclose(self) -> None:
        """End all hand-offs and the thread, and unmap the pool, also if the caller is cancelled meanwhile. Called once,
        when nothing connects any more."""
        self._closed = True
        await _outlast(asyncio.ensure_future(self._close()))

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _close(self) -> None:
        try:
            if self._thread.runs:
                closing = asyncio.run_coroutine_threadsafe(self._close_ends(), self._loop)
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await asyncio.wrap_future(closing)
            else:
                self._events.close()
        except TimeoutError:
            log.error("the KV ends did not close within %.0f s; their thread is stopped", CLOSE_TIMEOUT_S)
        finally:
            try:
                await self._thread.stop(JOIN_TIMEOUT_S)
            finally:
                self._pool.close()
                for running in self._handoffs.values():  # only if the thread did not end in time
                    running.on_end(_gone())

    # --- on the KV loop ----------------------------------------------------------------------------------------------

    async def _listen(self, host: str, port: int) -> tuple[KVEndpoint, ...]:
        endpoints = await self._receiver.start(host, port)
        self._events.follow(self._on_event)
        return endpoints

    def _on_event(self, event: KVEvent) -> None:
        for each in (event,) if isinstance(event, Reserved) else event.progress:
            # A request is submitted after its hand-off is in the table. Its first event may come before the loop's turn
            # to begin the hand-off.
            if (running := self._handoffs.get(each.attempt_id)) is not None:
                running.begin(self._ends)
                running.on_event(each)

    async def _close_ends(self) -> None:
        self._events.close()
        await self._sender.aclose()
        await self._receiver.aclose()
        await asyncio.gather(*(transport.aclose() for transport in self._transports))
        if isinstance(self._pool.memory, DeviceMemory):  # under MPS, an end in the middle of work disturbs others
            await in_thread("kv-synchronize", self._pool.memory.synchronize)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            if not task.cancelling():  # else it is releasing resources
                task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _gone() -> WorkerLost:
    return WorkerLost("the engine is gone, and its KV ends with it")


async def _outlast(future: asyncio.Future[T]) -> T:
    """Wait for ``future``, however often the caller is cancelled meanwhile. The last cancellation is raised when it is
    done."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()


def _mark_retrieved(done: asyncio.Future[Any]) -> None:
    """Mark the error as retrieved, because a request that has all its tokens does not await the result."""
    if not done.cancelled():
        done.exception()
