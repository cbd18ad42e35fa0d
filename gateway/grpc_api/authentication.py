"""Identifies the callers of the gRPC API before their messages are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health

from gateway.callers import Caller
from gateway.grpc_api.connection_guard import ConnectionGuard
from gateway.grpc_api.failures import Context, failure_of
from pdserve.core.errors import Unauthenticated

_OPEN = f"/{health.SERVICE_NAME}/"
"""Calls that need no token: load balancers and orchestrators ask for the health."""

CALLER: ContextVar[Caller] = ContextVar("CALLER")
"""The caller of the running call."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Authentication(grpc.aio.ServerInterceptor):
    """Sets `CALLER` for all calls but those for the health. Refuses callers that ``identify`` does not know, and tells
    the ``guard`` of their calls."""

    def __init__(self, identify: Callable[[str], Caller], guard: ConnectionGuard) -> None:
        self._identify = identify
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of a call, or one that refuses it."""
        if not handler_call_details.method.startswith(_OPEN):
            try:
                CALLER.set(self._identify(_authorization(handler_call_details.invocation_metadata)))
            except Unauthenticated as error:
                return self._refusal(error)
        return await continuation(handler_call_details)

    def _refusal(self, error: Unauthenticated) -> Handler:
        async def refuse(requests: object, context: Context) -> NoReturn:
            self._guard.unauthenticated(context.peer())
            await failure_of(error).end(context)

        # A handler of streams reads no message before it runs, so it serves calls of all kinds.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _authorization(metadata: Iterable[Any] | None) -> str:
    """The value of the metadata ``authorization``; empty if there is none, or more than one."""
    values = [value for key, value in metadata or () if key == "authorization" and isinstance(value, str)]
    return values[0] if len(values) == 1 else ""
