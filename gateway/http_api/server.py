"""The HTTP server, on the gateway's event loop: uvicorn's, with bounds on what a client can do before and after a
request.

uvicorn waits without limit for a request's head, takes heads and trailers of any length and any number of requests
ahead of their answers, and lets a client that does not read keep its answer in memory after the end of the request.
When a client leaves, it tells only the request that came last."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.failures import error_object
from pdserve.core.config import GatewayConfig
from pdserve.core.errors import InvalidRequest, LaunchError
from runtime.awake_clock import awake_clock

BACKLOG = 2048
MAX_HEAD_BYTES = 64 * 2**10
"""Limit: a request's line and headers, or its trailers. Then: 431.

The first read may bring more."""
MAX_PIPELINED = 16
"""Limit: requests of a connection that wait for an earlier one's answer. Then: closed."""
RECEIVE_S = 30.0
"""Limit: time to send a head, or the rest of a body whose request has been answered. Then: 408."""
IDLE_S = 75.0
"""Limit: idle time of a connection between two requests. Then: closed."""
LOOK_S = 5.0
"""How often a connection is looked at."""
MAX_STUCK_LOOKS = 6
"""A closed connection ends when its client has read nothing between so many looks."""


class HttpConnection(HttpToolsProtocol):
    """Refuses what is not HTTP in the shape of all other errors. Ends when its client keeps it waiting."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._in_head = True  # or before it
        self._receiving = False
        self._bytes_without_body = 0  # a head, or trailers
        self._stuck_looks = 0
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look at it."""
        super().connection_made(transport)
        self._clock = awake_clock()
        self._since_s = self._clock.now()
        self._looking = self.loop.call_later(LOOK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all requests that the client has left."""
        self._looking.cancel()
        self._abandon()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, unless there is too much of it besides bodies."""
        self._bytes_without_body += len(data)
        super().data_received(data)
        if self._bytes_without_body > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"headers: they are longer than {MAX_HEAD_BYTES} bytes; shorten them")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = self._receiving = True
        self._since_s = self._clock.now()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its body follows."""
        self._bytes_without_body = 0
        if len(self._unanswered) > MAX_PIPELINED:
            raise ValueError(f"more than {MAX_PIPELINED} requests wait for answers")  # ends as data that is not HTTP
        before = self.cycle
        super().on_headers_complete()
        self._in_head = False
        if self.cycle is not before:
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._bytes_without_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """It is complete."""
        self._bytes_without_body = 0
        self._in_head, self._receiving = True, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The oldest request is answered."""
        self._unanswered.popleft()
        self._since_s = self._clock.now()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(400, "request: it is not valid HTTP/1.1")

    def _refuse(self, status: int, message: str) -> None:
        """Refuse the request that is being received, and close. Nothing is said where another answer has begun or has
        to come first."""
        cycle = self._unanswered[0] if self._unanswered else None
        in_body = cycle is not None and cycle is self.cycle and not (self._in_head or cycle.response_started)
        first = in_body or (cycle is None and self._in_head)
        self._abandon()
        if first:
            body = json.dumps(error_object(InvalidRequest(message), status)).encode()
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            lines = b"".join(b"%s: %s\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + body)
        self.transport.close()

    def _abandon(self) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()

    def _look(self) -> None:
        waited_s = self._clock.now() - self._since_s
        if self.transport.is_closing():
            unread_bytes = self.transport.get_write_buffer_size()
            self._stuck_looks = self._stuck_looks + 1 if unread_bytes == self._unread_bytes else 0
            self._unread_bytes = unread_bytes
            if self._stuck_looks > MAX_STUCK_LOOKS:
                self.transport.abort()
                return
        elif not self._unanswered and self._receiving and waited_s > RECEIVE_S:
            self._refuse(408, f"request: it was not complete within {RECEIVE_S:g} s")
        elif not self._unanswered and waited_s > IDLE_S:
            self.transport.close()
        self._looking = self.loop.call_later(LOOK_S, self._look)


class HttpServer(uvicorn.Server):
    """An HTTP server for ``app``, with the TLS of ``gateway``. `stop` sets ``over``, which ends the calls.
    `LaunchError` if the port is in use."""

    def __init__(self, app: FastAPI, gateway: GatewayConfig, over: asyncio.Future[None]) -> None:
        host, port = gateway.host, gateway.served_http_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends small writes at once only on sockets whose protocol is named; else each token waits for an ACK.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise LaunchError(
                f"gateway.http_port: {port} on {host} cannot be used ({error.strerror}); choose another with --set "
                "gateway.http_port=PORT, or none with --set gateway.http_port=0"
            ) from None
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(IDLE_S),
            ssl_certfile=gateway.tls_cert,
            ssl_keyfile=gateway.tls_key and str(gateway.tls_key),
            ssl_ca_certs=gateway.tls_client_ca and str(gateway.tls_client_ca),
            ssl_cert_reqs=ssl.CERT_NONE if gateway.tls_client_ca is None else ssl.CERT_REQUIRED,
        )
        super().__init__(config)
        self._serving: asyncio.Task[None] | None = None
        self._over = over

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the gateway's process's own."""
        yield

    async def start(self) -> None:
        """Return when it serves."""
        self._serving = asyncio.create_task(self.serve([self._socket]))
        while not self.started:
            if self._serving.done():
                self._serving.result()
                raise LaunchError("gateway.http_port: the HTTP server ended while it started")
            await asyncio.sleep(0.001)

    async def stop(self, grace_s: float) -> None:
        """Refuse new connections, let running calls go on for ``grace_s``, then end them with an error. Cancel those
        whose clients do not read it."""
        if self._serving is None:
            self._socket.close()
            return
        self.config.timeout_graceful_shutdown = math.ceil(grace_s + 1)
        self.should_exit = True
        asyncio.get_running_loop().call_later(grace_s, self._over.set_result, None)
        await self._serving
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client does not read
