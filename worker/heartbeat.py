"""Reports a worker to one gateway periodically, over one long-lived stream. Registration and heartbeat are the same
message, so a restarted gateway knows all workers after one heartbeat interval. A worker has one `Heartbeat` for each
gateway; they are independent of each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from contract.control import BEAT_ANSWERS, MAX_BEAT_BYTES, Beat, BeatAnswer, Wire
from contract.message import encode
from pdserve.core.errors import PdserveError
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from worker.authentication import REGISTRY, ServiceWire

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
"""How long the gateway has to answer a heartbeat, or longer if heartbeats are less frequent."""


def registry_wire(address: str, secret: ServiceSecret, tls: PlaneTls | None = None) -> ServiceWire:
    """The way to the registry of the gateway at ``address``, over the service's ``tls``. A gateway that does not know
    the service's ``secret`` gets no report."""
    return ServiceWire(REGISTRY, address, secret, MAX_BEAT_BYTES, tls, wait_for_ready=True)


class ReportingWorker(Protocol):
    """The part of a worker that its heartbeat needs."""

    def report(self, gateway_epoch: str, blocks_after: int | None) -> Beat:
        """What the gateway of this epoch (empty: not known yet) gets: the worker's current info, load, and links, and
        the changes of its prefix cache after that position. NotReady before its first engine is ready."""
        ...

    def on_answer(self, registry_address: str, answer: BeatAnswer) -> None:
        """Act on the answer of the gateway with this registry."""
        ...

    def on_silence(self, registry_address: str) -> None:
        """Note that the gateway with this registry does not answer."""
        ...


class Heartbeat:
    """Reports to the registry at ``registry_address`` every ``interval_s`` seconds, and at once after `wake`."""

    def __init__(
        self,
        worker: ReportingWorker,
        worker_id: str,
        registry_address: str,
        interval_s: float,
    ) -> None:
        self._worker, self._worker_id = worker, worker_id
        self.registry_address, self._interval_s = registry_address, interval_s
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, wire: Wire) -> None:
        """Start the heartbeats over ``wire``, which this closes. Has no effect if they are running."""
        if self._task is None:
            self._task = asyncio.create_task(self._beat(wire))

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

    async def _beat(self, wire: Wire) -> None:
        worker, interval_s, where = self._worker, self._interval_s, self.registry_address
        timeout_s = max(interval_s, ANSWER_TIMEOUT_S)
        failing = False
        stream: _BeatStream | None = None
        gateway_epoch, blocks_after = "", None  # by the gateway's last answer
        try:
            while True:
                self._wake.clear()  # the report may lack changes that happen from here on
                try:
                    async with asyncio.timeout(timeout_s):
                        if stream is None:
                            stream = _BeatStream()
                            await stream.open(wire, timeout_s)
                        beat = worker.report(gateway_epoch, blocks_after)
                        answer = BEAT_ANSWERS.decode(await stream.exchange(encode(beat)))
                    failing = False
                    gateway_epoch, blocks_after = answer.gateway_epoch, answer.blocks_after
                    worker.on_answer(where, answer)
                except (PdserveError, TimeoutError) as error:
                    if stream is not None:
                        await stream.aclose()
                        stream = None
                    blocks_after = None
                    if not failing:
                        why = str(error) or "it took too long"
                        log.warning("%s: the gateway at %s does not answer: %s", self._worker_id, where, why)
                        worker.on_silence(where)
                    failing = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._wake.wait()
        finally:
            if stream is not None:
                await stream.aclose()
            await wire.aclose()


class _BeatStream:
    """A stream on which each message is answered by one."""

    def __init__(self) -> None:
        self._beats: asyncio.Queue[bytes] = asyncio.Queue()
        self._answers: AsyncIterator[bytes] | None = None

    async def open(self, wire: Wire, timeout_s: float) -> None:
        """Open the stream. PdserveError if that fails."""
        self._answers = await wire.open(self._messages(), timeout_s=timeout_s)

    async def exchange(self, beat: bytes) -> bytes:
        """Send a message, and wait for its answer. PdserveError if the stream ends."""
        assert self._answers is not None, "the stream is open"
        self._beats.put_nowait(beat)
        async for answer in self._answers:
            return answer
        raise PdserveError("it ended the stream")

    async def aclose(self) -> None:
        """End the stream."""
        if isinstance(self._answers, AsyncGenerator):
            await self._answers.aclose()

    async def _messages(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._beats.get()
