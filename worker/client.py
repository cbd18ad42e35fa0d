"""The gateway's side of a worker: owns the stubs and the control stream, satisfies `router.handles.WorkerHandle`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence

import grpc

from pdserve.core.awake_clock import wait_awake
from pdserve.core.clock import Clock, MonotonicClock, clock_id
from pdserve.core.errors import DeadlineExceeded, InvalidRequest, PdserveError, WorkerLost
from pdserve.core.handoff import KVDestination, KVEndpoint
from pdserve.core.timeline import ClockOffset
from pdserve.core.worker import TokenOutput, Work, WorkerInfo
from pdserve.pb import worker_pb2 as pb
from pdserve.pb import worker_pb2_grpc
from worker.options import CONTROL_OPTIONS, MAX_CONTROL_BYTES
from worker.wire import (
    destination_from_proto,
    destination_to_proto,
    endpoints_to_proto,
    error_from_proto,
    output_from_proto,
    work_to_proto,
)

log = logging.getLogger(__name__)

PING_EVERY_S = 1.0
PING_TIMEOUT_S = 5.0
PING_WINDOW = 64
FIRST_PINGS = 8
ABORT_TIMEOUT_S = 5.0
Item = TokenOutput | PdserveError


class WorkerClient:
    """A connected worker. Made by `connect`; `aclose` (or the worker's death) ends it for good."""

    def __init__(self, info: WorkerInfo, *, clock: Clock | None = None) -> None:
        self.info = info
        self.clock = ClockOffset(0.0, 0.0)
        self._time = clock or MonotonicClock()
        self._channel: grpc.aio.Channel = grpc.aio.insecure_channel(info.control_address, options=CONTROL_OPTIONS)
        self._calls: dict[int, asyncio.Future[pb.Reply]] = {}
        self._call_ids = itertools.count(1)
        self._queues: dict[str, asyncio.Queue[Item]] = {}
        self._outgoing: asyncio.Queue[pb.ControlRequest | None] = asyncio.Queue()
        self._samples: deque[ClockOffset] = deque(maxlen=PING_WINDOW)
        self._tasks: list[asyncio.Task[None]] = []
        self._lost = False
        self._closed = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        info: WorkerInfo,
        *,
        clock: Clock | None = None,
        timeout_s: float = 5.0,
    ) -> WorkerClient:
        """Open the control stream and measure the clock; WorkerLost or DeadlineExceeded if the worker does not answer
        within ``timeout_s``."""
        client = cls(info, clock=clock)
        client._tasks = [asyncio.create_task(client._talk()), asyncio.create_task(client._keep_time())]
        try:
            await client._call(pb.ControlRequest(ping=pb.Ping()), timeout_s)
            if not client._same_clock:
                for _ in range(FIRST_PINGS):
                    await client._ping()
        except PdserveError:
            await client.aclose()
            raise
        return client

    async def wait_closed(self) -> None:
        """Return once the control stream has ended, whoever ended it."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """End the stream; the worker aborts what came over it. Never raises; closing twice is fine."""
        self._lose("the gateway closed the connection")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    # --- WorkerHandle ------------------------------------------------------------------------------------------------

    async def connect_peer(self, worker_id: str, epoch: str, endpoints: Sequence[KVEndpoint]) -> None:
        """Have this (prefill) worker shake hands with a decode worker."""
        peer = pb.ConnectPeer(worker_id=worker_id, epoch=epoch, endpoints=endpoints_to_proto(endpoints))
        await self._call(pb.ControlRequest(connect_peer=peer), 30.0)

    async def reserve(self, work: Work) -> KVDestination:
        """Make room for the prompt's KV; waits while the worker is full, at most ``work.timeout_s``."""
        self._open(work.request_id)
        try:
            reply = await self._call(pb.ControlRequest(reserve=work_to_proto(work)), work.timeout_s)
        except BaseException:
            self._queues.pop(work.request_id, None)
            raise
        return destination_from_proto(reply.destination)

    async def decode(self, request_id: str) -> AsyncIterator[TokenOutput]:
        """The outputs of a reserved request, from token 2."""
        async for output in self._outputs(request_id):
            yield output

    async def prefill(self, work: Work, destination: KVDestination | None) -> AsyncIterator[TokenOutput]:
        """Run the prompt here, push its blocks, give one token."""
        self._open(work.request_id)
        message = pb.Prefill(submit=work_to_proto(work))
        if destination is not None:
            message.destination.CopyFrom(destination_to_proto(destination))
        self._start(pb.ControlRequest(prefill=message), work.request_id)
        try:
            async for output in self._outputs(work.request_id):
                yield output
                if output.token_id is not None:
                    return
        finally:
            self._queues.pop(work.request_id, None)

    async def run(self, work: Work) -> AsyncIterator[TokenOutput]:
        """Prefill and decode here."""
        self._open(work.request_id)
        self._start(pb.ControlRequest(run=work_to_proto(work)), work.request_id)
        async for output in self._outputs(work.request_id):
            yield output

    async def abort(self, request_id: str) -> None:
        """Drop the request in whatever state it is in; never raises for one that is gone or a worker that is."""
        self._queues.pop(request_id, None)
        with contextlib.suppress(PdserveError):
            await self._call(pb.ControlRequest(abort=pb.Abort(request_id=request_id)), ABORT_TIMEOUT_S)

    # --- plumbing ----------------------------------------------------------------------------------------------------

    def _open(self, request_id: str) -> None:
        self._queues[request_id] = asyncio.Queue()

    async def _outputs(self, request_id: str) -> AsyncIterator[TokenOutput]:
        queue = self._queues.get(request_id)
        if queue is None:
            raise WorkerLost(f"worker {self.info.worker_id} knows nothing of request {request_id}")
        try:
            while True:
                item = await queue.get()
                if isinstance(item, PdserveError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            if self._queues.get(request_id) is queue:
                del self._queues[request_id]

    def _start(self, request: pb.ControlRequest, request_id: str) -> None:
        """Send a call whose answer matters only if it is an error: that goes into the request's queue."""
        future = self._send(request)

        def answered(done: asyncio.Future[pb.Reply]) -> None:
            queue = self._queues.get(request_id)
            if done.cancelled() or queue is None:
                return
            error = done.exception()
            if isinstance(error, PdserveError):
                queue.put_nowait(error)

        future.add_done_callback(answered)

    def _send(self, request: pb.ControlRequest) -> asyncio.Future[pb.Reply]:
        future: asyncio.Future[pb.Reply] = asyncio.get_running_loop().create_future()
        if self._lost:
            future.set_exception(WorkerLost(f"worker {self.info.worker_id} is lost"))
            return future
        request.call_id = next(self._call_ids)
        if (size := request.ByteSize()) > MAX_CONTROL_BYTES:
            # Queued, it would break the stream, and with it all other requests of this worker.
            future.set_exception(
                InvalidRequest(
                    f"request: {size} bytes are more than a control stream carries ({MAX_CONTROL_BYTES}); send a "
                    "shorter prompt or fewer stop ids and biases"
                )
            )
            return future
        self._calls[request.call_id] = future
        self._outgoing.put_nowait(request)
        return future

    async def _call(self, request: pb.ControlRequest, timeout_s: float) -> pb.Reply:
        future = self._send(request)
        try:
            if not await wait_awake(future, timeout_s):
                call = request.WhichOneof("call")
                raise DeadlineExceeded(f"worker {self.info.worker_id} did not answer {call} within {timeout_s:.1f} s")
            return future.result()
        finally:
            future.cancel()
            self._calls.pop(request.call_id, None)

    async def _talk(self) -> None:
        reason = "its control stream ended"
        try:
            stub: worker_pb2_grpc.WorkerControlAsyncStub = worker_pb2_grpc.WorkerControlStub(self._channel)  # type: ignore[assignment]
            stream = stub.Control(self._requests())
            async for response in stream:
                if response.WhichOneof("message") == "outputs":
                    for output in response.outputs.outputs:
                        self._deliver(output)
                else:
                    self._on_reply(response.reply)
        except grpc.aio.AioRpcError as error:
            reason = error.details() or str(error.code())
        except Exception as error:
            log.exception("unreadable message from worker %s", self.info.worker_id)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._lose(reason)

    async def _requests(self) -> AsyncIterator[pb.ControlRequest]:
        while (request := await self._outgoing.get()) is not None:
            yield request

    def _on_reply(self, reply: pb.Reply) -> None:
        future = self._calls.pop(reply.call_id, None)
        if future is None or future.done():
            return
        if reply.HasField("error"):
            future.set_exception(error_from_proto(reply.error))
        else:
            future.set_result(reply)

    def _deliver(self, message: pb.Output) -> None:
        queue = self._queues.get(message.request_id)
        if queue is None:
            return
        if message.HasField("error"):
            queue.put_nowait(error_from_proto(message.error))
        else:
            queue.put_nowait(output_from_proto(self.info.worker_id, message))

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = True
        error = WorkerLost(f"worker {self.info.worker_id} is lost: {reason}")
        self._outgoing.put_nowait(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting any more
        self._calls.clear()
        for queue in self._queues.values():
            queue.put_nowait(error)
        log.info("worker %s: %s", self.info.worker_id, reason)
        self._closed.set()

    # --- clock -------------------------------------------------------------------------------------------------------

    @property
    def _same_clock(self) -> bool:
        return bool(self.info.clock_id) and self.info.clock_id == clock_id()

    async def _keep_time(self) -> None:
        """Ping for as long as the stream lives: measures the clock, and notices a worker that hangs."""
        with contextlib.suppress(WorkerLost):
            while not self._lost:
                await asyncio.sleep(PING_EVERY_S)
                try:
                    await self._ping()
                except DeadlineExceeded:
                    self._lose(f"no answer for {PING_TIMEOUT_S:.0f} s")

    async def _ping(self) -> None:
        """NTP style: half the round trip bounds the error, and the shortest of the window's round trips counts."""
        sent_s = self._time.now()
        reply = await self._call(pb.ControlRequest(ping=pb.Ping()), PING_TIMEOUT_S)
        arrived_s = self._time.now()
        if self._same_clock:
            return
        error_s = ((arrived_s - sent_s) - (reply.replied_s - reply.received_s)) / 2
        offset_s = ((reply.received_s - sent_s) + (reply.replied_s - arrived_s)) / 2
        self._samples.append(ClockOffset(offset_s, error_s))
        self.clock = min(self._samples, key=lambda sample: sample.error_s)
