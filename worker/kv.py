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
from functools import partial
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from contract.engine import Command, EnginePort, KVEvent, Progress, Reserved
from kv_transfer.base import KVTransport
from kv_transfer.pool import Pool
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transfer import TransferEnded
from pdserve.core.chance import SYSTEM
from pdserve.core.clock import Clock
from pdserve.core.config import TransferConfig
from pdserve.core.errors import PdserveError, TransferError, WorkerLost, from_wire, to_wire
from pdserve.core.handoff import KVEndpoint, KVPeer, PeerLink
from runtime.threads import LoopThread

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
    """One end of the hand-off of the attempt ``attempt_id``. All methods run on the KV loop."""

    _ends: KVEnds
    _reserved: asyncio.Future[Reserved]
    """The blocks that the engine has allocated or pinned."""

    def __init__(self, attempt_id: str) -> None:
        self.attempt_id = attempt_id

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
    """The control loop's handle of a hand-off. Leaving the context ends the hand-off, and waits until nothing accesses
    its blocks. Cancellations do not shorten this wait; the last one is raised afterwards. The KV ends bound the wait,
    and it ends with the KV thread.

    ``done`` has the result, or the PdserveError that ended the hand-off. On the KV loop, ``task`` runs the hand-off,
    and ``error`` replaces the task's result.
    """

    def __init__(self, thread: KVThread, handoff: KVHandoff[T]) -> None:
        self.handoff = handoff
        self._thread = thread
        self._control = asyncio.get_running_loop()
        self.done: asyncio.Future[T] = self._control.create_future()  # cancelling its awaiter cancels it
        self.done.add_done_callback(_mark_retrieved)
        self._at_rest: asyncio.Future[None] = self._control.create_future()
        self.task: asyncio.Task[T] | None = None
        self.error: PdserveError | None = None

    async def __aenter__(self) -> RunningHandoff[T]:
        self._thread._open(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._at_rest.done():
            self._thread._end(self)
            await _outlast(self._at_rest)

    def on_end(self, outcome: T | BaseException) -> None:
        """Set the result, unless there is one. Nothing accesses the blocks any more."""
        self._thread._open_handoffs.discard(self)
        if not self._at_rest.done():
            self._at_rest.set_result(None)
        if self.done.done():
            return
        if not isinstance(outcome, BaseException):
            self.done.set_result(outcome)
        elif isinstance(outcome, PdserveError):
            self.done.set_exception(outcome)
        else:
            log.error("the KV hand-off of %s", self.handoff.attempt_id, exc_info=outcome)
            self.done.set_exception(from_wire(*to_wire(outcome)))

    def tell(self, outcome: T | BaseException) -> None:
        """Call `on_end` on the control loop."""
        if not self._control.is_closed():
            self._control.call_soon_threadsafe(self.on_end, outcome)

    def cancel(self) -> None:
        """Cancel the task, unless it is being cancelled already and may be releasing resources."""
        if self.task is not None and not self.task.cancelling():
            self.task.cancel()


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
            worker_id=worker_id,
            epoch=epoch,
            checksum=config.checksum,
            clock=clock,
            lease_s=config.lease_s,
            eos_token_ids=eos_token_ids,
            chance=chance,
        )
        self._sender = KVSender(
            pool,
            transports,
            worker_id=worker_id,
            checksum=config.checksum,
            message_bytes=config.message_bytes,
            max_inflight_bytes=config.max_inflight_bytes,
            clock=clock,
            lease_s=config.lease_s,
            connect_timeout_s=config.connect_timeout_s,
            eos_token_ids=eos_token_ids,
        )
        self._ends = KVEnds(self._sender, self._receiver, engine.send, clock)
        self._events = engine.take_kv_events()
        self._running: dict[str, RunningHandoff[Any]] = {}
        self._open_handoffs: set[RunningHandoff[Any]] = set()  # of the control loop
        self._thread = thread or LoopThread(f"kv-{worker_id}")
        self._loop = self._thread.loop

    # --- called on the control loop ----------------------------------------------------------------------------------

    async def start(self, host: str, port: int = 0) -> tuple[KVEndpoint, ...]:
        """Start the thread and listen for peers on ``host``, on consecutive ports from ``port`` (0: any free ports).
        Returns the endpoint of each transport. PeerLost if a port is taken."""
        self._thread.start()
        return await self._on_loop(self._listen(host, port))

    def begin(self, handoff: KVHandoff[T]) -> RunningHandoff[T]:
        """A context manager that runs a hand-off. The hand-off begins on entry, before any event of a request that is
        submitted to the engine afterwards."""
        return RunningHandoff(self, handoff)

    async def connect(self, peer: KVPeer) -> None:
        """Open a link to a decode worker. ConfigError, LayoutMismatch, TransferTimeout or PeerLost if that fails."""
        await self._on_loop(self._sender.connect(peer.worker_id, peer.epoch, peer.endpoints))

    @property
    def links(self) -> tuple[PeerLink, ...]:
        """The open links to decode workers."""
        return self._sender.links()

    @property
    def refused(self) -> Mapping[str, int]:
        """The number of messages that the receiver has refused, by reason."""
        return self._receiver.refused

    async def aclose(self) -> None:
        """End all hand-offs and the thread, and unmap the pool, also if the caller is cancelled meanwhile. Further
        calls have no effect."""
        if self._closed:
            return
        self._closed = True
        await _outlast(asyncio.ensure_future(self._close()))

    def _open(self, running: RunningHandoff[Any]) -> None:
        if self._closed:
            raise _gone()
        self._open_handoffs.add(running)
        self._loop.call_soon_threadsafe(self._begin_now, running)  # the request is submitted after this (see `_tell`)

    def _end(self, running: RunningHandoff[Any]) -> None:
        self._loop.call_soon_threadsafe(self._end_now, running.handoff.attempt_id)

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise _gone()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # the closing loop cancelled the work
                raise _gone() from None
            raise

    async def _close(self) -> None:
        try:
            await self._close_loop()
        finally:
            self._pool.close()
            for running in list(self._open_handoffs):  # only if the thread did not end in time
                running.on_end(_gone())

    async def _close_loop(self) -> None:
        if self._thread.runs:
            closing = asyncio.run_coroutine_threadsafe(self._close_ends(), self._loop)
            try:
                await asyncio.wait_for(asyncio.wrap_future(closing), CLOSE_TIMEOUT_S)
            except TimeoutError:
                log.error("the KV ends did not close within %.0f s; their thread is stopped", CLOSE_TIMEOUT_S)
            finally:
                await self._thread.stop(JOIN_TIMEOUT_S)
        else:
            self._events.close()
            await self._thread.stop(0.0)

    # --- on the KV loop ----------------------------------------------------------------------------------------------

    async def _listen(self, host: str, port: int) -> tuple[KVEndpoint, ...]:
        endpoints = await self._receiver.start(host, port)
        self._events.follow(self._on_event)
        return endpoints

    def _begin_now(self, running: RunningHandoff[Any]) -> None:
        attempt_id = running.handoff.attempt_id

        def ended(task: asyncio.Task[Any]) -> None:
            if self._running.get(attempt_id) is running:
                del self._running[attempt_id]
            error = running.error or (_gone() if task.cancelled() else task.exception())
            running.tell(error or task.result())

        try:
            running.handoff.begin(self._ends)
        except Exception as error:  # a bug; the request must not wait for its deadline
            log.exception("the hand-off of %s cannot begin", attempt_id)
            running.tell(from_wire(*to_wire(error)))
            return
        self._running[attempt_id] = running
        running.task = self._loop.create_task(running.handoff.run())
        running.task.add_done_callback(ended)

    def _end_now(self, attempt_id: str) -> None:
        if (running := self._running.get(attempt_id)) is not None:
            self._loop.call_soon(running.cancel)  # by then the task has begun, so that it can release its resources

    def _on_event(self, event: KVEvent) -> None:
        if isinstance(event, Reserved):
            self._tell(event)
            return
        for progress in event.progress:
            self._tell(progress)

    def _tell(self, event: Reserved | Progress, *, again: bool = False) -> None:
        """Pass an event to its hand-off. The loop may have been about to read the pipe when the hand-off began, and has
        read more than was there then: the hand-off begins in the loop's next turn, and so before what is put off."""
        running = self._running.get(event.attempt_id)
        if running is None and not again:
            self._loop.call_soon(partial(self._tell, event, again=True))
        elif running is not None and running.error is None:
            try:
                running.handoff.on_event(event)
            except TransferEnded:
                return  # the result of the hand-off has the reason
            except Exception as error:  # a bug; the hand-off must not stay open until its deadline
                log.exception("the blocks of %s cannot be handed over", event.attempt_id)
                why = f"the KV hand-off of {event.attempt_id} failed: {type(error).__name__}: {error}"
                running.error = TransferError(why)
                self._end_now(event.attempt_id)

    async def _close_ends(self) -> None:
        self._events.close()
        await self._sender.aclose()
        await self._receiver.aclose()
        await asyncio.gather(*(transport.aclose() for transport in self._transports))
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
