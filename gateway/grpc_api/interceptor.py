"""What happens to a gRPC call before its handler: its caller is identified, and malformed messages are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from gateway.callers import Caller
from gateway.failures import Context, end_call
from gateway.grpc_api.connection_guard import ConnectionGuard
from pdserve.core.errors import InvalidRequest, Unauthenticated

_OPEN = f"/{health.SERVICE_NAME}/"
"""Calls that need no token: load balancers and orchestrators ask for the health."""

CALLER: ContextVar[Caller] = ContextVar("CALLER")
"""The caller of the running call."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Interceptor(grpc.aio.ServerInterceptor):
    """Sets `CALLER` for all calls but those for the health. Refuses callers that ``identify`` does not know, and tells
    the ``guard`` of their calls. Refuses messages that are no valid protobuf, for which gRPC's own status is UNKNOWN
    with a traceback in the log; a handler that takes bytes parses them itself."""

    def __init__(self, identify: Callable[[str], Caller], guard: ConnectionGuard) -> None:
        self._identify = identify
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of a call, or one that refuses it. A handler of streams reads no message before it runs, and
        serves calls of all kinds."""
        if not handler_call_details.method.startswith(_OPEN):
            try:
                authorization = metadata_of(handler_call_details.invocation_metadata, "authorization")
                CALLER.set(self._identify(authorization))
            except Unauthenticated as error:
                refusal = error

                async def refuse(requests: object, context: Context) -> None:
                    self._guard.unauthenticated(context.peer())
                    await end_call(context, refusal)

                return grpc.stream_stream_rpc_method_handler(refuse)
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]  # its kinds are not in the stubs

        async def serve(requests: AsyncIterator[bytes], context: Context) -> None:
            messages = _parsed(requests, handler.request_deserializer, context)
            if handler.stream_stream is not None:
                async for response in handler.stream_stream(messages, context):
                    await context.write(response)
                return
            if (message := await anext(messages, None)) is None:
                await end_call(context, InvalidRequest("message: the call ended without one"))
            if handler.unary_unary is not None:
                await context.write(await handler.unary_unary(message, context))
            else:
                await handler.unary_stream(message, context)

        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)


async def _parsed(
    requests: AsyncIterator[bytes], parse: Callable[[bytes], Any], context: Context
) -> AsyncIterator[Any]:
    async for data in requests:
        try:
            message = parse(data)
        except DecodeError as error:
            why = f"message: it is not valid, or a string in it is not UTF-8 ({error})"
            await end_call(context, InvalidRequest(why))
        yield message


def metadata_of(metadata: Iterable[Any] | None, name: str) -> str:
    """The value of the metadata ``name``; empty if there is none, or more than one."""
    values = [value for key, value in metadata or () if key == name and isinstance(value, str)]
    return values[0] if len(values) == 1 else ""
