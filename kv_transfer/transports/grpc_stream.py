"""Transport over gRPC: one bidirectional stream ``KVTransfer/Exchange`` per link, on a port of its own. Before it, both
ends are proven by a call of ``KVTransfer/Meet`` (`runtime.stream_proof`), and by TLS if the service has it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from kv_transfer.base import ENCRYPTED, MAX_HEADER_BYTES, KVLink, KVTransport, Tasks
from kv_transfer.memory import Memory
from kv_transfer.pending_peers import INTRODUCTION_S, HandshakeLimit
from kv_transfer.transports.grpc_link import FRAME_BYTES, GrpcLink
from pdserve.core.address import join_address
from pdserve.core.errors import PeerLost, TransferError, TransferRefused, TransferTimeout
from pdserve.core.grpc_pings import ping_options
from pdserve.core.handoff import KVEndpoint
from runtime.grpc_tls import add_port, open_channel
from runtime.plane_tls import PlaneTls
from runtime.secret import AuthenticationFailed, ServiceSecret
from runtime.stream_proof import MEET, Metadata, StreamDialler, StreamListener
from runtime.threads import in_thread

_SERVICE, _METHOD = "pdserve.internal.v1.KVTransfer", "Exchange"
_PURPOSE = "kv grpc_stream"
_HELLO = ("pdserve-kv", "1")
_MAX_LINKS = 1024
_MAX_STREAMS = 4  # per connection; a link needs one at a time
_MAX_PENDING_PEERS = 16  # fewer than elsewhere, because gRPC buffers a whole frame of each
_KEEPALIVE_MS = 5_000
_MAX_FRAME_BYTES = FRAME_BYTES + MAX_HEADER_BYTES + 8  # with the lengths
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", _MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", _MAX_FRAME_BYTES),
    *ping_options(every_ms=_KEEPALIVE_MS, timeout_ms=_KEEPALIVE_MS, other_timeout_ms=2 * _KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per link
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    # A connection without a stream is closed after the same time as a pending peer's.
    ("grpc.server_handshake_timeout_ms", round(INTRODUCTION_S * 1e3)),
    ("grpc.max_connection_idle_ms", round(INTRODUCTION_S * 1e3)),
    ("grpc.max_concurrent_streams", _MAX_STREAMS),
    # Else gRPC would take 4 MiB of a stream that nobody reads, not 64 KiB. Larger frames of HTTP/2 keep it fast.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.max_frame_size", 2**20),
]


class GrpcStreamTransport(KVTransport):
    """Listens with a gRPC server, and opens one channel per link. ``timeout_s`` bounds one send."""

    name = "grpc_stream"

    def __init__(
        self, memory: Memory, secret: ServiceSecret, *, tls: PlaneTls | None = None, timeout_s: float = 10.0
    ) -> None:
        super().__init__(memory, timeout_s)
        self._secret, self._tls = secret, tls
        if tls is not None:
            self.note = ENCRYPTED
        self._proofs: StreamListener | None = None
        self._server: grpc.Server | None = None
        self._handlers: ThreadPoolExecutor | None = None
        self._channels: dict[GrpcLink, grpc.Channel] = {}
        self._handshake_limit = HandshakeLimit(self.name, _MAX_PENDING_PEERS)
        self._admitting = Tasks()

    @property
    def num_unauthenticated(self) -> int:
        """How many calls were refused because their peers did not know the secret."""
        return 0 if self._proofs is None else self._proofs.refused

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Start the server."""
        loop = asyncio.get_running_loop()
        proofs = self._proofs = StreamListener(self._secret, _PURPOSE, "")

        def meet(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                context.set_trailing_metadata(proofs.challenge(context.invocation_metadata(), context.peer()))
            except AuthenticationFailed as error:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            yield from ()

        def exchange(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                proofs.verify(context.invocation_metadata(), context.peer())
            except AuthenticationFailed as error:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            link = GrpcLink(self._memory, loop, context.peer(), self._timeout_s, self._forget)
            link.cancel = context.cancel
            if not context.add_callback(link.terminated):
                return
            context.send_initial_metadata((_HELLO,))
            link.post(lambda: self._admitting.spawn(self._admit(link, frames)))
            yield from link.outgoing()
            if link.refused:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, link.refused)

        self._handlers = ThreadPoolExecutor(_MAX_LINKS, "kv-grpc-serve")
        self._server = grpc.server(self._handlers, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_LINKS)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            MEET: grpc.stream_stream_rpc_method_handler(meet),
            _METHOD: grpc.stream_stream_rpc_method_handler(exchange),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        try:
            port = add_port(self._server, join_address(host, port), self._tls)
        except RuntimeError as error:
            raise PeerLost(f"cannot listen on {host}, port {port or 'any'}: {error} (grpc_stream)") from None
        proofs.address = join_address(host, port)
        self._server.start()
        return KVEndpoint(self.name, proofs.address)

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Exchange proofs, open a stream, and wait until the peer's handler has accepted it."""
        loop, opened = asyncio.get_running_loop(), asyncio.Event()
        deadline_s = loop.time() + timeout_s
        channel = open_channel(endpoint.address, self._tls, _OPTIONS)
        proof: Metadata | None = None
        try:
            proof = await self._prove(channel, endpoint.address, timeout_s)
        finally:
            if proof is None:
                channel.close()
        link = GrpcLink(self._memory, loop, endpoint.address, self._timeout_s, self._forget)
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{_SERVICE}/{_METHOD}", None, None)
        call = stub(link.outgoing(), metadata=proof)
        cancel: Callable[[], object] = call.cancel
        link.cancel = cancel
        call.add_callback(lambda: link.terminated(call.details() or "the peer closed the link"))
        self._channels[link] = channel

        def read() -> None:
            if _HELLO in [tuple(pair) for pair in call.initial_metadata() or ()]:
                link.post(opened.set)
            link.read(call)

        threading.Thread(target=read, name="kv-grpc-read", daemon=True).start()
        waits = asyncio.create_task(opened.wait()), asyncio.create_task(link.wait_ended())
        try:
            await asyncio.wait(waits, timeout=deadline_s - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if opened.is_set():
                return self._keep(link)
            if (lost := link.ended) is not None:
                raise lost
            raise TransferTimeout(f"{endpoint.address} did not answer within {timeout_s} s (grpc_stream)")
        finally:
            for wait in waits:
                wait.cancel()
            if not opened.is_set():
                link.cancel()

    async def _prove(self, channel: grpc.Channel, address: str, timeout_s: float) -> Metadata:
        """The metadata that prove this end, once the listening end is proven. TransferRefused if that does not know the
        secret, TransferTimeout or PeerLost if it does not answer."""
        dialler = StreamDialler(self._secret, _PURPOSE, address)
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{_SERVICE}/{MEET}", None, None)
        call = stub(iter(()), metadata=dialler.greeting, timeout=timeout_s)
        try:
            code = await in_thread("kv-grpc-meet", call.code)
            if code is grpc.StatusCode.OK:
                return dialler.answer(call.trailing_metadata())
        except AuthenticationFailed as error:
            raise TransferRefused(f"no link to {address}: {error} (grpc_stream)") from None
        finally:
            call.cancel()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TransferTimeout(f"{address} did not answer within {timeout_s} s (grpc_stream)")
        kind: type[TransferError] = TransferRefused if code is grpc.StatusCode.UNAUTHENTICATED else PeerLost
        raise kind(f"{address}: {call.details() or code} (grpc_stream)")

    async def aclose(self) -> None:
        """Close the links and the server, and wait for the server's threads."""
        self._closed = True
        await self._admitting.aclose()
        await super().aclose()
        server, handlers = self._server, self._handlers
        self._server = self._handlers = None
        if server is not None:
            await in_thread("kv-grpc-stop", lambda: server.stop(None).wait(self._timeout_s))
        if handlers is not None:
            await in_thread("kv-grpc-stop", handlers.shutdown)

    async def _admit(self, link: GrpcLink, frames: Iterator[bytes]) -> None:
        """Read from a stream when there is room for another pending peer."""
        try:
            await self._handshake_limit.room()
        finally:
            admitted = not (self._closed or link.gone)
            if not admitted:
                link.cancel()
        if admitted:
            link.set_pending(self._handshake_limit.add())
            threading.Thread(target=link.read, args=(frames,), name="kv-grpc-read", daemon=True).start()
            self._accepted.put_nowait(self._keep(link))

    def _forget(self, link: GrpcLink) -> None:
        if (channel := self._channels.pop(link, None)) is not None:
            channel.close()
