"""Refuses new requests while the gateway drains, and counts those that are still in progress."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from core.errors import NotReady
from gateway.statuses import ERROR_KIND_KEY, status_of


class Draining(grpc.aio.ServerInterceptor):
    """Stands before one streaming ``method`` of a server (``/package.Service/Method``)."""

    def __init__(self, method: str) -> None:
        self._method = method
        self.error: NotReady | None = None
        """What new calls are refused with; None: they are served."""
        self.in_progress = 0
        """Calls that have begun and not ended."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by gRPC for each call."""
        handler = await continuation(details)
        if handler is None or details.method != self._method:
            return handler
        serve: Any = handler.unary_stream  # the stubs know the threaded kind only

        async def counted(request: Any, context: Any) -> AsyncIterator[Any]:
            if self.error is not None:
                await context.abort(status_of(self.error), str(self.error), ((ERROR_KIND_KEY, NotReady.__name__),))
            self.in_progress += 1
            try:
                async with aclosing(serve(request, context)) as responses:
                    async for response in responses:
                        yield response
            finally:
                self.in_progress -= 1

        return grpc.unary_stream_rpc_method_handler(counted, handler.request_deserializer, handler.response_serializer)
