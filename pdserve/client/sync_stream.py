"""One request's stream, blocking."""

from __future__ import annotations

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


class Stream:
    """Tokens as they come (``for``), then `result`. The call leaves on first use, after the channel is connected; read
    promptly, for a token's time is that of its reading. Leaving ``with`` cancels what is not finished. `cancel` may be
    called from another thread. Errors are those of `core.errors`; each later use raises the same one again."""

    def __init__(self, connect: Callable[[], None], start: Callable[[], Call], target: str) -> None:
        self._connect = connect
        self._start = start
        self._target = target
        self._call: Call | None = None
        self._messages: Iterator[pb.GenerateResponse] | None = None
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
        if self._messages is None or self._assembler is None:
            self._connect()
            self._assembler = Assembler(time.monotonic())
            self._call = self._start()
            self._messages = iter(self._call)
        while True:
            try:
                message = next(self._messages)
            except StopIteration:
                self._result = self._assembler.result()
                return None
            except grpc.RpcError as error:
                if isinstance(self._error, RequestAborted):
                    raise self._error from None
                raise error_from_status(error.code(), error.details(), self._target) from None
            token = self._assembler.add(message, time.monotonic())
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
