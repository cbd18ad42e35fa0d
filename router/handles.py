"""The router's interface to workers, without gRPC. `worker.client.WorkerClient` implements it."""

from __future__ import annotations

from typing import Protocol

from pdserve.core.handoff import KVPeer, PrefixSource
from pdserve.core.request import Request
from pdserve.core.timeline import ClockOffset
from pdserve.core.worker import OutputSink, WorkerInfo


class WorkerHandle(Protocol):
    """A live worker.

    Requests are sent without waiting; their outputs and errors go to a sink, `WorkerLost` if the connection breaks.
    Attempt ids must be unique. Each request has to end with its last output, an error, `forget`, or `abort`.
    """

    @property
    def info(self) -> WorkerInfo:
        """The worker's last description of itself."""
        ...

    @property
    def clock(self) -> ClockOffset:
        """Offset of the worker's clock from the gateway's."""
        ...

    def push(self, request: Request, peer: KVPeer, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """Prefill the prompt, give token 1 as the only output, and push the KV to ``peer``, which announces the
        destination. The two workers release the blocks without the router. KV of the prompt's beginning may come from
        ``prefix_source``, which `send_prefix` asks for it.

        After token 1 the sink still gets `WorkerLost` if the connection breaks, until `forget`.
        """
        ...

    def receive(self, request: Request, peer: KVPeer, sink: OutputSink, tell_ready: bool = False) -> None:
        """Receive the KV of the prompt from ``peer`` and give the outputs from token 2 on. The first of them
        carries the proof. If token 1 ended the request, it is the only output, with a finish reason and no token.

        With ``tell_ready``, an output with the event DECODE_READY and no token precedes token 2, as soon as all KV is
        there.
        """
        ...

    def run(self, request: Request, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """Prefill and decode on this worker (colocated), and give all outputs. ``prefix_source`` as for `push`."""
        ...

    def send_prefix(self, request: Request, peer: KVPeer, sink: OutputSink) -> None:
        """Send the KV that the worker has cached of the request's tokens to ``peer``, which announces the destination
        under the attempt id of this request. Its only output has a finish reason and no token."""
        ...

    def forget(self, attempt_id: str) -> None:
        """Give the request's sink nothing more, because its KV has been handed off. Has no effect for an unknown
        request."""
        ...

    async def abort(self, attempt_id: str) -> None:
        """Drop the request in any state; its sink gets nothing more. Does not raise for an unknown request."""
        ...

    def request_heartbeat(self) -> None:
        """Ask the worker to send its next heartbeat at once, because the answer has changed. Never raises."""
        ...

    async def wait_closed(self) -> None:
        """Wait until the control connection has ended, on either side."""
        ...

    async def aclose(self) -> None:
        """End the control connection. Requests on it raise `WorkerLost`; this method never raises."""
        ...
