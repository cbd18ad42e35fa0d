"""Refuses messages that are no valid protobuf, for services whose code gets them parsed.

gRPC answers such a message with UNKNOWN and logs a traceback. For a client's mistake that is the wrong status, and
clients could fill the log."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from gateway.grpc_api.failures import Context, failure_of
from pdserve.core.errors import InvalidRequest

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

Parse = Callable[[bytes], Any]


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """INVALID_ARGUMENT for malformed messages. Calls whose handler takes bytes are left to it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler, with its messages checked."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]  # its kinds are not in the stubs
        parse, codec = handler.request_deserializer, {"response_serializer": handler.response_serializer}
        if inspect.iscoroutinefunction(handler.unary_unary):
            return grpc.unary_unary_rpc_method_handler(_of_one(handler.unary_unary, parse), **codec)
        if inspect.iscoroutinefunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(_of_one(handler.unary_stream, parse), **codec)
        if inspect.isasyncgenfunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(_of_many(handler.stream_stream, parse), **codec)
        raise TypeError(f"{handler_call_details.method}: no way to check the messages of such a handler")


def _of_one(behaviour: Callable[[Any, Context], Awaitable[Any]], parse: Parse) -> Callable[[bytes, Context], Any]:
    async def serve(data: bytes, context: Context) -> Any:
        return await behaviour(await _parsed(data, parse, context), context)

    return serve


def _of_many(
    behaviour: Callable[[AsyncIterator[Any], Context], AsyncIterator[Any]], parse: Parse
) -> Callable[[AsyncIterator[bytes], Context], AsyncIterator[Any]]:
    async def serve(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        async def messages() -> AsyncIterator[Any]:
            async for data in requests:
                yield await _parsed(data, parse, context)

        async for response in behaviour(messages(), context):
            yield response

    return serve


async def _parsed(data: bytes, parse: Parse, context: Context) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        refusal = InvalidRequest(f"message: it is not valid, or a string in it is not UTF-8 ({error})")
        await failure_of(refusal).end(context)
