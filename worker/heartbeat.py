"""Reports a worker to one gateway periodically, over one long-lived stream. Registration and heartbeat are the same
message, so a restarted gateway knows all workers after one heartbeat interval. A worker has one `Heartbeat` for each
gateway; they are independent of each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

import grpc

from pdserve.core.errors import PdserveError
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from worker.authentication import REGISTRY, Stream, open_stream, stream_channel
from worker.messages import BEAT_ANSWERS, MAX_BEAT_BYTES, Beat, BeatAnswer, encode

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
"""How long the gateway has to answer a heartbeat, or longer if heartbeats are less frequent."""


class ReportingWorker(Protocol):
    """The part of a worker that its heartbeat needs."""

    def report(self, blocks_after: int | None) -> Beat:
        """The worker's current info, load, and links, and the changes of its prefix cache after that position. NotReady
        before its first engine is ready."""
        ...

    def on_answer(self, registry_address: str, answer: BeatAnswer) -> None:
        """Act on the answer of the gateway with this registry."""
        ...

    def on_silence(self, registry_address: str) -> None:
        """Note that the gateway with this registry does not answer."""
        ...


class Heartbeat:
    """Reports to the registry at ``registry_address`` every ``interval_s`` seconds, and at once after `wake`. A gateway
    that does not know the service's ``secret`` gets no report."""

    def __init__(
        self,
        worker: ReportingWorker,
        worker_id: str,
        registry_address: str,
        interval_s: float,
        secret: ServiceSecret,
    ) -> None:
        self._worker, self._worker_id = worker, worker_id
        self._registry_address, self._interval_s, self._secret = registry_address, interval_s, secret
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, tls: PlaneTls | None = None) -> None:
        """Start the heartbeats, over the service's ``tls``. Has no effect if they are running."""
        if self._task is None:
            self._task = asyncio.create_task(self._beat(tls))

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

    async def _beat(self, tls: PlaneTls | None) -> None:
        worker, interval_s = self._worker, self._interval_s
        timeout_s = max(interval_s, ANSWER_TIMEOUT_S)
        failing = False
        stream: Stream | None = None
        blocks_after: int | None = None  # by the gateway's last answer
        async with stream_channel(self._registry_address, MAX_BEAT_BYTES, tls) as channel:
            while True:
                self._wake.clear()  # the report may lack changes that happen from here on
                try:
                    async with asyncio.timeout(timeout_s):
                        if stream is None or stream.done():
                            stream = await self._open(channel, timeout_s)
                        await stream.write(encode(worker.report(blocks_after)))
                        answer = await stream.read()
                    if not isinstance(answer, bytes):
                        raise PdserveError("it ended the stream")
                    failing = False
                    decoded = BEAT_ANSWERS.decode(answer)
                    blocks_after = decoded.blocks_after
                    worker.on_answer(self._registry_address, decoded)
                except (grpc.aio.AioRpcError, PdserveError, TimeoutError) as error:
                    if stream is not None:
                        stream.cancel()
                        stream = None
                    blocks_after = None
                    if not failing:
                        why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                        where = self._registry_address
                        why = why or "it took too long"
                        log.warning("%s: the gateway at %s does not answer: %s", self._worker_id, where, why)
                        worker.on_silence(where)
                    failing = True
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), interval_s)

    async def _open(self, channel: grpc.aio.Channel, timeout_s: float) -> Stream:
        address = self._registry_address
        return await open_stream(channel, REGISTRY, self._secret, address, timeout_s=timeout_s, wait_for_ready=True)
