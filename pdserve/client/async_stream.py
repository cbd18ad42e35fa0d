"""One request's stream, for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from core.errors import PdserveError, RequestAborted
from pb import inference_pb2 as pb
from pdserve.client.assembler import Assembler
from pdserve.client.channel import error_from_status
from pdserve.client.generation import Generation, Token

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncStream:
    """Tokens as they come (``async for``), then `result`. The call leaves on first use, after the channel is
    connected; read promptly, for a token's time is that of its reading. Leaving ``async with`` cancels what is not
    finished. Errors are those of `core.errors`; each later use raises the same one again."""

    def __init__(self, connect: Callable[[], Awaitable[None]], start: Callable[[], Call], target: str) -> None:
        self._connect = connect
        self._start = start
        self._target = target
        self._call: Call | None = None
        self._messages: AsyncIterator[pb.GenerateResponse] | None = None
        self._assembler: Assembler | None = None
        self._error: PdserveError | None = None
        self._result: Generation | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        if self._error is not None:
            raise self._error
        if self._result is not None:
            raise StopAsyncIteration
        try:
            token = await self._next()
        except PdserveError as error:
            self._error = error
            raise
        if token is None:
            raise StopAsyncIteration
        return token

    async def _next(self) -> Token | None:
        if self._messages is None or self._assembler is None:
            await self._connect()
            self._assembler = Assembler(time.monotonic())
            self._call = self._start()
            self._messages = self._call.__aiter__()
        while True:
            try:
                message = await anext(self._messages)
            except StopAsyncIteration:
                self._result = self._assembler.result()
                return None
            except grpc.RpcError as error:
                raise error_from_status(error.code(), error.details(), self._target) from None
            except asyncio.CancelledError:
                # grpc.aio says the same for our own cancel() and for a cancelled task.
                if isinstance(self._error, RequestAborted):
                    raise self._error from None
                raise
            token = self._assembler.add(message, time.monotonic())
            if token is not None:
                return token

    async def result(self) -> Generation:
        """Read what is left and return the whole generation."""
        async for _ in self:
            pass
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Give the request up; nothing if it has ended. Readers get `RequestAborted`."""
        if self._result is None and self._error is None:
            self._error = RequestAborted("cancelled by the client")
            if self._call is not None:
                self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
