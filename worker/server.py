"""The control server of a worker: one long-lived stream per gateway, calls in, replies and step outputs out.

Only control travels here. A call that has to wait (a reservation on a full worker) never delays the next: each runs as
a task of its own. When the stream ends, everything asked for over it is aborted: that is the gateway's lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from engine.messages import KVRole
from pdserve.core.errors import LaunchError, PdserveError
from pdserve.core.handoff import KVDestination
from pdserve.pb import worker_pb2 as pb
from pdserve.pb import worker_pb2_grpc
from worker.options import CONTROL_OPTIONS
from worker.outbox import Outbox
from worker.wire import (
    destination_from_proto,
    destination_to_proto,
    endpoints_from_proto,
    error_to_proto,
    work_from_proto,
)

if TYPE_CHECKING:
    from worker.worker import Worker

log = logging.getLogger(__name__)


class ControlServer(worker_pb2_grpc.WorkerControlServicer):
    """Serves `WorkerControl` for one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self, host: str, port: int) -> None:
        """Listen on ``host`` and ``port`` (0: one that is free). LaunchError if that cannot be."""
        self._server = grpc.aio.server(options=CONTROL_OPTIONS)
        worker_pb2_grpc.add_WorkerControlServicer_to_server(self, self._server)
        bracketed = f"[{host}]" if ":" in host else host
        try:
            port = self._server.add_insecure_port(f"{bracketed}:{port}")
        except RuntimeError:
            raise LaunchError(
                f"worker {self._worker.spec.worker_id}: cannot listen on {bracketed}:{port}: the port is in use there, "
                "or the address is not that host's; cluster.port_base chooses others"
            ) from None
        self.address = f"{bracketed}:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """End all streams and free the port."""
        if self._server is not None:
            await self._server.stop(grace=0.2)
            self._server = None

    async def Control(
        self,
        request_iterator: AsyncIterator[pb.ControlRequest],
        context: grpc.aio.ServicerContext[pb.ControlRequest, pb.ControlResponse],
    ) -> AsyncIterator[pb.ControlResponse]:
        """One gateway's stream."""
        outbox = Outbox()
        tasks: set[asyncio.Task[None]] = set()
        reader = asyncio.create_task(self._read(request_iterator, outbox, tasks))
        try:
            while messages := await outbox.take():
                for message in messages:
                    yield message
        finally:
            outbox.close()
            for task in (reader, *tasks):
                task.cancel()
            self._worker.abort_all(outbox)

    async def _read(
        self, requests: AsyncIterator[pb.ControlRequest], outbox: Outbox, tasks: set[asyncio.Task[None]]
    ) -> None:
        try:
            async for request in requests:
                received_s = self._worker.clock.now()
                if request.WhichOneof("call") == "ping":
                    outbox.reply(pb.Reply(call_id=request.call_id, received_s=received_s, replied_s=received_s))
                    continue
                task = asyncio.create_task(self._answer(request, outbox, received_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            outbox.close()

    async def _answer(self, request: pb.ControlRequest, outbox: Outbox, received_s: float) -> None:
        reply = pb.Reply(call_id=request.call_id, received_s=received_s)
        try:
            destination = await self._perform(request, outbox, received_s)
            if destination is not None:
                reply.destination.CopyFrom(destination_to_proto(destination))
        except Exception as error:
            if not isinstance(error, PdserveError):
                log.exception("unexpected error in a control call")
            reply.error.CopyFrom(error_to_proto(error))
        reply.replied_s = self._worker.clock.now()
        outbox.reply(reply)

    async def _perform(self, request: pb.ControlRequest, outbox: Outbox, received_s: float) -> KVDestination | None:
        worker = self._worker
        match request.WhichOneof("call"):
            case "connect_peer":
                peer = request.connect_peer
                await worker.incarnation.kv.connect(peer.worker_id, peer.epoch, endpoints_from_proto(peer.endpoints))
                return None
            case "reserve":
                return await worker.begin(KVRole.RECEIVE, work_from_proto(request.reserve), outbox, received_s)
            case "prefill":
                work = work_from_proto(request.prefill.submit)
                if not request.prefill.HasField("destination"):
                    return await worker.begin(KVRole.LOCAL, work, outbox, received_s)
                destination = destination_from_proto(request.prefill.destination)
                return await worker.begin(KVRole.PUSH, work, outbox, received_s, destination)
            case "run":
                return await worker.begin(KVRole.LOCAL, work_from_proto(request.run), outbox, received_s)
            case "abort":
                await worker.abort(request.abort.request_id)
                return None
            case other:
                raise PdserveError(f"unknown control call {other!r}; gateway and worker differ in version")
