"""A connection of the HTTP server: uvicorn's, with bounds on what its client can do before and after a request.

uvicorn waits without limit for a request's head, takes heads and trailers of any length and any number of requests
ahead of their answers, and lets a client that does not read keep its answer in memory after the end of the request.
When a client leaves, it tells only the request that came last."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.http_api.failures import described
from pdserve.core.errors import InvalidRequest
from runtime.awake_clock import awake_clock

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


class Connection(HttpToolsProtocol):
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
            body = json.dumps(described(InvalidRequest(message), status)).encode()
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
