"""The gRPC streams inside a service: control, which a gateway opens to a worker, and registry, which a worker opens to
its gateway. Both ends prove that they know the service's secret before a message is read (`runtime.stream_proof`),
over mutual TLS if the service has it (`runtime.plane_tls`).
Messages are bytes to gRPC; `contract.control` encodes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, TypeAlias

import grpc

from contract.control import Serve
from pdserve.core.errors import PdserveError
from pdserve.core.grpc_pings import ping_options
from runtime.grpc_tls import open_aio_channel
from runtime.plane_tls import PlaneTls
from runtime.secret import AuthenticationFailed, ServiceSecret
from runtime.stream_proof import MEET, StreamDialler, StreamListener

MEET_TIMEOUT_S = 5.0
"""How long a server has to answer the first call."""
UNUSED_S = 5.0
"""Limit: a control or registry connection without a stream. Then: closed."""
_MAX_STREAMS = 8  # per connection; an honest peer has one, and another one for a moment


class StreamService(NamedTuple):
    """A gRPC service with one streaming method. ``purpose`` names it in proofs and logs."""

    name: str
    method: str
    purpose: str


CONTROL = StreamService("pdserve.internal.v1.WorkerControl", "Control", "control")
"""Served by every worker. A gateway has one long-lived stream; when it ends, the worker aborts what came over it."""
REGISTRY = StreamService("pdserve.internal.v1.Registry", "Heartbeats", "registry")
"""Served by the gateway. Each message of a worker is a heartbeat, and is answered by one message."""

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Stream: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    *ping_options(every_ms=5_000, timeout_ms=5_000, other_timeout_ms=10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_000),
)


class ServiceWire:
    """A gRPC connection to the server of ``service`` at ``address``. With ``wait_for_ready``, a server that is not
    there yet is waited for."""

    def __init__(
        self,
        service: StreamService,
        address: str,
        secret: ServiceSecret,
        max_message_bytes: int,
        tls: PlaneTls | None = None,
        *,
        wait_for_ready: bool = False,
    ) -> None:
        self._service, self._address, self._secret = service, address, secret
        self._wait_for_ready = wait_for_ready
        self._channel = stream_channel(address, max_message_bytes, tls)

    async def open(self, requests: AsyncIterator[bytes], *, timeout_s: float = MEET_TIMEOUT_S) -> AsyncIterator[bytes]:
        """See `Wire`."""
        try:
            stream = await open_stream(
                self._channel,
                self._service,
                self._secret,
                self._address,
                requests,
                timeout_s=timeout_s,
                wait_for_ready=self._wait_for_ready,
            )
        except grpc.aio.AioRpcError as error:
            raise PdserveError(error.details() or str(error.code())) from None
        return self._answers(stream)

    @staticmethod
    async def _answers(stream: Stream) -> AsyncIterator[bytes]:
        try:
            async for answer in stream:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise PdserveError(error.details() or str(error.code())) from None
        finally:
            stream.cancel()

    async def aclose(self) -> None:
        """See `Wire`."""
        await self._channel.close(None)


def stream_channel(address: str, max_message_bytes: int, tls: PlaneTls | None = None) -> grpc.aio.Channel:
    """A channel to ``address`` without proxies, with the service's TLS, which reconnects quickly and notices a dead
    peer."""
    options = (
        *_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a connection has few streams, which workers of one process would share
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    )
    return open_aio_channel(address, tls, options)


async def open_stream(
    channel: grpc.aio.Channel,
    service: StreamService,
    secret: ServiceSecret,
    address: str,
    requests: AsyncIterator[bytes] | None = None,
    *,
    timeout_s: float = MEET_TIMEOUT_S,
    wait_for_ready: bool = False,
) -> Stream:
    """Open a stream to the server at ``address``, which has then proven that it knows the secret. ``requests`` are the
    messages to send; without them, the caller writes. PdserveError if the server does not answer within
    ``timeout_s``, or does not know the secret. Whether it accepts this end shows when the stream is read."""
    dialler = StreamDialler(secret, service.purpose, address)
    meet: Any = channel.stream_stream(f"/{service.name}/{MEET}")
    call = meet(metadata=dialler.greeting, timeout=timeout_s, wait_for_ready=wait_for_ready)
    try:
        if await call.code() is not grpc.StatusCode.OK:
            raise PdserveError(f"{address}: {await call.details()}")
        proof = dialler.answer(await call.trailing_metadata())
    except AuthenticationFailed as error:
        raise PdserveError(f"{address}: {error}") from None
    finally:
        call.cancel()
    open_proven: Any = channel.stream_stream(f"/{service.name}/{service.method}")
    stream: Stream = open_proven(requests, metadata=proof)
    return stream


def proven_server(
    service: StreamService, proofs: StreamListener, serve: Serve, max_message_bytes: int
) -> grpc.aio.Server:
    """A server of ``service``. ``serve`` gets the messages of each proven peer and yields the answers; other peers get
    UNAUTHENTICATED, and none of their messages is read."""

    async def meet(_: AsyncIterator[bytes], context: Context) -> None:
        try:
            challenge = proofs.challenge(context.invocation_metadata(), context.peer())
        except AuthenticationFailed as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        context.set_trailing_metadata(challenge)

    async def serve_proven(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            proofs.verify(context.invocation_metadata(), context.peer())
        except AuthenticationFailed as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        try:
            async with contextlib.aclosing(serve(requests)) as answers:
                async for answer in answers:
                    yield answer
        except PdserveError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    options = (
        *_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", round(UNUSED_S * 1e3)),
        ("grpc.max_connection_idle_ms", round(UNUSED_S * 1e3)),
        # Else gRPC would take 4 MiB of a stream that nobody reads. With this it takes 64 KiB.
        ("grpc.http2.bdp_probe", 0),
    )
    server = grpc.aio.server(options=options)
    handlers: dict[str, Any] = {
        MEET: grpc.stream_stream_rpc_method_handler(meet),
        service.method: grpc.stream_stream_rpc_method_handler(serve_proven),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.name, handlers),))
    return server
