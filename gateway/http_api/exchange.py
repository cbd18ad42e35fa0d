"""One call of the HTTP API as an ASGI response: reads the body, ends when the client leaves, and reports failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.admitted_call import AdmittedCall
from gateway.chat_template import ChatTemplate
from gateway.failures import error_object, http_failure, sent_in_time, statuses_of
from gateway.http_api.access import caller_of
from gateway.http_api.bodies import Bodies, Body
from gateway.http_api.requests import CallBody, parsed
from gateway.inference import STOPPING, Inference
from pdserve.core.errors import DeadlineExceeded, InvalidRequest, NotReady, PdserveError, RequestAborted

log = logging.getLogger(__name__)

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the calls need."""

    inference: Inference
    model: str
    """The name that the model is served under."""
    chat_template: ChatTemplate | None
    bodies: Bodies
    over: asyncio.Future[None] = field(default_factory=asyncio.Future)
    """Done when the service ends: calls that still run are refused."""

    def check_model(self, asked: str | None) -> None:
        """`InvalidRequest` unless ``asked`` is the served model, or None."""
        if asked not in (None, self.model):
            raise InvalidRequest(f"model: {asked!r} is not served here; use {self.model!r}", kind="UnknownModel")


class Exchange(Response):
    """A call with a body of ``body_type``. ``prepare`` makes of the body what ``respond`` needs, perhaps in another
    thread. ``respond`` sends the answer with `send_json`, or `send_event` and `end_events`."""

    def __init__(
        self,
        served: ServedModel,
        body_type: type[CallBody],
        prepare: Callable[[Any], Any],
        respond: Callable[[Exchange, Any, AdmittedCall], Awaitable[None]],
    ) -> None:
        # Starlette's own attributes of a response are not used: everything is sent by `__call__`.
        self.background = None
        self._served = served
        self._body_type, self._prepare, self._respond = body_type, prepare, respond
        self.headers_sent: dict[str, str] = {}
        """Further headers of the answer."""
        self._begun = self._streams = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call. A client that leaves cancels it."""
        self._send = send
        answering = asyncio.create_task(self._answer(scope, receive))
        try:
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive) -> None:
        inference, bodies = self._served.inference, self._served.bodies
        headers, (host, *_) = Headers(scope=scope), scope.get("client") or ("",)
        try:
            with (
                inference.admission(caller_of(scope), None, headers.get("traceparent", ""), host) as call,
                bodies.arriving(call.client(), headers, self._body_type.limits) as body,
            ):
                try:
                    await call.deadline.bound(_receive(receive, body), "the client was sending its body")
                except DeadlineExceeded as error:
                    raise InvalidRequest(f"body: {error}", kind="BodyIncomplete") from None
                inference.was_read()
                responding = asyncio.create_task(self._run(body, call))
                leaving = asyncio.create_task(_left(receive))
                try:
                    over = self._served.over
                    await asyncio.wait((responding, leaving, over), return_when=asyncio.FIRST_COMPLETED)
                    if not responding.done():
                        raise NotReady(STOPPING) if over.done() else RequestAborted("the client has left")
                    responding.result()
                finally:
                    for task in (responding, leaving):
                        task.cancel()
                    await asyncio.gather(responding, leaving, return_exceptions=True)
            return
        except RequestAborted:
            return
        except PdserveError as error:
            failure: Exception = error
        except Exception as error:
            log.exception("unexpected error in a request")
            failure = error
        await sent_in_time(self._send_failure(failure, scope, receive))

    async def _run(self, body: Body, call: AdmittedCall) -> None:
        await self._respond(self, await self._served.bodies.parse(body, self._read, call.deadline), call)

    def _read(self, data: bytearray) -> Any:
        body = parsed(self._body_type, data)
        self._served.check_model(body.model)
        return self._prepare(body)

    async def send_json(self, content: Any) -> None:
        """Send a whole answer."""
        data = _ENCODER.encode(content)
        await self._start({"content-type": "application/json", "content-length": str(len(data))})
        await self._send({"type": "http.response.body", "body": data})

    async def send_event(self, content: Any) -> None:
        """Send one event of a stream. Blocks while the client does not read."""
        if not self._begun:
            self._streams = True
            typed = {"content-type": "text/event-stream; charset=utf-8"}
            await self._start({**typed, "cache-control": "no-cache", "x-accel-buffering": "no"})
        data = b"data: " + _ENCODER.encode(content) + b"\n\n"
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self) -> None:
        """Send the end of a stream."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _start(self, headers: dict[str, str]) -> None:
        sent = [(name.encode(), value.encode()) for name, value in {**headers, **self.headers_sent}.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": sent})
        self._begun = True

    async def _send_failure(self, error: Exception, scope: Scope, receive: Receive) -> None:
        if not self._begun:
            await JSONResponse(*http_failure(error, self.headers_sent))(scope, receive, self._send)
        elif self._streams:
            await self.send_event(error_object(error, statuses_of(error)[1]))
            await self.end_events()


async def _receive(receive: Receive, body: Body) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestAborted("the client has left")
        body.add(message.get("body", b""))
        if not message.get("more_body"):
            return


async def _left(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
