"""How the router sees workers: a Protocol over plain values, no gRPC. `worker.client` satisfies it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from pdserve.core.handoff import KVDestination, KVEndpoint
from pdserve.core.timeline import ClockOffset
from pdserve.core.worker import TokenOutput, Work, WorkerInfo


class WorkerHandle(Protocol):
    """A live worker. Every method raises from `pdserve.core.errors` (WorkerLost when the connection broke). No two
    works ever have the same id.

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

    async def reserve(self, work: Work) -> KVDestination:
        """Make room for the prompt's KV on this (decode) worker; waits while it is full, at most ``timeout_s``."""
        ...

    def decode(self, request_id: str) -> AsyncIterator[TokenOutput]:
        """The outputs of a reserved request, from token 2 (its first message carries the proof). If prefill's token
        ended the request, one message without a token: proof and finish reason."""
        ...

    def prefill(self, work: Work, destination: KVDestination | None) -> AsyncIterator[TokenOutput]:
        """Run the prompt, push its blocks to ``destination``, give one token, then end (the blocks are released by
        worker and receiver between themselves). Without a destination nothing travels (one token is wanted)."""
        ...

    def run(self, work: Work) -> AsyncIterator[TokenOutput]:
        """Prefill and decode here (colocated)."""
        ...

    async def abort(self, request_id: str) -> None:
        """Drop the request in whatever state it is in; never raises for one that is gone."""
        ...

    async def connect_peer(self, worker_id: str, epoch: str, endpoints: Sequence[KVEndpoint]) -> None:
        """Shake hands with a decode worker (this one prefills): `LayoutMismatch`, or another `TransferError`. Asked
        again for a pair that is connected, it does nothing."""
        ...

    async def wait_closed(self) -> None:
        """Return once the control connection has ended, whoever ended it."""
        ...

    async def aclose(self) -> None:
        """End the control connection; whatever still runs over it raises `WorkerLost`. Never raises."""
        ...
