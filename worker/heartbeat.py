"""Reports a worker to the gateway periodically. Registration and heartbeat are the same call, so a restarted gateway
knows all workers after one heartbeat interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

import grpc

from pdserve.core.errors import PdserveError
from pdserve.pb import worker_pb2_grpc
from worker.messages import BEAT_ANSWERS, CONTROL_OPTIONS, Beat, BeatAnswer, to_frame

log = logging.getLogger(__name__)


class ReportingWorker(Protocol):
    """The part of a worker that its heartbeat needs."""

    def report(self) -> Beat:
        """The worker's current info, load, and links. NotReady before its first engine is ready."""
        ...

    def on_answer(self, answer: BeatAnswer) -> None:
        """Act on the gateway's answer."""
        ...


class Heartbeat:
    """Calls the registry at ``registry_address`` every ``interval_s`` seconds, and at once after `wake`."""

    def __init__(self, worker: ReportingWorker, worker_id: str, registry_address: str, interval_s: float) -> None:
        self._worker, self._worker_id = worker, worker_id
        self._registry_address, self._interval_s = registry_address, interval_s
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the heartbeats. Has no effect if they are running."""
        if self._task is None:
            self._task = asyncio.create_task(self._beat())

    def wake(self) -> None:
        """Send the next heartbeat at once."""
        self._wake.set()

    async def stop(self) -> None:
        """Stop the heartbeats."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _beat(self) -> None:
        worker, interval_s = self._worker, self._interval_s
        failing = False
        async with grpc.aio.insecure_channel(self._registry_address, options=CONTROL_OPTIONS) as channel:
            registry: worker_pb2_grpc.RegistryAsyncStub = worker_pb2_grpc.RegistryStub(channel)  # type: ignore[assignment]
            while True:
                self._wake.clear()  # the report may lack changes that happen from here on
                try:
                    answer = await registry.Heartbeat(
                        to_frame(worker.report()),
                        timeout=max(interval_s, 2.0),
                        wait_for_ready=True,
                    )
                    failing = False
                    worker.on_answer(BEAT_ANSWERS.decode(answer))
                except (grpc.aio.AioRpcError, PdserveError) as error:
                    if not failing:
                        why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                        log.warning("%s: the gateway does not answer: %s", self._worker_id, why)
                    failing = True
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), interval_s)
