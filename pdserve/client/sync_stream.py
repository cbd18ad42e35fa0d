"""One request's stream, blocking."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from core.errors import PdserveError, RequestAborted
from pb import inference_pb2 as pb
from pdserve.client.assembler import Assembler
from pdserve.client.channel import error_from_status
from pdserve.client.generation import Generation, Token


class Call(Protocol):
    """What grpc returns for a server-streaming call, as far as it is used here."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        """The messages."""
        ...

    def cancel(self) -> Any:
        """Give the call up."""
        ...


Arrival = tuple[pb.GenerateResponse, float] | grpc.RpcError | None
"""A message and when it came (monotonic seconds), the error that ended the call, or None: it is complete."""


def _read(call: Call, arrivals: queue.SimpleQueue[Arrival]) -> None:
    try:
        for message in call:
            arrivals.put((message, time.monotonic()))
    except grpc.RpcError as error:
        arrivals.put(error)
    else:
        arrivals.put(None)


class Stream:
    """Tokens as they come (``for``), then `result`. The call leaves on first use, after the channel is connected. A
    thread reads ahead, so that a token's time is that of its arrival, whatever the caller does in between. Leaving
    ``with`` cancels what is not finished. `cancel` may be called from another thread. Errors are those of
    `core.errors`; each later use raises the same one again."""

    def __init__(self, connect: Callable[[], None], start: Callable[[], Call], target: str) -> None:
        self._connect = connect
        self._start = start
        self._target = target
        self._call: Call | None = None
        self._arrivals: queue.SimpleQueue[Arrival] | None = None
        self._assembler: Assembler | None = None
        self._error: PdserveError | None = None
        self._result: Generation | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        if self._error is not None:
            raise self._error
        if self._result is not None:
            raise StopIteration
        try:
            token = self._next()
        except PdserveError as error:
            self._error = error
            raise
        if token is None:
            raise StopIteration
        return token

    def _next(self) -> Token | None:
        if self._arrivals is None or self._assembler is None:
            self._connect()
            self._arrivals = queue.SimpleQueue()
            self._assembler = Assembler(time.monotonic())
            self._call = self._start()
            threading.Thread(
                target=_read, args=(self._call, self._arrivals), name="pdserve-stream", daemon=True
            ).start()
        while True:
            arrival = self._arrivals.get()
            if arrival is None:
                self._result = self._assembler.result()
                return None
            if isinstance(arrival, grpc.RpcError):
                if isinstance(self._error, RequestAborted):
                    raise self._error
                raise error_from_status(
                    arrival.code(), arrival.details(), self._target, arrival.trailing_metadata()
                ) from None
            token = self._assembler.add(*arrival)
            if token is not None:
                return token

    def result(self) -> Generation:
        """Read what is left and return the whole generation."""
        for _ in self:
            pass
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Give the request up; nothing if it has ended. Readers get `RequestAborted`."""
        if self._result is None and self._error is None:
            self._error = RequestAborted("cancelled by the client")
            if self._call is not None:
                self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
