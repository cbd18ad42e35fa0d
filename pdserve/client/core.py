"""What the blocking client and the one for asyncio share: the connection to a gateway, a stream's state, and the turns
of several gateways.

It is written as coroutines. The blocking client overrides what waits by functions that block, and runs the coroutines
with `run`, without an event loop."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Generic, TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.channel import CHANNEL_OPTIONS, CONNECT_TIMEOUT_S, client_closed, credentials_of, error_from_status
from pdserve.client.generation import Assembler, Generation, Token
from pdserve.client.request import Ask
from pdserve.client.status import ServiceStatus
from pdserve.client.target import AccessOptions, Target, Targets
from pdserve.core.errors import NotReady, PdserveError, RequestAborted
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc as pb_grpc

Arrival = tuple[pb.GenerateResponse, float] | grpc.RpcError | asyncio.CancelledError | None
"""A message with its arrival time (monotonic seconds), the error that ended the call, or None at its end."""


class GatewayCore(ABC):
    """The connection to one gateway. ``channels`` is the module `grpc` or `grpc.aio`."""

    def __init__(self, target: Target, channels: Any) -> None:
        self.target, self._where = str(target), target
        self.is_closed = False
        self.connected_s = -math.inf
        """When it answered last."""
        self._access = target.metadata
        credentials = credentials_of(target)
        self._channel = (
            channels.insecure_channel(target.address, options=CHANNEL_OPTIONS)
            if credentials is None
            else channels.secure_channel(target.address, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub: Any = pb_grpc.InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    @abstractmethod
    async def connect(self, timeout_s: float) -> None:
        """See `Client.connect`."""

    async def connect_once(self, timeout_s: float) -> None:
        """`connect` for a stream."""
        await self.connect(timeout_s)

    @abstractmethod
    async def _call(self, method: Any, request: Any, timeout_s: float, metadata: Any = ()) -> Any:
        """The answer to a unary call."""

    async def status(self, timeout_s: float) -> ServiceStatus:
        """See `Client.status`."""
        await self.connect(timeout_s)  # for its error message if nothing answers
        try:
            with self._while_open():
                request = pb.GetStatusRequest()
                answer = await self._call(self._stub.GetStatus, request, timeout_s, self._access)
                return ServiceStatus.from_proto(answer)
        except grpc.RpcError as error:
            raise self._error(error) from None

    async def ready(self, timeout_s: float) -> bool:
        """See `Client.ready`."""
        try:
            with self._while_open():
                answer = await self._call(self._health.Check, health_pb2.HealthCheckRequest(), timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def start(self, ask: Ask, token_ids: Sequence[int]) -> Any:
        """Ask for the tokens after ``token_ids``. Returns gRPC's call."""
        with self._while_open():
            message, metadata = ask.message(token_ids), (*ask.metadata, *self._access)
            return self._stub.Generate(message, timeout=ask.timeout_s(), metadata=metadata)

    def lost(self) -> None:
        """Note that a call has lost the gateway: the next one connects first."""
        self.connected_s = -math.inf

    @abstractmethod
    def _while_open(self) -> AbstractContextManager[None]:
        """Translate what gRPC raises for calls over a closed channel."""

    def _error(self, error: Any) -> PdserveError:
        if self.is_closed:
            return client_closed(self.target)
        return error_from_status(error.code(), error.details(), self.target, error.trailing_metadata())


G = TypeVar("G", bound=GatewayCore)
T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of the blocking client, which calls blocking functions where that for asyncio waits for
    its event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    raise AssertionError("a coroutine of the blocking client has waited for an event loop")


class StreamCore(ABC, Generic[G]):
    """The state of one request's stream.

    ``gateways`` are asked in this order, in a circle: the next one if one is not ready, or is lost during the call; it
    goes on after the tokens that have arrived. None is asked a second time before a further token has arrived."""

    def __init__(self, ask: Ask, gateways: Sequence[G], arrivals: Any) -> None:
        self._ask = ask
        self._arrivals = arrivals  # a queue, of `Arrival`
        self._gateways = tuple(gateways)
        self._gateway = self._gateways[0]
        self._failed: set[str] = set()  # targets
        # Reentrant, because the garbage collector may end a loop over this stream at any point of this thread.
        self._lock = threading.RLock()
        self._cancel_call: weakref.finalize[..., Any] | None = None
        self._assembler: Assembler | None = None
        self._error: PdserveError | None = None
        self._result: Generation | None = None

    @property
    def target(self) -> str:
        """The gateway that is asked."""
        return self._gateway.target

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
            self._abort("reading its stream was cancelled or interrupted")
            raise
        raise self._error

    async def _next(self) -> Token | None:
        if (assembler := self._assembler) is None:
            await self._connect()
            assembler = self._begin()
        while True:
            arrival, token = await self._take(assembler)
            if token is not None:
                return token
            if isinstance(arrival, tuple):
                continue
            if (error := self._failure(assembler, arrival)) is not None:
                try:
                    self._lost(error)
                    await self._connect()
                    self._resume(assembler)
                except BaseException:
                    self._arrivals.put_nowait(arrival)
                    raise
            else:
                self._arrivals.put_nowait(arrival)  # for other readers of this stream
                self._end(assembler, arrival)
                return None

    async def _connect(self) -> None:
        """Connect to the first gateway that answers."""
        while True:
            try:
                return await self._gateway.connect_once(self._ask.connect_timeout_s(CONNECT_TIMEOUT_S))
            except NotReady as error:
                self._turn(error)

    @abstractmethod
    async def _take(self, assembler: Assembler) -> tuple[Arrival, Token | None]:
        """Wait for the next arrival, and `_add` a message."""

    async def _whole(self) -> Generation:
        """Read the remaining tokens and return the whole generation."""
        try:
            while await self._advance() is not None:
                pass
        finally:  # an interruption may come between two tokens
            self._abort("reading its stream was interrupted")
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Cancel the request, unless it has ended. Readers get `RequestAborted`."""
        self._abort("")

    def _abort(self, reason: str) -> None:
        with self._lock:
            if self._result is None and self._error is None:
                self._error = RequestAborted("cancelled by the client" + (reason and f": {reason}"))
                if self._cancel_call is not None:
                    self._cancel_call()

    def _turn(self, error: NotReady) -> None:
        """Turn from the current gateway, which has failed with ``error``, to the next one that has not. Raises
        ``error`` if all have."""
        with self._lock:
            self._failed.add(self.target)
            index = self._gateways.index(self._gateway)
            for gateway in (*self._gateways[index:], *self._gateways[:index]):
                if gateway.target not in self._failed:
                    self._gateway = gateway
                    return
        raise error

    def _begin(self) -> Assembler:
        """Make the call, unless that has been done. The gateway is connected."""
        with self._lock:
            self._check_open()
            if self._assembler is None:
                self._assembler = Assembler(time.monotonic())
                self._call([])
            return self._assembler

    def _resume(self, assembler: Assembler) -> None:
        """Ask the current gateway, which is connected, for the tokens that are missing."""
        with self._lock:
            self._check_open()
            if assembler.has_begun:
                assembler.resumed()
            self._call(assembler.token_ids)

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error

    def _call(self, token_ids: Sequence[int]) -> None:
        cancel = self._read(self._gateway.start(self._ask, token_ids))
        if self._cancel_call is not None:
            self._cancel_call.detach()
        self._cancel_call = weakref.finalize(self, cancel)
        self._cancel_call.atexit = False  # the process's end closes the connection anyway

    @abstractmethod
    def _read(self, call: Any) -> Callable[[], Any]:
        """Read the messages of a call in the background. Returns what cancels it."""

    def _add(self, assembler: Assembler, message: pb.GenerateResponse, arrived_s: float) -> Token | None:
        token = assembler.add(message, arrived_s)
        if token is not None:
            self._failed.clear()  # every gateway may be asked again
        return token

    def _failure(self, assembler: Assembler, arrival: Arrival) -> PdserveError | None:
        """The error of a call that has failed by itself. None for another end."""
        if not isinstance(arrival, grpc.RpcError) or self._error is not None or self._gateway.is_closed:
            return None
        error: Any = arrival
        return error_from_status(
            error.code(), error.details(), self.target, error.trailing_metadata(), assembler.has_begun
        )

    def _lost(self, error: PdserveError) -> None:
        """Turn to another gateway after ``error``. Raises it if no other one could do better."""
        if not isinstance(error, NotReady):
            raise error from None
        self._gateway.lost()
        self._turn(error)

    def _end(self, assembler: Assembler, arrival: Arrival) -> None:
        """End the stream with the last arrival."""
        self._check_open()
        if arrival is None:
            self._result = assembler.result()
        elif isinstance(arrival, asyncio.CancelledError) and not self._gateway.is_closed:
            raise RequestAborted("cancelled by the client: the task that receives its tokens was cancelled")
        else:
            raise client_closed(self.target) from None


class ClientCore(Generic[G]):
    """The gateways of a service."""

    def __init__(self, target: Targets, access: AccessOptions, connection: Callable[[Target], G]) -> None:
        targets = Target.all_of(target, **access)
        self.target = ",".join(map(str, targets))
        self._gateways = [connection(each) for each in targets]
        self._turns = itertools.count()

    def _in_turn(self) -> list[G]:
        """The gateways in the order in which the next request asks them."""
        first = next(self._turns) % len(self._gateways)
        return [*self._gateways[first:], *self._gateways[:first]]

    async def _status(self, timeout_s: float) -> ServiceStatus:
        *others, last = self._gateways
        for gateway in others:
            with suppress(NotReady):
                return await gateway.status(timeout_s)
        return await last.status(timeout_s)

    def _polls(self, timeout_s: float) -> Iterator[float]:
        """The time limits of questions whether the service is ready, until it is. `NotReady` after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            yield max(0.05, deadline_s - time.monotonic())
            if time.monotonic() >= deadline_s:
                raise NotReady(f"the service at {self.target} was not ready within {timeout_s:g} s")
