"""One call of the HTTP API as an ASGI response: reads the body, ends when the client leaves, and reports failures."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http_api.authentication import caller_of
from gateway.http_api.bodies import Bodies, Body
from gateway.http_api.failures import Failure, failure_of, invalid_body
from gateway.http_api.requests import CallBody
from gateway.inference import Arrival, ClientLeft, Inference
from pdserve.core.errors import BodyIncomplete, DeadlineExceeded, PdserveError
from runtime.awake_clock import wait_awake

log = logging.getLogger(__name__)

SEND_FAILURE_S = 5.0
"""Time for sending a failure's reason to the client."""
_ENCODER = msgspec.json.Encoder()

B = TypeVar("B", bound=CallBody)


class Exchange(Response):
    """Subclasses answer in `respond`. Each call of one has a body of ``body_type``."""

    body_type: ClassVar[type[CallBody]]
    media_types: ClassVar[dict[bool, bytes]] = {False: b"application/json", True: b"text/event-stream; charset=utf-8"}

    def __init__(self, inference: Inference, bodies: Bodies) -> None:
        # Starlette's own attributes of a response are not used: everything is sent by `__call__`.
        self.background = None
        self._inference = inference
        self._bodies = bodies
        self._own_headers: list[tuple[bytes, bytes]] = []
        self._begun = False
        self._streams = False

    @abstractmethod
    async def respond(self, body: Body, arrival: Arrival) -> None:
        """Send the answer with `send_json`, or `send_event` and `end_events`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call. A client that leaves cancels it."""
        self._send = send
        self._caller = caller_of(scope)
        self._host = (scope.get("client") or ("",))[0]
        self._request_headers = Headers(scope=scope)
        answering = asyncio.create_task(self._answer(receive))
        try:
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer(self, receive: Receive) -> None:
        try:
            traceparent = self._request_headers.get("traceparent", "")
            with (
                self._inference.admission(self._caller, None, traceparent, self._host) as arrival,
                self._bodies.arriving(arrival.client(""), self._request_headers, self.body_type.shape) as body,
            ):
                await self._read(receive, body, arrival)
                self._inference.was_read()
                responding = asyncio.create_task(self.respond(body, arrival))
                leaving = asyncio.create_task(_left(receive))
                try:
                    await asyncio.wait((responding, leaving), return_when=asyncio.FIRST_COMPLETED)
                    if not responding.done():
                        raise ClientLeft
                    responding.result()
                finally:
                    for task in (responding, leaving):
                        task.cancel()
                    await asyncio.gather(responding, leaving, return_exceptions=True)
            return
        except ClientLeft:
            return
        except PdserveError as error:
            failure = failure_of(error)
        except Exception as error:
            log.exception("unexpected error in a request")
            failure = failure_of(error)
        sending = asyncio.create_task(self._send_failure(failure))
        if await wait_awake(sending, SEND_FAILURE_S):
            sending.result()
        else:  # the client does not read
            sending.cancel()

    def add_header(self, name: str, value: str) -> None:
        """Send a header with the answer."""
        self._own_headers.append((name.encode(), value.encode()))

    async def send_json(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer."""
        data = _ENCODER.encode(content)
        own = [(key.encode(), value.encode()) for key, value in (headers or {}).items()]
        await self._start(status, [(b"content-length", str(len(data)).encode()), *own])
        await self._send({"type": "http.response.body", "body": data})

    async def send_event(self, content: Any) -> None:
        """Send one event of a stream. Blocks while the client does not read."""
        if not self._begun:
            self._streams = True
            await self._start(200, [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        data = b"data: " + _ENCODER.encode(content) + b"\n\n"
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self) -> None:
        """Send the end of a stream."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        typed = [(b"content-type", self.media_types[self._streams]), *headers, *self._own_headers]
        await self._send({"type": "http.response.start", "status": status, "headers": typed})
        self._begun = True

    async def _send_failure(self, failure: Failure) -> None:
        if not self._begun:
            self._streams = False
            await self.send_json(failure.body, failure.status, failure.headers)
        elif self._streams:
            await self.send_event(failure.body)
            await self.end_events()

    async def _read(self, receive: Receive, body: Body, arrival: Arrival) -> None:
        try:
            await arrival.deadline.bound(_receive(receive, body), "the client was sending its body")
        except DeadlineExceeded as error:
            raise BodyIncomplete(f"body: {error}") from None


def parsed(body_type: type[B], body: bytes | bytearray) -> B:
    """The body as ``body_type``. `InvalidRequest` names the first field that is wrong."""
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from None


async def _receive(receive: Receive, body: Body) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body.add(message.get("body", b""))
        if not message.get("more_body"):
            return


async def _left(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
