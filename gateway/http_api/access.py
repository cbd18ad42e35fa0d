"""Who may call the HTTP API: refuses calls for other hosts and of unknown callers before anything else of them is read.

A browser lets a web page read the answers of its own host only. With DNS rebinding the page's owner lets the name of
that host point to an address of the reader's network, such as 127.0.0.1, and so reaches services that ask for neither a
token nor a certificate. The header Host then has the page's name. No page can have the name of an address, so hosts
that are addresses are always allowed."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.callers import Caller
from gateway.failures import http_failure
from gateway.inference import Inference
from pdserve.core.errors import InvalidRequest, PdserveError

OPEN_PATHS = frozenset({"/health", "/healthz", "/", "/docs"})
"""Paths that need no token: load balancers and orchestrators ask for the health, the live page is a form until it has a
token for its data, and the API's page has nothing of the service."""

_CALLER = "pdserve.caller"
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:]*))(?::\d*)?")
"""An IPv6 address or another host, and perhaps a port."""


class Access:
    """ASGI middleware, which notes the caller of each call. Its Host may be an address, ``localhost``, or one of
    ``host_names`` (in lower case; None: any). Calls without a Host, which no browser sends, are not refused."""

    def __init__(self, app: ASGIApp, inference: Inference, host_names: Collection[str] | None) -> None:
        self._app = app
        self._inference = inference
        self._names = host_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                for host in headers.getlist("host"):
                    self._check_host(host)
                if scope["path"] not in OPEN_PATHS:
                    values = headers.getlist("authorization")
                    scope[_CALLER] = self._inference.identify(values[0] if len(values) == 1 else "")
            except PdserveError as error:
                await JSONResponse(*http_failure(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        if self._names is None or not host:
            return
        if (found := _HOST.fullmatch(host)) is not None:
            address, name = found.groups()
            try:
                ipaddress.ip_address(name if address is None else address)
            except ValueError:
                name = (name or "").lower().removesuffix(".")
                if name in self._names or name == "localhost" or name.endswith(".localhost"):
                    return
            else:
                return
        error = InvalidRequest(
            f"host: {host[:80]!r} is no name of this service; use its address, or add the name to "
            "gateway.allowed_hosts",
            kind="HostNotAllowed",
        )
        self._inference.failed(error)
        raise error


def caller_of(scope: Scope) -> Caller:
    """Who makes the call."""
    caller = scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller
