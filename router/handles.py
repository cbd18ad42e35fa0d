"""How the router sees workers: a Protocol over plain values, no gRPC. `worker.client` satisfies it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from pdserve.core.handoff import KVPeer
from pdserve.core.request import Request
from pdserve.core.timeline import ClockOffset
from pdserve.core.worker import TokenOutput, WorkerInfo


class WorkerHandle(Protocol):
    """A live worker. Every method raises from `pdserve.core.errors` (WorkerLost when the connection broke). No two
    requests it gets ever have the same attempt id.

    Closing (``aclose``) one of the iterators early does not abort the request: call `abort`.
    """

    @property
    def info(self) -> WorkerInfo:
        """What the worker last said of itself."""
        ...

    @property
    def clock(self) -> ClockOffset:
        """Its clock against ours."""
        ...

    def push(self, request: Request, peer: KVPeer) -> AsyncIterator[TokenOutput]:
        """Run the prompt, give one token, then end. Its KV goes to ``peer``, which tells this worker where (the blocks
        are released by worker and receiver between themselves)."""
        ...

    def receive(self, request: Request, peer: KVPeer, tell_ready: bool = False) -> AsyncIterator[TokenOutput]:
        """Receive the prompt's KV from ``peer``; the outputs from token 2 on (the first message carries the proof). If
        prefill's token ended the request, one message without a token: proof and finish reason. With ``tell_ready``, a
        message with the event DECODE_READY comes before token 2, once all KV is there."""
        ...

    def run(self, request: Request) -> AsyncIterator[TokenOutput]:
        """Prefill and decode here (colocated)."""
        ...

    async def abort(self, attempt_id: str) -> None:
        """Drop the request in whatever state it is in; never raises for one that is gone."""
        ...

    def beat_now(self) -> None:
        """Have the worker send its next heartbeat at once: the answer has news. Never raises."""
        ...

    async def wait_closed(self) -> None:
        """Return once the control connection has ended, on either side."""
        ...

    async def aclose(self) -> None:
        """End the control connection; whatever still runs over it raises `WorkerLost`. Never raises."""
        ...
