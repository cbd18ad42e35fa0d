"""The router's interface to workers, without gRPC. `worker.client.WorkerClient` implements it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from pdserve.core.handoff import KVPeer
from pdserve.core.request import Request
from pdserve.core.timeline import ClockOffset
from pdserve.core.worker import TokenOutput, WorkerInfo


class WorkerHandle(Protocol):
    """A live worker. Methods raise errors of `pdserve.core.errors`; `WorkerLost` if the connection breaks.

    Attempt ids must be unique. Closing (``aclose``) an iterator early does not abort the request: call `abort`.
    """

    @property
    def info(self) -> WorkerInfo:
        """The worker's last description of itself."""
        ...

    @property
    def clock(self) -> ClockOffset:
        """Offset of the worker's clock from the gateway's."""
        ...

    def push(self, request: Request, peer: KVPeer) -> AsyncIterator[TokenOutput]:
        """Prefill the prompt, yield token 1, and push the KV to ``peer``, which announces the destination. The two
        workers release the blocks without the router."""
        ...

    def receive(self, request: Request, peer: KVPeer, tell_ready: bool = False) -> AsyncIterator[TokenOutput]:
        """Receive the KV of the prompt from ``peer`` and yield the outputs from token 2 on. The first of them
        carries the proof. If token 1 ended the request, it is the only output, with a finish reason and no token.

        With ``tell_ready``, an output with the event DECODE_READY and no token precedes token 2, as soon as all KV is
        there.
        """
        ...

    def run(self, request: Request) -> AsyncIterator[TokenOutput]:
        """Prefill and decode on this worker (colocated)."""
        ...

    async def abort(self, attempt_id: str) -> None:
        """Drop the request in any state. Does not raise for an unknown request."""
        ...

    def beat_now(self) -> None:
        """Ask the worker to send its next heartbeat at once, because the answer has changed. Never raises."""
        ...

    async def wait_closed(self) -> None:
        """Wait until the control connection has ended, on either side."""
        ...

    async def aclose(self) -> None:
        """End the control connection. Requests on it raise `WorkerLost`; this method never raises."""
        ...
