"""One request's stream, for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import grpc.aio

from core.errors import PdserveError, RequestAborted
from pb import inference_pb2 as pb
from pdserve.client.assembler import Assembler
from pdserve.client.channel import error_from_status
from pdserve.client.generation import Generation, Token

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


Arrival = tuple[pb.GenerateResponse, float] | grpc.aio.AioRpcError | asyncio.CancelledError | None
"""A message and when it came (monotonic seconds), what ended the call, or None: it is complete."""


async def _read(call: Call, arrivals: asyncio.Queue[Arrival]) -> None:
    try:
        async for message in call:
            arrivals.put_nowait((message, time.monotonic()))
    except grpc.aio.AioRpcError as error:
        arrivals.put_nowait(error)
    except asyncio.CancelledError as error:  # grpc.aio says this of our own cancel() too
        arrivals.put_nowait(error)
        raise
    else:
        arrivals.put_nowait(None)


class AsyncStream:
    """Tokens as they come (``async for``), then `result`. The call leaves on first use, after the channel is
    connected. A task reads ahead, so that a token's time is that of its arrival whatever else awaits in between (but
    nothing can be read while the event loop is kept busy). Leaving ``async with`` cancels what is not finished. Errors
    are those of `core.errors`; each later use raises the same one again."""

    def __init__(self, connect: Callable[[], Awaitable[None]], start: Callable[[], Call], target: str) -> None:
        self._connect = connect
        self._start = start
        self._target = target
        self._call: Call | None = None
        self._arrivals: asyncio.Queue[Arrival] | None = None
        self._reader: asyncio.Task[None] | None = None
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
        if self._arrivals is None or self._assembler is None:
            await self._connect()
            self._arrivals = asyncio.Queue()
            self._assembler = Assembler(time.monotonic())
            self._call = self._start()
            self._reader = asyncio.create_task(_read(self._call, self._arrivals))
        arrival = await self._arrivals.get()
        while isinstance(arrival, tuple):
            token = self._assembler.add(*arrival)
            if token is not None:
                return token
            arrival = await self._arrivals.get()
        if arrival is None:
            self._result = self._assembler.result()
            return None
        if isinstance(self._error, RequestAborted):
            raise self._error
        if isinstance(arrival, asyncio.CancelledError):
            raise RequestAborted("cancelled by the client")
        raise error_from_status(arrival.code(), arrival.details(), self._target, arrival.trailing_metadata())

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
