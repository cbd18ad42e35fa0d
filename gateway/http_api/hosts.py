"""Refuses HTTP calls for other hosts, before anything else of them is looked at.

A browser lets a web page read the answers of its own host only. With DNS rebinding the page's owner lets the name of
that host point to an address of the reader's network, such as 127.0.0.1, and so reaches services that ask for neither a
token nor a certificate. The header Host then has the page's name. No page can have the name of an address, so hosts
that are addresses are always allowed."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http_api.failures import failure_of
from pdserve.core.errors import HostNotAllowed, PdserveError

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:]*))(?::\d*)?")
"""An IPv6 address or another host, and perhaps a port."""


class AllowedHosts:
    """ASGI middleware, which refuses calls whose Host is neither an address, nor ``localhost``, nor one of ``names``
    (in lower case). Tells ``refused`` of them. Calls without a Host, which no browser sends, are not refused."""

    def __init__(self, app: ASGIApp, names: Collection[str], refused: Callable[[PdserveError], None]) -> None:
        self._app = app
        self._names = frozenset(names)
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call, or refuse it."""
        if scope["type"] == "http":
            for host in Headers(scope=scope).getlist("host"):
                if host and not self._allows(host):
                    error = HostNotAllowed(
                        f"host: {host[:80]!r} is no name of this service; use its address, or add the name to "
                        "gateway.allowed_hosts"
                    )
                    self._refused(error)
                    failure = failure_of(error)
                    await JSONResponse(failure.body, failure.status)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        address, name = found.groups()
        try:
            ipaddress.ip_address(name if address is None else address)
        except ValueError:
            name = (name or "").lower().removesuffix(".")
            return name in self._names or name == "localhost" or name.endswith(".localhost")
        return True
