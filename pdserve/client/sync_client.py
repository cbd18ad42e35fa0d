"""The blocking client."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.ask import Ask
from pdserve.client.channel import (
    CHANNEL_OPTIONS,
    CONNECT_TIMEOUT_S,
    client_closed,
    credentials_of,
    error_from_status,
    is_reset,
    unreachable,
)
from pdserve.client.request import GenerateOptions, Prompt
from pdserve.client.status import ServiceStatus
from pdserve.client.sync_stream import Call, Stream
from pdserve.client.target import DEFAULT_TARGET, AccessOptions, Target, Targets
from pdserve.core.errors import NotReady, PdserveError
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc as pb_grpc

_RECHECK_S = 5.0
"""A connection that answered within this time is assumed to be open."""


class Gateway:
    """The connection to one gateway."""

    def __init__(self, target: Target) -> None:
        self.target = str(target)
        self._access = target.metadata
        self._closed = False
        self._connecting = threading.Lock()
        self._connected_s = -math.inf
        credentials = credentials_of(target)
        self._channel = (
            grpc.insecure_channel(target.address, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(target.address, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def start(self, ask: Ask, token_ids: Sequence[int]) -> Call:
        """Ask for the tokens after ``token_ids``."""
        with self._while_open():
            message, metadata = ask.message(token_ids), (*ask.metadata, *self._access)
            return self._stub.Generate(message, timeout=ask.timeout_s(), metadata=metadata)

    def connect(self, timeout_s: float) -> None:
        """See `Client.connect`."""
        try:
            with self._while_open():
                self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            if self._closed:
                raise client_closed(self.target) from None
            # Any other status comes from a server, so the channel is open.
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                if is_reset(error.details()):
                    raise self._error(error) from None
                raise unreachable(self.target, error.details()) from None

    def connect_once(self, timeout_s: float) -> None:
        """`connect`, unless the gateway answered within the last few seconds. One call serves all waiting threads."""
        began_s = time.monotonic()
        if not self._connecting.acquire(timeout=timeout_s):
            raise unreachable(self.target)
        try:
            now_s = time.monotonic()
            if now_s - self._connected_s > _RECHECK_S or self._closed:
                self.connect(max(0.0, began_s + timeout_s - now_s))
                self._connected_s = time.monotonic()
        finally:
            self._connecting.release()

    def lost(self) -> None:
        """Note that a call has lost the gateway: the next one connects first."""
        self._connected_s = -math.inf

    def status(self, timeout_s: float) -> ServiceStatus:
        """See `Client.status`."""
        self.connect(timeout_s)  # for its error message if nothing answers
        try:
            with self._while_open():
                request, metadata = pb.GetStatusRequest(), self._access
                return ServiceStatus.from_proto(self._stub.GetStatus(request, timeout=timeout_s, metadata=metadata))
        except grpc.RpcError as error:
            raise self._error(error) from None

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
        self._closed = True
        self._channel.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Translate the ValueError that grpc raises for calls over a closed channel."""
        try:
            yield
        except ValueError:
            if self._closed:
                raise client_closed(self.target) from None
            raise

    def _error(self, error: Any) -> PdserveError:
        if self._closed:
            return client_closed(self.target)
        return error_from_status(error.code(), error.details(), self.target, error.trailing_metadata())


class Client:
    """Client of the service at ``target`` (host, host:port or URL; https:// means TLS) with the options of
    `AccessOptions`. Threads may share it; ``with`` closes it. After `close` every method raises `RequestAborted`.

    If the service has several gateways, ``target`` may name them all: a list, or a text with commas. Requests go to
    them in turn. A stream that breaks because its gateway is lost goes on at another one, with the same tokens as if
    nothing had happened."""

    def __init__(self, target: Targets = DEFAULT_TARGET, **access: Unpack[AccessOptions]) -> None:
        targets = Target.all_of(target, **access)
        self.target = ",".join(map(str, targets))
        self._gateways = [Gateway(each) for each in targets]
        self._turns = itertools.count()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Start a generation from text or token ids. Raises `InvalidRequest` at once if a field is wrong; all other
        errors are raised by the stream."""
        ask = Ask(prompt, options, several=len(self._gateways) > 1)
        first = next(self._turns) % len(self._gateways)
        return Stream(ask, [*self._gateways[first:], *self._gateways[:first]])

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
                raise NotReady(f"the service at {self.target} was not ready within {timeout_s:g} s")
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
