"""Transport over gRPC: one bidirectional ``KVTransfer.Exchange`` per link, on a port of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from kv_transfer.base import MAX_HEADER_BYTES, KVLink, KVTransport
from kv_transfer.memory import Memory
from kv_transfer.strangers import INTRODUCTION_S, Strangers
from kv_transfer.transports.grpc_frame import FRAME_BYTES
from kv_transfer.transports.grpc_link import GrpcLink
from kv_transfer.transports.threads import in_thread
from pdserve.core.errors import PeerLost, TransferTimeout
from pdserve.core.handoff import KVEndpoint

_SERVICE, _METHOD = "pdserve.internal.v1.KVTransfer", "Exchange"
_HELLO = ("pdserve-kv", "1")
_MAX_LINKS = 1024
_MAX_STREAMS = 4  # per connection; a link needs one
_MAX_STRANGERS = 16  # fewer than elsewhere, because gRPC buffers a whole frame of each
_KEEPALIVE_MS = 5_000
_MAX_FRAME_BYTES = FRAME_BYTES + MAX_HEADER_BYTES + 64
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", _MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", _MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per link
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    # A connection without a stream is closed after the same time as a stranger.
    ("grpc.server_handshake_timeout_ms", round(INTRODUCTION_S * 1e3)),
    ("grpc.max_connection_idle_ms", round(INTRODUCTION_S * 1e3)),
    ("grpc.max_concurrent_streams", _MAX_STREAMS),
]


class GrpcStreamTransport(KVTransport):
    """Listens with a gRPC server, and opens one channel per link. ``timeout_s`` bounds one send."""

    name = "grpc_stream"

    def __init__(self, memory: Memory, *, timeout_s: float = 10.0) -> None:
        self._memory, self._timeout_s = memory, timeout_s
        self._server: grpc.Server | None = None
        self._handlers: ThreadPoolExecutor | None = None
        self._accepted: asyncio.Queue[GrpcLink | None] = asyncio.Queue()
        self._links: set[GrpcLink] = set()
        self._channels: dict[GrpcLink, grpc.Channel] = {}
        self._strangers = Strangers(self.name, _MAX_STRANGERS)
        self._admitting: set[asyncio.Task[None]] = set()
        self._closed = False

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Start the server."""
        loop = asyncio.get_running_loop()

        def exchange(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            link = GrpcLink(self._memory, loop, context.peer(), self._timeout_s, self._forget)
            link.cancel = context.cancel
            if not context.add_callback(link.terminated):
                return
            context.send_initial_metadata((_HELLO,))
            link.post(self._arrived, link, frames)
            yield from link.outgoing()
            if link.refused:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, link.refused)

        self._handlers = ThreadPoolExecutor(_MAX_LINKS, "kv-grpc-serve")
        self._server = grpc.server(self._handlers, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_LINKS)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(exchange)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        bracketed = f"[{host}]" if ":" in host else host
        try:
            port = self._server.add_insecure_port(f"{bracketed}:{port}")
        except RuntimeError as error:
            raise PeerLost(f"cannot listen on {host}, port {port or 'any'}: {error} (grpc_stream)") from None
        self._server.start()
        return KVEndpoint(self.name, f"{bracketed}:{port}")

    async def accept(self) -> KVLink:
        """Return the next link that a peer opened."""
        link = None if self._closed else await self._accepted.get()
        if link is None:
            self._accepted.put_nowait(None)
            raise PeerLost("this transport is closed (grpc_stream)")
        return link

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a stream, and wait until the peer's handler has accepted it."""
        loop, opened = asyncio.get_running_loop(), asyncio.Event()
        link = GrpcLink(self._memory, loop, endpoint.address, self._timeout_s, self._forget)
        channel = grpc.insecure_channel(endpoint.address, options=_OPTIONS)
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{_SERVICE}/{_METHOD}", None, None)
        call = stub(link.outgoing())
        cancel: Callable[[], object] = call.cancel
        link.cancel = cancel
        call.add_callback(lambda: link.terminated(call.details() or "the peer closed the link"))
        self._links.add(link)
        self._channels[link] = channel

        def read() -> None:
            if _HELLO in [tuple(pair) for pair in call.initial_metadata() or ()]:
                link.post(opened.set)
            link.read(call)

        threading.Thread(target=read, name="kv-grpc-read", daemon=True).start()
        waits = asyncio.create_task(opened.wait()), asyncio.create_task(link.wait_ended())
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if opened.is_set():
                return link
            if (lost := link.ended) is not None:
                raise lost
            raise TransferTimeout(f"{endpoint.address} did not answer within {timeout_s} s (grpc_stream)")
        finally:
            for wait in waits:
                wait.cancel()
            if not opened.is_set():
                link.cancel()

    async def aclose(self) -> None:
        """Close the links and the server, and wait for the server's threads."""
        self._closed = True
        self._accepted.put_nowait(None)
        for task in self._admitting:
            task.cancel()
        await asyncio.gather(*self._admitting, return_exceptions=True)
        await asyncio.gather(*(link.aclose() for link in self._links))
        server, handlers = self._server, self._handlers
        self._server = self._handlers = None
        if server is not None:
            await in_thread("kv-grpc-stop", lambda: server.stop(None).wait(self._timeout_s))
        if handlers is not None:
            await in_thread("kv-grpc-stop", handlers.shutdown)

    def _arrived(self, link: GrpcLink, frames: Iterator[bytes]) -> None:
        task = asyncio.create_task(self._admit(link, frames))
        self._admitting.add(task)
        task.add_done_callback(self._admitting.discard)

    async def _admit(self, link: GrpcLink, frames: Iterator[bytes]) -> None:
        """Read from a stream when there is room for another stranger."""
        try:
            await self._strangers.room()
        finally:
            admitted = not (self._closed or link.gone)
            if not admitted:
                link.cancel()
        if admitted:
            link.strange(self._strangers.enter())
            self._links.add(link)
            threading.Thread(target=link.read, args=(frames,), name="kv-grpc-read", daemon=True).start()
            self._accepted.put_nowait(link)

    def _forget(self, link: GrpcLink) -> None:
        self._links.discard(link)
        if (channel := self._channels.pop(link, None)) is not None:
            channel.close()
