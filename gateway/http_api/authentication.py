"""Identifies the callers of the HTTP API before their bodies are read."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.callers import Caller
from gateway.http_api.failures import failure_of
from pdserve.core.errors import Unauthenticated

HEALTH_PATH = "/health"
HEALTHZ_PATH = "/healthz"
PAGE_PATH = "/"
MANUAL_PATH = "/docs"
OPEN_PATHS = frozenset({HEALTH_PATH, HEALTHZ_PATH, PAGE_PATH, MANUAL_PATH})
"""Paths that need no token: load balancers and orchestrators ask for the health, the live page is a form until it has a
token for its data, and the API's page has nothing of the service."""

_CALLER = "pdserve.caller"


class Authentication:
    """ASGI middleware, which notes the caller of each call. Refuses callers that ``identify`` does not know."""

    def __init__(self, app: ASGIApp, identify: Callable[[str], Caller]) -> None:
        self._app = app
        self._identify = identify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            values = Headers(scope=scope).getlist("authorization")
            try:
                scope[_CALLER] = self._identify(values[0] if len(values) == 1 else "")
            except Unauthenticated as error:
                failure = failure_of(error)
                await JSONResponse(failure.body, failure.status, dict(failure.headers))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def caller_of(scope: Scope) -> Caller:
    """Who makes the call."""
    caller = scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller
