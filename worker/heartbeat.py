"""Tells the gateway, again and again, that this worker is there: registration and heartbeat are the same call.

So neither side keeps state about the other's start: a gateway that comes back learns of all workers within a beat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import grpc

from pdserve.pb import worker_pb2 as pb
from pdserve.pb import worker_pb2_grpc
from worker.options import CONTROL_OPTIONS
from worker.wire import info_to_proto, load_to_proto

if TYPE_CHECKING:
    from worker.worker import Worker

log = logging.getLogger(__name__)


class Heartbeat:
    """Calls the gateway's registry every ``router.heartbeat_s``, and at once after `wake`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; starting twice is fine."""
        if self._task is None:
            self._task = asyncio.create_task(self._beat())

    def wake(self) -> None:
        """Something changed that the gateway should know now."""
        self._wake.set()

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _beat(self) -> None:
        worker = self._worker
        interval_s = worker.spec.config.router.heartbeat_s
        failing = False
        async with grpc.aio.insecure_channel(worker.spec.registry_address, options=CONTROL_OPTIONS) as channel:
            registry: worker_pb2_grpc.RegistryAsyncStub = worker_pb2_grpc.RegistryStub(channel)  # type: ignore[assignment]
            while True:
                beat = pb.HeartbeatRequest(info=info_to_proto(worker.info), load=load_to_proto(worker.load))
                try:
                    answer = await registry.Heartbeat(
                        beat,
                        timeout=max(interval_s, 2.0),
                        wait_for_ready=True,
                    )
                    failing = False
                    if answer.superseded:
                        worker.supersede()
                except grpc.aio.AioRpcError as error:
                    if not failing:
                        log.warning("%s: the gateway does not answer: %s", worker.spec.worker_id, error.details())
                    failing = True
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), interval_s)
                self._wake.clear()
