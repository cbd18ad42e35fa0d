"""The control server of a worker: one long-lived stream per gateway that carries calls in, and replies and outputs out.

The stream carries no KV. Calls that have to wait run as tasks of their own, so that they do not delay later calls. When
a stream ends, all requests that came over it are aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

import grpc

from contract.control import (
    MAX_CONTROL_BYTES,
    TO_WORKER,
    Abort,
    Failure,
    HandOver,
    Hello,
    Outputs,
    Ping,
    Reply,
    RequestHeartbeat,
    Work,
)
from contract.message import encode
from pdserve.core.address import join_address
from pdserve.core.clock import Clock
from pdserve.core.errors import LaunchError, PdserveError, from_wire, to_wire
from pdserve.core.worker import TokenOutput
from runtime.grpc_tls import add_port
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from runtime.stream_proof import StreamListener
from worker.authentication import CONTROL, proven_server

log = logging.getLogger(__name__)


class Outbox:
    """Queues the messages of one control stream, to the gateway of epoch ``gateway_epoch``. Outputs are batched: all
    outputs of a step are sent as one message."""

    def __init__(self) -> None:
        self.gateway_epoch = ""
        self._replies: list[Reply] = []
        self._outputs: list[tuple[str, TokenOutput]] = []
        self._failures: list[tuple[str, Failure]] = []
        self._filled = asyncio.Event()
        self.closed = False

    def reply(self, reply: Reply) -> None:
        """Queue the answer to a call."""
        self._replies.append(reply)
        self._filled.set()

    def output(self, attempt_id: str, output: TokenOutput) -> None:
        """Queue a token, or a final output without a token."""
        self._outputs.append((attempt_id, output))
        self._filled.set()

    def error(self, attempt_id: str, error: PdserveError) -> None:
        """Queue the error that ended a request. It is sent after the request's outputs."""
        self._failures.append((attempt_id, Failure.of(error)))
        self._filled.set()

    def close(self) -> None:
        """Stop sending; queued messages are dropped."""
        self.closed = True
        self._filled.set()

    async def take(self) -> list[bytes]:
        """Wait for messages, and return all queued ones as few encoded ones. Empty once closed."""
        await self._filled.wait()
        self._filled.clear()
        if self.closed:
            return []
        encoded = [encode(reply) for reply in self._replies]
        if self._outputs or self._failures:
            encoded.append(encode(Outputs(self._outputs, self._failures)))
        self._replies, self._outputs, self._failures = [], [], []
        return encoded


class ControlledWorker(Protocol):
    """The part of a worker that its control server needs."""

    def begin(self, work: Work, outbox: Outbox, received_s: float) -> None:
        """Begin to serve a request. PdserveError if the worker refuses it."""
        ...

    def hand_over(self, attempt_id: str, hand_off: bytes) -> None:
        """Give a request what prefill's answer says for it. Unknown ids are ignored."""
        ...

    async def abort(self, attempt_id: str) -> None:
        """Abort a request. Returns when its resources are released."""
        ...

    def abort_all(self, outbox: Outbox) -> None:
        """Abort all requests that came over a stream."""
        ...

    def request_heartbeat(self) -> None:
        """Report to all gateways at once."""
        ...


class ControlServer:
    """Serves `worker.authentication.CONTROL` for one worker, to gateways that know the service's ``secret``."""

    def __init__(self, worker: ControlledWorker, worker_id: str, clock: Clock, secret: ServiceSecret) -> None:
        self._worker, self._worker_id, self._clock, self._secret = worker, worker_id, clock, secret
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self, host: str, port: int, tls: PlaneTls | None = None) -> None:
        """Listen on ``host`` and ``port`` (0: any free port), with the service's ``tls``. LaunchError if that
        fails."""
        proofs = StreamListener(self._secret, CONTROL.purpose, "")
        self._server = proven_server(CONTROL, proofs, self.serve, MAX_CONTROL_BYTES)
        try:
            port = add_port(self._server, join_address(host, port), tls)
        except RuntimeError:
            raise LaunchError(
                f"worker {self._worker_id}: cannot listen on {join_address(host, port)}: the port is in use there, "
                "or the address is not that host's; cluster.port_base chooses others"
            ) from None
        self.address = proofs.address = join_address(host, port)
        await self._server.start()

    async def stop(self) -> None:
        """End all streams and close the port."""
        if self._server is not None:
            await self._server.stop(grace=0.2)
            self._server = None

    async def serve(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Serve one gateway's stream."""
        outbox = Outbox()
        tasks: set[asyncio.Task[None]] = set()
        reader = asyncio.create_task(self._read(requests, outbox, tasks))
        try:
            while encoded := await outbox.take():
                for message in encoded:
                    yield message
        finally:
            outbox.close()
            for task in (reader, *tasks):
                task.cancel()
            self._worker.abort_all(outbox)

    async def _read(self, requests: AsyncIterator[bytes], outbox: Outbox, tasks: set[asyncio.Task[None]]) -> None:
        try:
            async for data in requests:
                received_s = self._clock.now()
                message = TO_WORKER.decode(data)
                if isinstance(message, Hello):
                    outbox.gateway_epoch = message.gateway_epoch
                elif isinstance(message, Ping):
                    outbox.reply(Reply(message.call_id, received_s, received_s))
                elif isinstance(message, HandOver):
                    self._worker.hand_over(message.attempt_id, message.hand_off)
                elif isinstance(message, RequestHeartbeat):
                    self._worker.request_heartbeat()
                elif isinstance(message, Abort):
                    task = asyncio.create_task(self._abort(message, outbox, received_s))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                else:
                    self._begin(message, outbox, received_s)
        except PdserveError as error:
            log.error("%s: the control stream ends: %s", self._worker_id, error)
        finally:
            outbox.close()

    def _begin(self, work: Work, outbox: Outbox, received_s: float) -> None:
        try:
            self._worker.begin(work, outbox, received_s)
        except PdserveError as error:
            outbox.error(work.request.attempt_id, error)
        except Exception as error:  # a bug must not end the stream, and all other requests with it
            log.exception("unexpected error while a request began")
            outbox.error(work.request.attempt_id, from_wire(*to_wire(error)))

    async def _abort(self, call: Abort, outbox: Outbox, received_s: float) -> None:
        failure: Failure | None = None
        try:
            await self._worker.abort(call.attempt_id)
        except Exception as error:
            if not isinstance(error, PdserveError):
                log.exception("unexpected error in a control call")
            failure = Failure.of(error)
        outbox.reply(Reply(call.call_id, received_s, self._clock.now(), failure))
