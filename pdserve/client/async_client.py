"""The client for asyncio, and the stream of one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from pdserve.client.channel import CONNECT_TIMEOUT_S, GrpcGateway, silent, unreachable
from pdserve.client.core import Arrival, ClientCore, GatewayCore, StreamCore, client_closed
from pdserve.client.generation import Generation, Token
from pdserve.client.request import Ask, GenerateOptions, Prompt
from pdserve.client.status import ServiceStatus
from pdserve.client.target import DEFAULT_TARGET, AccessOptions, Target, Targets
from pdserve.core.errors import NotReady, PdserveError
from pdserve.pb import inference_pb2 as pb


class AsyncGateway(GrpcGateway):
    """The connection to one gateway."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, grpc.aio)

    async def connect(self, timeout_s: float) -> None:
        """See `AsyncClient.connect`."""
        with self._while_open():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._connect()
            except TimeoutError:
                raise silent(self._where) from None

    async def _connect(self) -> None:
        state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise await asyncio.to_thread(unreachable, self._where)
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)

    async def status(self, timeout_s: float) -> ServiceStatus:
        """See `AsyncClient.status`."""
        await self.connect(timeout_s)
        try:
            with self._while_open():
                request, metadata = pb.GetStatusRequest(), self._access
                answer = await self._stub.GetStatus(request, timeout=timeout_s, metadata=metadata)
                return ServiceStatus.from_proto(answer)
        except grpc.aio.AioRpcError as error:
            raise self.failure(error) from None

    async def ready(self, timeout_s: float) -> bool:
        """See `AsyncClient.ready`."""
        try:
            await self.connect(timeout_s)
            with self._while_open():
                answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except (NotReady, grpc.aio.AioRpcError):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Close the channel; running requests are cancelled."""
        self.is_closed = True
        await self._channel.close(None)

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Translate what grpc.aio raises for calls over a closed channel (UsageError, CancelledError)."""
        try:
            yield
        except (grpc.aio.UsageError, asyncio.CancelledError):
            task = asyncio.current_task()
            if self.is_closed and not (task and task.cancelling()):
                raise client_closed(self.target) from None
            raise


async def _read(call: Any, arrivals: asyncio.Queue[Arrival], now: Callable[[], float]) -> None:
    try:
        async for message in call:
            arrivals.put_nowait((message, now()))
    except Exception as error:  # noqa: BLE001 - the stream raises what it means
        arrivals.put_nowait(error)
    except asyncio.CancelledError as error:  # grpc.aio also raises this after our own cancel()
        arrivals.put_nowait(error)
        raise
    else:
        arrivals.put_nowait(None)


def _cancel(loop: asyncio.AbstractEventLoop, call: Any) -> None:
    """Cancel ``call``, which belongs to ``loop``, from any thread, because the garbage collector runs in any thread."""
    if loop.is_closed():  # the reader and the call were cancelled with the loop
        return
    if loop.is_running() and not _runs_here(loop):
        with suppress(RuntimeError):  # closed meanwhile
            loop.call_soon_threadsafe(call.cancel)
    else:
        call.cancel()


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class AsyncStream(StreamCore[GatewayCore]):
    """The tokens of one request (``async for``), then its `result`. The call starts on first use, after the channel is
    connected. A task reads ahead, so that a token's time is that of its arrival, whatever the caller awaits in between;
    nothing can be read while the event loop is blocked.

    The request is cancelled when the stream is left early: an ``async for`` loop over it ends (``break``, an
    exception), the task that awaits it is cancelled (also by `asyncio.wait_for` or `asyncio.timeout`), ``async with``
    is left, the stream is closed or garbage collected, or its client is closed. To read some tokens and continue later,
    call ``await anext(stream)``. Errors are those of `pdserve.core.errors`; later uses raise the same error again."""

    def __init__(self, ask: Ask, gateways: Sequence[GatewayCore]) -> None:
        super().__init__(ask, gateways)
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[Token]:
        return _AsyncStreamLoop(self)

    async def __anext__(self) -> Token:
        token = await self._advance()
        if token is None:
            raise StopAsyncIteration
        return token

    async def _advance(self) -> Token | None:
        """The next token; None at the end of the stream."""
        self._check_open()
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
        if (assembler := self._assembler) is None:
            await self._connect()
            assembler = self._begin()
        while True:
            arrival = await self._arrivals.get()
            if isinstance(arrival, tuple):
                if (token := self._add(assembler, *arrival)) is not None:
                    return token
            elif (error := self._failure(assembler, arrival)) is not None:
                try:
                    self._lost(error)
                    await self._connect()
                    self._resume(assembler)
                except BaseException:
                    self._arrivals.put_nowait(arrival)
                    raise
            else:
                self._arrivals.put_nowait(arrival)  # for other tasks that read this stream
                self._end(assembler, arrival)
                return None

    async def _connect(self) -> None:
        """Connect to the first gateway that answers."""
        while True:
            try:
                await self._gateway.connect(self._ask.connect_timeout_s(CONNECT_TIMEOUT_S))
                return
            except NotReady as error:
                self._turn(error)

    def _read(self, call: Any) -> Callable[[], Any]:
        self._reader = asyncio.create_task(_read(call, self._arrivals, self._ask.now))
        return partial(_cancel, asyncio.get_running_loop(), call)

    async def result(self) -> Generation:
        """Read the remaining tokens and return the whole generation."""
        while await self._advance() is not None:
            pass
        assert self._result is not None
        return self._result

    async def aclose(self) -> None:
        """The same as `cancel`, for `contextlib.aclosing`."""
        self._abort("its stream was closed")

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


class AsyncClient(ClientCore[AsyncGateway]):
    """Client of the service at ``target`` (host, host:port or URL; https:// means TLS) with the options of
    `AccessOptions`. Use it within one event loop; ``async with`` closes it. After `close` every method raises
    `RequestAborted`.

    If the service has several gateways, ``target`` may name them all: a list, or a text with commas. Requests go to
    them in turn. A stream that breaks because its gateway is lost goes on at another one, with the same tokens as if
    nothing had happened."""

    def __init__(self, target: Targets = DEFAULT_TARGET, **access: Unpack[AccessOptions]) -> None:
        super().__init__(target, access, AsyncGateway)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Start a generation from text or token ids. Raises `InvalidRequest` at once if a field is wrong; all other
        errors are raised by the stream."""
        return AsyncStream(Ask(prompt, options, several=len(self._gateways) > 1), self._in_turn())

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect in advance, so that no request has to wait for it; `NotReady` if nothing answers within
        ``timeout_s``."""
        outcomes = await asyncio.gather(
            *(gateway.connect(timeout_s) for gateway in self._gateways), return_exceptions=True
        )
        if None not in outcomes:
            raise next(outcome for outcome in outcomes if isinstance(outcome, BaseException))

    async def status(self, timeout_s: float = 10.0) -> ServiceStatus:
        """The service's workers, their load, and their blocks, from the first gateway that answers."""
        *others, last = self._gateways
        for gateway in others:
            with suppress(NotReady):
                return await gateway.status(timeout_s)
        return await last.status(timeout_s)

    async def ready(self, timeout_s: float = 10.0) -> bool:
        """Whether the service accepts requests (grpc.health.v1); False if nothing answers."""
        return any(await asyncio.gather(*(gateway.ready(timeout_s) for gateway in self._gateways)))

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the service accepts requests; `NotReady` after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while not await self.ready(max(0.05, deadline_s - time.monotonic())):
            if time.monotonic() >= deadline_s:
                raise self._not_ready(timeout_s)
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Close all connections; running requests are cancelled."""
        await asyncio.gather(*(gateway.close() for gateway in self._gateways))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
