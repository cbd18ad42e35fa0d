"""What the blocking client and the one for asyncio share: a gateway as they reach it, a stream's state, and the turns
of several gateways. Nothing here knows gRPC: `pdserve.client.channel` has the gateways that are reached by it."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from pdserve.client.generation import Assembler, Generation, Token
from pdserve.client.request import Ask
from pdserve.client.target import AccessOptions, Target, Targets
from pdserve.core.errors import NotReady, PdserveError, RequestAborted
from pdserve.pb import inference_pb2 as pb

Arrival = tuple[pb.GenerateResponse, float] | Exception | asyncio.CancelledError | None
"""A message with its arrival time (monotonic seconds), the error that ended the call, or None at its end."""


class GatewayCore(ABC):
    """The connection to one gateway, called ``target``."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.is_closed = False
        self.connected_s = -math.inf
        """When it answered last."""

    @abstractmethod
    def connect(self, timeout_s: float) -> Any:
        """Connect, unless that has been done; a coroutine where streams are asynchronous. `NotReady` if nothing answers
        within ``timeout_s``."""

    @abstractmethod
    def start(self, ask: Ask, token_ids: Sequence[int]) -> Any:
        """Ask for the tokens after ``token_ids``. Returns the call: an iterator of its messages, with ``cancel()``."""

    @abstractmethod
    def failure(self, error: Exception, has_begun: bool) -> PdserveError:
        """The error of a call that has raised ``error``. ``has_begun``: a message of the request had arrived."""

    def lost(self) -> None:
        """Note that a call has lost the gateway: the next one connects first."""
        self.connected_s = -math.inf


G = TypeVar("G", bound=GatewayCore)


class StreamCore(ABC, Generic[G]):
    """The state of one request's stream.

    ``gateways`` are asked in this order, in a circle: the next one if one is not ready, or is lost during the call; it
    goes on after the tokens that have arrived. None is asked a second time before a further token has arrived."""

    def __init__(self, ask: Ask, gateways: Sequence[G]) -> None:
        self._ask = ask
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
                self._assembler = Assembler(self._ask.now())
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
        self._cancel_call = weakref.finalize(self, self._read(self._gateway.start(self._ask, token_ids)))
        self._cancel_call.atexit = False  # the process's end closes the connection anyway

    def _release_call(self) -> None:
        """Keep nothing of a call that has ended."""
        if self._cancel_call is not None:
            self._cancel_call.detach()

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
        if not isinstance(arrival, Exception) or self._error is not None or self._gateway.is_closed:
            return None
        return self._gateway.failure(arrival, assembler.has_begun)

    def _lost(self, error: PdserveError) -> None:
        """Turn to another gateway after ``error``. Raises it if no other one could do better."""
        self._release_call()
        if not isinstance(error, NotReady):
            raise error from None
        self._gateway.lost()
        self._turn(error)

    def _end(self, assembler: Assembler, arrival: Arrival) -> None:
        """End the stream with the last arrival."""
        self._release_call()
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

    def _not_ready(self, timeout_s: float) -> NotReady:
        return NotReady(f"the service at {self.target} was not ready within {timeout_s:g} s")


def client_closed(target: str) -> RequestAborted:
    """The error after the caller closed its own client."""
    return RequestAborted(f"cancelled by the client: the client of {target} was closed")
