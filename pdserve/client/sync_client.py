"""The blocking client, and the stream of one request."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, Unpack, cast

import grpc
from grpc_health.v1 import health_pb2

from pdserve.client.channel import CONNECT_TIMEOUT_S, GrpcGateway, is_reset, silent, unreachable
from pdserve.client.core import Arrival, ClientCore, StreamCore, client_closed
from pdserve.client.generation import Generation, Token
from pdserve.client.request import Ask, GenerateOptions, Prompt
from pdserve.client.status import ServiceStatus
from pdserve.client.target import DEFAULT_TARGET, AccessOptions, Target, Targets
from pdserve.core.errors import NotReady, PdserveError
from pdserve.pb import inference_pb2 as pb

_RECHECK_S = 5.0
"""A connection that answered within this time is assumed to be open."""


class Gateway(GrpcGateway):
    """The connection to one gateway."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, grpc)
        self._connecting = threading.Lock()

    def connect(self, timeout_s: float) -> None:
        """See `Client.connect`."""
        try:
            with self._while_open():
                self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            if self.is_closed:
                raise client_closed(self.target) from None
            # Any other status comes from a server, so the channel is open.
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                if is_reset(error.details()):
                    raise self.failure(error) from None
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise silent(self._where) from None
                raise unreachable(self._where, error.details()) from None

    def connect_once(self, timeout_s: float) -> None:
        """`connect`, unless the gateway answered within the last few seconds. One call serves all waiting threads."""
        began_s = time.monotonic()
        if not self._connecting.acquire(timeout=timeout_s):
            raise silent(self._where)
        try:
            now_s = time.monotonic()
            if now_s - self.connected_s > _RECHECK_S or self.is_closed:
                self.connect(max(0.0, began_s + timeout_s - now_s))
                self.connected_s = time.monotonic()
        finally:
            self._connecting.release()

    def status(self, timeout_s: float) -> ServiceStatus:
        """See `Client.status`."""
        self.connect(timeout_s)  # for its error message if nothing answers
        try:
            with self._while_open():
                request, metadata = pb.GetStatusRequest(), self._access
                return ServiceStatus.from_proto(self._stub.GetStatus(request, timeout=timeout_s, metadata=metadata))
        except grpc.RpcError as error:
            raise self.failure(error) from None

    def ready(self, timeout_s: float) -> bool:
        """See `Client.ready`."""
        try:
            with self._while_open():
                answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Close the channel; running requests are cancelled."""
        self.is_closed = True
        self._channel.close()

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Translate the ValueError that grpc raises for calls over a closed channel."""
        try:
            yield
        except ValueError:
            if self.is_closed:
                raise client_closed(self.target) from None
            raise


def _read(call: Any, arrivals: queue.SimpleQueue[Arrival]) -> None:
    try:
        for message in call:
            arrivals.put((message, time.monotonic()))
    except Exception as error:  # noqa: BLE001 - the stream raises what it means
        arrivals.put(error)
    else:
        arrivals.put(None)


class Stream(StreamCore[Gateway]):
    """The tokens of one request (``for``), then its `result`. The call starts on first use, after the channel is
    connected. A thread reads ahead, so that a token's time is that of its arrival, whatever the caller does in between.

    The request is cancelled when the stream is left early: a ``for`` loop over it ends (``break``, an exception,
    Ctrl-C), ``with`` is left, `next` or `result` is interrupted, the stream is closed or garbage collected, or its
    client is closed. To read some tokens and continue later, call ``next(stream)``. `cancel` and `close` may be called
    from another thread. Errors are those of `pdserve.core.errors`; later uses raise the same error again."""

    def __init__(self, ask: Ask, gateways: Sequence[Gateway]) -> None:
        super().__init__(ask, gateways)
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._reading = threading.Lock()

    def __iter__(self) -> Iterator[Token]:
        return _StreamLoop(self)

    def __next__(self) -> Token:
        token = self._advance()
        if token is None:
            raise StopIteration
        return token

    def _advance(self) -> Token | None:
        """The next token; None at the end of the stream."""
        self._check_open()
        if self._result is not None:
            return None
        try:
            return self._next()
        except PdserveError as error:
            self._error = self._error or error  # keeps the error of a cancellation meanwhile
        except BaseException:
            self._abort("reading its stream was interrupted")
            raise
        raise self._error

    def _next(self) -> Token | None:
        if (assembler := self._assembler) is None:
            self._connect()
            assembler = self._begin()
        while True:
            with self._reading:  # another thread that reads the end has to find what came before
                arrival = self._arrivals.get()
                token = self._add(assembler, *arrival) if isinstance(arrival, tuple) else None
            if token is not None:
                return token
            if isinstance(arrival, tuple):
                continue
            if (error := self._failure(assembler, arrival)) is not None:
                try:
                    self._lost(error)
                    self._connect()
                    self._resume(assembler)
                except BaseException:
                    self._arrivals.put(arrival)
                    raise
            else:
                self._arrivals.put(arrival)  # for other threads that read this stream
                self._end(assembler, arrival)
                return None

    def _connect(self) -> None:
        """Connect to the first gateway that answers."""
        while True:
            try:
                return self._gateway.connect_once(self._ask.connect_timeout_s(CONNECT_TIMEOUT_S))
            except NotReady as error:
                self._turn(error)

    def _read(self, call: Any) -> Callable[[], Any]:
        threading.Thread(target=_read, args=(call, self._arrivals), name="pdserve-stream", daemon=True).start()
        return cast("Callable[[], Any]", call.cancel)

    def result(self) -> Generation:
        """Read the remaining tokens and return the whole generation."""
        try:
            while self._advance() is not None:
                pass
        except PdserveError:
            raise
        except BaseException:  # also between two tokens
            self._abort("reading its stream was interrupted")
            raise
        assert self._result is not None
        return self._result

    def close(self) -> None:
        """The same as `cancel`, for `contextlib.closing`."""
        self._abort("its stream was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _StreamLoop:
    """The iterator of a ``for`` loop. The request is cancelled if it is deleted before the end."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        return next(self._stream)

    def __del__(self) -> None:
        self._stream._abort("the loop over its stream ended early; use next(stream) to read on later")


class Client(ClientCore[Gateway]):
    """Client of the service at ``target`` (host, host:port or URL; https:// means TLS) with the options of
    `AccessOptions`. Threads may share it; ``with`` closes it. After `close` every method raises `RequestAborted`.

    If the service has several gateways, ``target`` may name them all: a list, or a text with commas. Requests go to
    them in turn. A stream that breaks because its gateway is lost goes on at another one, with the same tokens as if
    nothing had happened."""

    def __init__(self, target: Targets = DEFAULT_TARGET, **access: Unpack[AccessOptions]) -> None:
        super().__init__(target, access, Gateway)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Start a generation from text or token ids. Raises `InvalidRequest` at once if a field is wrong; all other
        errors are raised by the stream."""
        return Stream(Ask(prompt, options, several=len(self._gateways) > 1), self._in_turn())

    def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect in advance, so that no request has to wait for it; `NotReady` if nothing answers within
        ``timeout_s``.

        `generate` does this itself before its clock starts, once for all streams that start within a few seconds. It
        makes a health call, because watching a channel's state costs grpc's blocking API a polling thread."""
        failure: NotReady | None = None
        answered = False
        for gateway in self._gateways:
            try:
                gateway.connect(timeout_s)
                answered = True
            except NotReady as error:
                failure = failure or error
        if failure is not None and not answered:
            raise failure

    def status(self, timeout_s: float = 10.0) -> ServiceStatus:
        """The service's workers, their load, and their blocks, from the first gateway that answers."""
        *others, last = self._gateways
        for gateway in others:
            with suppress(NotReady):
                return gateway.status(timeout_s)
        return last.status(timeout_s)

    def ready(self, timeout_s: float = 10.0) -> bool:
        """Whether the service accepts requests (grpc.health.v1); False if nothing answers."""
        return any(gateway.ready(timeout_s) for gateway in self._gateways)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the service accepts requests; `NotReady` after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while not self.ready(max(0.05, deadline_s - time.monotonic())):
            if time.monotonic() >= deadline_s:
                raise self._not_ready(timeout_s)
            time.sleep(0.1)

    def close(self) -> None:
        """Close all connections; running requests are cancelled."""
        for gateway in self._gateways:
            gateway.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
