"""One request's stream, blocking."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from pdserve.client.ask import Ask
from pdserve.client.assembler import Assembler
from pdserve.client.channel import CONNECT_TIMEOUT_S, client_closed, error_from_status
from pdserve.client.failover import Failover
from pdserve.client.generation import Generation, Token
from pdserve.core.errors import NotReady, PdserveError, RequestAborted
from pdserve.pb import inference_pb2 as pb


class Call(Protocol):
    """The part of grpc's server-streaming call that is used here."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        """The messages."""
        ...

    def cancel(self) -> Any:
        """Cancel the call."""
        ...


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

    def connect_once(self, timeout_s: float) -> None:
        """Connect; `NotReady` if it does not answer."""
        ...

    def lost(self) -> None:
        """Note that it was lost during a call."""
        ...

    def start(self, ask: Ask, token_ids: Sequence[int]) -> Call:
        """Ask for the tokens after ``token_ids``."""
        ...


Arrival = tuple[pb.GenerateResponse, float] | grpc.RpcError | None
"""A message with its arrival time (monotonic seconds), the error that ended the call, or None at its end."""


def _read(call: Call, arrivals: queue.SimpleQueue[Arrival]) -> None:
    try:
        for message in call:
            arrivals.put((message, time.monotonic()))
    except grpc.RpcError as error:
        arrivals.put(error)
    else:
        arrivals.put(None)


class Stream:
    """The tokens of one request (``for``), then its `result`. The call starts on first use, after the channel is
    connected. A thread reads ahead, so that a token's time is that of its arrival, whatever the caller does in between.

    The request is cancelled when the stream is left early: a ``for`` loop over it ends (``break``, an exception,
    Ctrl-C), ``with`` is left, `next` or `result` is interrupted, the stream is closed or garbage collected, or its
    client is closed. To read some tokens and continue later, call ``next(stream)``. `cancel` and `close` may be called
    from another thread. Errors are those of `pdserve.core.errors`; later uses raise the same error again.

    ``gateways`` are asked in this order: the next one if one is not ready, or is lost during the call; it goes on after
    the tokens that have arrived. None is asked a second time before a further token has arrived."""

    def __init__(self, ask: Ask, gateways: Sequence[Gateway]) -> None:
        self._ask = ask
        self._gateways = Failover(gateways)
        # Reentrant, because the garbage collector may end a loop over this stream at any point of this thread.
        self._lock = threading.RLock()
        self._cancel_call: weakref.finalize[[], Stream] | None = None
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._assembler: Assembler | None = None
        self._error: PdserveError | None = None
        self._result: Generation | None = None

    @property
    def target(self) -> str:
        """The gateway that is asked."""
        return self._gateways.current.target

    def __iter__(self) -> Iterator[Token]:
        return _StreamLoop(self)

    def __next__(self) -> Token:
        token = self._advance()
        if token is None:
            raise StopIteration
        return token

    def _advance(self) -> Token | None:
        """The next token; None at the end of the stream."""
        if self._error is not None:
            raise self._error
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
        assembler = self._assembler or self._begin()
        while True:
            arrival = self._arrivals.get()
            if isinstance(arrival, tuple):
                token = assembler.add(*arrival)
                if token is not None:
                    self._gateways.served()
                    return token
                continue
            if arrival is not None and self._error is None and not self._gateways.current.is_closed:
                error = error_from_status(
                    arrival.code(), arrival.details(), self.target, arrival.trailing_metadata(), assembler.has_begun
                )
                try:
                    self._go_on(assembler, error)
                except BaseException:
                    self._arrivals.put(arrival)
                    raise
                continue
            self._arrivals.put(arrival)  # for other threads that read this stream
            if self._error is not None:
                raise self._error
            if arrival is None:
                self._result = assembler.result()
                return None
            raise client_closed(self.target) from None

    def _begin(self) -> Assembler:
        self._connect()
        with self._lock:
            if self._error is not None:  # cancelled in the meantime
                raise self._error
            if self._assembler is None:
                self._assembler = Assembler(time.monotonic())
                self._call([])
            return self._assembler

    def _go_on(self, assembler: Assembler, error: PdserveError) -> None:
        """Have another gateway go on after ``error``. Raises it if there is none, or none could do better."""
        if not isinstance(error, NotReady):
            raise error from None
        self._gateways.current.lost()
        self._turn(error)
        self._connect()
        with self._lock:
            if self._error is not None:
                raise self._error
            if assembler.has_begun:
                assembler.resumed()
            self._call(assembler.token_ids)

    def _connect(self) -> None:
        """Connect to the first gateway that answers."""
        while True:
            try:
                return self._gateways.current.connect_once(self._ask.connect_timeout_s(CONNECT_TIMEOUT_S))
            except NotReady as error:
                self._turn(error)

    def _turn(self, error: NotReady) -> None:
        with self._lock:
            self._gateways.turn(error)

    def _call(self, token_ids: Sequence[int]) -> None:
        """Ask for the tokens after these, and read the answer on a thread."""
        call = self._gateways.current.start(self._ask, token_ids)
        if self._cancel_call is not None:
            self._cancel_call.detach()
        self._cancel_call = weakref.finalize(self, call.cancel)
        self._cancel_call.atexit = False  # the process's end closes the connection anyway
        threading.Thread(target=_read, args=(call, self._arrivals), name="pdserve-stream", daemon=True).start()

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

    def cancel(self) -> None:
        """Cancel the request, unless it has ended. Readers get `RequestAborted`."""
        self._abort("")

    def close(self) -> None:
        """The same as `cancel`, for `contextlib.closing`."""
        self._abort("its stream was closed")

    def _abort(self, reason: str) -> None:
        with self._lock:
            if self._result is None and self._error is None:
                self._error = RequestAborted("cancelled by the client" + (reason and f": {reason}"))
                if self._cancel_call is not None:
                    self._cancel_call()

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
