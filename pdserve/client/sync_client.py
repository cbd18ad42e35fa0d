"""The blocking client, and the stream of one request."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, Unpack, cast

import grpc
from grpc_health.v1 import health_pb2

from pdserve.client.channel import CONNECT_TIMEOUT_S, client_closed, is_reset, silent, unreachable
from pdserve.client.core import Arrival, ClientCore, GatewayCore, StreamCore, run
from pdserve.client.generation import Assembler, Generation, Token
from pdserve.client.request import Ask, GenerateOptions, Prompt
from pdserve.client.status import ServiceStatus
from pdserve.client.target import DEFAULT_TARGET, AccessOptions, Target, Targets
from pdserve.core.errors import NotReady

_RECHECK_S = 5.0
"""A connection that answered within this time is assumed to be open."""


class Gateway(GatewayCore):
    """The connection to one gateway."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, grpc)
        self._connecting = threading.Lock()

    async def connect(self, timeout_s: float) -> None:
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
                    raise self._error(error) from None
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise silent(self._where) from None
                raise unreachable(self._where, error.details()) from None

    async def connect_once(self, timeout_s: float) -> None:
        """`connect`, unless the gateway answered within the last few seconds. One call serves all waiting threads."""
        began_s = time.monotonic()
        if not self._connecting.acquire(timeout=timeout_s):
            raise silent(self._where)
        try:
            now_s = time.monotonic()
            if now_s - self.connected_s > _RECHECK_S or self.is_closed:
                await self.connect(max(0.0, began_s + timeout_s - now_s))
                self.connected_s = time.monotonic()
        finally:
            self._connecting.release()

    async def _call(self, method: Any, request: Any, timeout_s: float, metadata: Any = ()) -> Any:
        return method(request, timeout=timeout_s, metadata=metadata)

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
    except grpc.RpcError as error:
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
        super().__init__(ask, gateways, queue.SimpleQueue())
        self._reading = threading.Lock()

    def __iter__(self) -> Iterator[Token]:
        try:
            while (token := run(self._advance())) is not None:
                yield token
        finally:  # also if the loop is left
            self._abort("the loop over its stream ended early; use next(stream) to read on later")

    def __next__(self) -> Token:
        token = run(self._advance())
        if token is None:
            raise StopIteration
        return token

    async def _take(self, assembler: Assembler) -> tuple[Arrival, Token | None]:
        with self._reading:  # another thread that reads the end has to find what came before
            arrival: Arrival = self._arrivals.get()
            return arrival, self._add(assembler, *arrival) if isinstance(arrival, tuple) else None

    def _read(self, call: Any) -> Callable[[], Any]:
        threading.Thread(target=_read, args=(call, self._arrivals), name="pdserve-stream", daemon=True).start()
        return cast("Callable[[], Any]", call.cancel)

    def result(self) -> Generation:
        """Read the remaining tokens and return the whole generation."""
        return run(self._whole())

    def close(self) -> None:
        """The same as `cancel`, for `contextlib.closing`."""
        self._abort("its stream was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
                run(gateway.connect(timeout_s))
                answered = True
            except NotReady as error:
                failure = failure or error
        if failure is not None and not answered:
            raise failure

    def status(self, timeout_s: float = 10.0) -> ServiceStatus:
        """The service's workers, their load, and their blocks, from the first gateway that answers."""
        return run(self._status(timeout_s))

    def ready(self, timeout_s: float = 10.0) -> bool:
        """Whether the service accepts requests (grpc.health.v1); False if nothing answers."""
        return any(run(gateway.ready(timeout_s)) for gateway in self._gateways)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the service accepts requests; `NotReady` after ``timeout_s``."""
        for limit_s in self._polls(timeout_s):
            if self.ready(limit_s):
                return
            time.sleep(0.1)

    def close(self) -> None:
        """Close all connections; running requests are cancelled."""
        for gateway in self._gateways:
            gateway.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
