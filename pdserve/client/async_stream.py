"""One request's stream, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Protocol, Self

import grpc.aio

from pdserve.client.ask import Ask
from pdserve.client.assembler import Assembler
from pdserve.client.channel import CONNECT_TIMEOUT_S, client_closed, error_from_status
from pdserve.client.failover import Failover
from pdserve.client.generation import Generation, Token
from pdserve.core.errors import NotReady, PdserveError, RequestAborted
from pdserve.pb import inference_pb2 as pb

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class Gateway(Protocol):
    """A gateway that a stream can come from. Its methods raise `PdserveError`."""

    @property
    def target(self) -> str:
        """Where it is."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether its client was closed."""
        ...

    async def connect(self, timeout_s: float) -> None:
        """Connect; `NotReady` if it does not answer."""
        ...

    def start(self, ask: Ask, token_ids: Sequence[int]) -> Call:
        """Ask for the tokens after ``token_ids``."""
        ...


Arrival = tuple[pb.GenerateResponse, float] | grpc.aio.AioRpcError | asyncio.CancelledError | None
"""A message with its arrival time (monotonic seconds), the error that ended the call, or None at its end."""


async def _read(call: Call, arrivals: asyncio.Queue[Arrival]) -> None:
    try:
        async for message in call:
            arrivals.put_nowait((message, time.monotonic()))
    except grpc.aio.AioRpcError as error:
        arrivals.put_nowait(error)
    except asyncio.CancelledError as error:  # grpc.aio also raises this after our own cancel()
        arrivals.put_nowait(error)
        raise
    else:
        arrivals.put_nowait(None)


def _cancel(loop: asyncio.AbstractEventLoop, call: Call) -> None:
    """Cancel ``call``, which belongs to ``loop``, from any thread, because the garbage collector runs in any thread."""
    if loop.is_closed():  # the reader and the call were cancelled with the loop
        return
    if loop.is_running() and not _runs_here(loop):
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            loop.call_soon_threadsafe(call.cancel)
    else:
        call.cancel()


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class AsyncStream:
    """The tokens of one request (``async for``), then its `result`. The call starts on first use, after the channel is
    connected. A task reads ahead, so that a token's time is that of its arrival, whatever the caller awaits in between;
    nothing can be read while the event loop is blocked.

    The request is cancelled when the stream is left early: an ``async for`` loop over it ends (``break``, an
    exception), the task that awaits it is cancelled (also by `asyncio.wait_for` or `asyncio.timeout`), ``async with``
    is left, the stream is closed or garbage collected, or its client is closed. To read some tokens and continue later,
    call ``await anext(stream)``. Errors are those of `pdserve.core.errors`; later uses raise the same error again.

    ``gateways`` are asked in this order: the next one if one is not ready, or is lost during the call; it goes on after
    the tokens that have arrived. None is asked a second time before a further token has arrived."""

    def __init__(self, ask: Ask, gateways: Sequence[Gateway]) -> None:
        self._ask = ask
        self._gateways = Failover(gateways)
        self._cancel_call: weakref.finalize[[asyncio.AbstractEventLoop, Call], AsyncStream] | None = None
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._assembler: Assembler | None = None
        self._error: PdserveError | None = None
        self._result: Generation | None = None

    @property
    def target(self) -> str:
        """The gateway that is asked."""
        return self._gateways.current.target

    def __aiter__(self) -> AsyncIterator[Token]:
        return _AsyncStreamLoop(self)

    async def __anext__(self) -> Token:
        token = await self._advance()
        if token is None:
            raise StopAsyncIteration
        return token

    async def _advance(self) -> Token | None:
        """The next token; None at the end of the stream."""
        if self._error is not None:
            raise self._error
        if self._result is not None:
            return None
        try:
            return await self._next()
        except PdserveError as error:
            self._error = self._error or error  # keeps the error of a cancellation meanwhile
        except BaseException:
            self._abort("the task that read its stream was cancelled or interrupted")
            raise
        raise self._error

    async def _next(self) -> Token | None:
        assembler = self._assembler or await self._begin()
        while True:
            arrival = await self._arrivals.get()
            if isinstance(arrival, tuple):
                token = assembler.add(*arrival)
                if token is not None:
                    self._gateways.served()
                    return token
                continue
            if (
                isinstance(arrival, grpc.aio.AioRpcError)
                and self._error is None
                and not self._gateways.current.is_closed
            ):
                error = error_from_status(
                    arrival.code(), arrival.details(), self.target, arrival.trailing_metadata(), assembler.has_begun
                )
                try:
                    await self._go_on(assembler, error)
                except BaseException:
                    self._arrivals.put_nowait(arrival)
                    raise
                continue
            self._arrivals.put_nowait(arrival)  # for other tasks that read this stream
            if self._error is not None:
                raise self._error
            if arrival is None:
                self._result = assembler.result()
                return None
            if self._gateways.current.is_closed:
                raise client_closed(self.target)
            raise RequestAborted("cancelled by the client: the task that receives its tokens was cancelled")

    async def _begin(self) -> Assembler:
        await self._connect()
        if self._error is not None:  # cancelled in the meantime
            raise self._error
        if self._assembler is None:
            self._assembler = Assembler(time.monotonic())
            self._call([])
        return self._assembler

    async def _go_on(self, assembler: Assembler, error: PdserveError) -> None:
        """Have another gateway go on after ``error``. Raises it if there is none, or none could do better."""
        if not isinstance(error, NotReady):
            raise error
        self._gateways.turn(error)
        await self._connect()
        if self._error is not None:
            raise self._error
        if assembler.has_begun:
            assembler.resumed()
        self._call(assembler.token_ids)

    async def _connect(self) -> None:
        """Connect to the first gateway that answers."""
        while True:
            try:
                return await self._gateways.current.connect(self._ask.connect_timeout_s(CONNECT_TIMEOUT_S))
            except NotReady as error:
                self._gateways.turn(error)

    def _call(self, token_ids: Sequence[int]) -> None:
        """Ask for the tokens after these, and read the answer in a task."""
        call = self._gateways.current.start(self._ask, token_ids)
        if self._cancel_call is not None:
            self._cancel_call.detach()
        self._cancel_call = weakref.finalize(self, _cancel, asyncio.get_running_loop(), call)
        self._cancel_call.atexit = False  # the process's end closes the connection
        self._reader = asyncio.create_task(_read(call, self._arrivals))

    async def result(self) -> Generation:
        """Read the remaining tokens and return the whole generation."""
        while await self._advance() is not None:
            pass
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Cancel the request, unless it has ended. Readers get `RequestAborted`."""
        self._abort("")

    async def aclose(self) -> None:
        """The same as `cancel`, for `contextlib.aclosing`."""
        self._abort("its stream was closed")

    def _abort(self, reason: str) -> None:
        if self._result is None and self._error is None:
            self._error = RequestAborted("cancelled by the client" + (reason and f": {reason}"))
            if self._cancel_call is not None:
                self._cancel_call()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _AsyncStreamLoop:
    """The iterator of an ``async for`` loop. The request is cancelled if it is deleted before the end."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:  # a coroutine, which keeps this iterator alive while it waits
        return await anext(self._stream)

    def __del__(self) -> None:
        self._stream._abort("the loop over its stream ended early; use anext(stream) to read on later")
