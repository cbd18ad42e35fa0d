"""The gateway's connection to a worker: its control stream and its clock."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator

from contract.control import (
    MAX_CONTROL_BYTES,
    TO_GATEWAY,
    Abort,
    Call,
    HandOver,
    Hello,
    Ping,
    Push,
    Receive,
    Reply,
    RequestHeartbeat,
    Run,
    SendPrefix,
    Wire,
    Work,
)
from contract.message import encode
from pdserve.core.clock import Clock, MonotonicClock, clock_id
from pdserve.core.errors import DeadlineExceeded, InvalidRequest, PdserveError, WorkerLost
from pdserve.core.handoff import KVPeer, PrefixSource
from pdserve.core.request import Request
from pdserve.core.timeline import ClockOffset
from pdserve.core.worker import OutputSink, TokenOutput, WorkerInfo
from runtime.awake_clock import wait_awake
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from worker.authentication import CONTROL, ServiceWire

log = logging.getLogger(__name__)

PING_EVERY_S = 1.0
PING_TIMEOUT_S = 5.0
"""Limit: a worker's answer to a ping. Then: its requests continue elsewhere."""
PING_WINDOW = 64
FIRST_PINGS = 8
ABORT_TIMEOUT_S = 5.0


class WorkerClient:
    """A connected worker, created by `connect`. It cannot be used again after `aclose` or the worker's death."""

    def __init__(self, info: WorkerInfo, wire: Wire, clock: Clock | None = None) -> None:
        self.info = info
        self._wire = wire
        self.clock = ClockOffset(0.0, 0.0)
        self._time = clock or MonotonicClock()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count(1)
        self._sinks: dict[str, tuple[OutputSink, bool]] = {}  # by attempt; whether it hands off its KV
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._samples: deque[ClockOffset] = deque(maxlen=PING_WINDOW)
        self._tasks: list[asyncio.Task[None]] = []
        self._lost = False
        self._closed = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        info: WorkerInfo,
        gateway_epoch: str,
        secret: ServiceSecret,
        *,
        tls: PlaneTls | None = None,
        clock: Clock | None = None,
        timeout_s: float = 5.0,
    ) -> WorkerClient:
        """Open the control stream of the gateway of this epoch, over the service's ``tls``, and measure the clock
        offset. WorkerLost or
        DeadlineExceeded if the worker does not answer within ``timeout_s``, WorkerLost if it does not know the
        service's ``secret``."""
        wire = ServiceWire(CONTROL, info.control_address, secret, MAX_CONTROL_BYTES, tls)
        return await cls.over(wire, info, gateway_epoch, clock, timeout_s)

    @classmethod
    async def over(
        cls, wire: Wire, info: WorkerInfo, gateway_epoch: str, clock: Clock | None = None, timeout_s: float = 5.0
    ) -> WorkerClient:
        """`connect` over ``wire``, which this client closes."""
        client = cls(info, wire, clock)
        client._send(encode(Hello(gateway_epoch)))
        client._tasks = [asyncio.create_task(client._talk()), asyncio.create_task(client._keep_time())]
        try:
            await client._call(Ping(client._next_id()), timeout_s)
            if not client._same_clock:
                for _ in range(FIRST_PINGS):
                    await client._ping()
        except PdserveError:
            await client.aclose()
            raise
        return client

    async def wait_closed(self) -> None:
        """Return once the control stream has ended, on either side."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """End the stream, whose requests the worker then aborts. Never raises. Further calls have no effect."""
        self._lose("the gateway closed the connection")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._wire.aclose()

    # --- WorkerHandle ------------------------------------------------------------------------------------------------

    def push(self, request: Request, peer: KVPeer, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """Prefill on this worker, and push the KV to ``peer``. Gives one token. Until `forget`, the sink also gets
        `WorkerLost` if the worker is lost."""
        self._begin(Push(request, peer, prefix_source), sink)

    def receive(self, request: Request, peer: KVPeer, sink: OutputSink, tell_ready: bool = False) -> None:
        """Receive the prompt's KV from ``peer``, and decode on this worker. Gives token 2 and the following ones."""
        self._begin(Receive(request, peer, tell_ready), sink)

    def hand_over(self, attempt_id: str, hand_off: bytes) -> None:
        """Send what prefill's output says for a request that was sent by `receive`. Never raises."""
        with contextlib.suppress(PdserveError):  # the request has its own way to learn of it
            self._send(encode(HandOver(attempt_id, hand_off)))

    def run(self, request: Request, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """Prefill and decode on this worker. Gives all tokens."""
        self._begin(Run(request, prefix_source), sink)

    def send_prefix(self, request: Request, peer: KVPeer, sink: OutputSink) -> None:
        """Send what this worker has cached of the request's tokens to ``peer``. Gives no token."""
        self._begin(SendPrefix(request, peer), sink)

    def forget(self, attempt_id: str) -> None:
        """Give a request's sink nothing more. The worker goes on."""
        self._sinks.pop(attempt_id, None)

    async def abort(self, attempt_id: str) -> None:
        """Abort a request in any state. Never raises, even if the request or the worker is gone."""
        self._sinks.pop(attempt_id, None)
        with contextlib.suppress(PdserveError):
            await self._call(Abort(self._next_id(), attempt_id), ABORT_TIMEOUT_S)

    def request_heartbeat(self) -> None:
        """Have the worker send its next heartbeat at once. Never raises."""
        with contextlib.suppress(WorkerLost):
            self._send(encode(RequestHeartbeat()))

    # --- plumbing ----------------------------------------------------------------------------------------------------

    def _begin(self, work: Work, sink: OutputSink) -> None:
        """Send a request, whose outputs then go to ``sink``."""
        attempt_id = work.request.attempt_id
        try:
            self._send(encode(work))
        except PdserveError as error:
            sink.failed(error)
        else:
            self._sinks[attempt_id] = sink, isinstance(work, Push)

    def _next_id(self) -> int:
        return next(self._call_ids)

    def _send(self, message: bytes) -> None:
        if self._lost:
            raise WorkerLost(f"worker {self.info.worker_id} is lost")
        if (size := len(message)) > MAX_CONTROL_BYTES:
            # Sent, it would break the stream and fail all other requests on this worker.
            raise InvalidRequest(
                f"request: {size} bytes are more than a control stream carries ({MAX_CONTROL_BYTES}); send a shorter "
                "prompt or fewer stop ids and biases"
            )
        self._outgoing.put_nowait(message)

    async def _call(self, call: Call, timeout_s: float) -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._send(encode(call))
        self._calls[call.call_id] = future
        try:
            if not await wait_awake(future, timeout_s):
                what = type(call).__name__
                raise DeadlineExceeded(f"worker {self.info.worker_id} did not answer {what} within {timeout_s:.1f} s")
            return future.result()
        finally:
            future.cancel()
            self._calls.pop(call.call_id, None)

    async def _talk(self) -> None:
        reason = "its control stream ended"
        try:
            async for data in await self._wire.open(self._requests()):
                message = TO_GATEWAY.decode(data)
                if isinstance(message, Reply):
                    self._on_reply(message)
                    continue
                for attempt_id, output in message.outputs:
                    self._deliver(attempt_id, output)
                for attempt_id, failure in message.failures:
                    self._fail(attempt_id, failure.error())
        except PdserveError as error:
            reason = str(error)
        except Exception as error:
            log.exception("unexpected error on the control stream of worker %s", self.info.worker_id)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._lose(reason)

    async def _requests(self) -> AsyncIterator[bytes]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    def _on_reply(self, reply: Reply) -> None:
        future = self._calls.pop(reply.call_id, None)
        if future is None or future.done():
            return
        if reply.failure is not None:
            future.set_exception(reply.failure.error())
        else:
            future.set_result(reply)

    def _deliver(self, attempt_id: str, output: TokenOutput) -> None:
        if (entry := self._sinks.get(attempt_id)) is not None:
            sink, hands_off = entry
            if output.finish_reason is not None and not hands_off:
                del self._sinks[attempt_id]
            sink.output(output)

    def _fail(self, attempt_id: str, error: PdserveError) -> None:
        if (entry := self._sinks.pop(attempt_id, None)) is not None:
            entry[0].failed(error)

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = True
        error = WorkerLost(f"worker {self.info.worker_id} is lost: {reason}")
        self._outgoing.put_nowait(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved, as the caller may have stopped waiting
        self._calls.clear()
        for attempt_id in list(self._sinks):
            self._fail(attempt_id, error)
        log.info("worker %s: %s", self.info.worker_id, reason)
        self._closed.set()

    # --- clock -------------------------------------------------------------------------------------------------------

    @property
    def _same_clock(self) -> bool:
        return bool(self.info.clock_id) and self.info.clock_id == clock_id()

    async def _keep_time(self) -> None:
        """Ping until the stream ends, to measure the clock offset and to detect a worker that hangs."""
        with contextlib.suppress(WorkerLost):
            while not self._lost:
                await asyncio.sleep(PING_EVERY_S)
                try:
                    await self._ping()
                except DeadlineExceeded:
                    self._lose(f"no answer for {PING_TIMEOUT_S:.0f} s")

    async def _ping(self) -> None:
        """Measure the clock offset as NTP does. Half the round trip bounds the error; the shortest round trip of the
        last `PING_WINDOW` counts, without those before a clock has jumped."""
        sent_s = self._time.now()
        reply = await self._call(Ping(self._next_id()), PING_TIMEOUT_S)
        arrived_s = self._time.now()
        if self._same_clock:
            return
        error_s = ((arrived_s - sent_s) - (reply.replied_s - reply.received_s)) / 2
        offset_s = ((reply.received_s - sent_s) + (reply.replied_s - arrived_s)) / 2
        if abs(offset_s - self.clock.offset_s) > error_s + self.clock.error_s:  # both cannot be right
            self._samples.clear()
        self._samples.append(ClockOffset(offset_s, error_s))
        self.clock = min(self._samples, key=lambda sample: sample.error_s)
