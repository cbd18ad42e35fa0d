"""The client for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.ask import Ask
from pdserve.client.async_stream import AsyncStream, Call
from pdserve.client.channel import (
    CHANNEL_OPTIONS,
    CONNECT_TIMEOUT_S,
    client_closed,
    credentials_of,
    error_from_status,
    unreachable,
)
from pdserve.client.request import GenerateOptions, Prompt
from pdserve.client.status import ServiceStatus
from pdserve.client.target import DEFAULT_TARGET, AccessOptions, Target, Targets
from pdserve.core.errors import NotReady
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc as pb_grpc


class AsyncGateway:
    """The connection to one gateway."""

    def __init__(self, target: Target) -> None:
        self.target = str(target)
        self._access = target.metadata
        self._closed = False
        credentials = credentials_of(target)
        self._channel = (
            grpc.aio.insecure_channel(target.address, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(target.address, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub: pb_grpc.InferenceAsyncStub = pb_grpc.InferenceStub(self._channel)  # type: ignore[assignment]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def start(self, ask: Ask, token_ids: Sequence[int]) -> Call:
        """Ask for the tokens after ``token_ids``."""
        with self._while_open():
            message, metadata = ask.message(token_ids), (*ask.metadata, *self._access)
            return self._stub.Generate(message, timeout=ask.timeout_s(), metadata=metadata)

    async def connect(self, timeout_s: float) -> None:
        """See `AsyncClient.connect`."""
        with self._while_open():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._connect()
            except TimeoutError:
                raise unreachable(self.target) from None

    async def _connect(self) -> None:
        state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise unreachable(self.target)
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
            raise error_from_status(error.code(), error.details(), self.target, error.trailing_metadata()) from None

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
        self._closed = True
        await self._channel.close(None)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Translate what grpc.aio raises for calls over a closed channel (UsageError, CancelledError)."""
        try:
            yield
        except (grpc.aio.UsageError, asyncio.CancelledError):
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise client_closed(self.target) from None
            raise


class AsyncClient:
    """Client of the service at ``target`` (host, host:port or URL; https:// means TLS) with the options of
    `AccessOptions`. Use it within one event loop; ``async with`` closes it. After `close` every method raises
    `RequestAborted`.

    If the service has several gateways, ``target`` may name them all: a list, or a text with commas. Requests go to
    them in turn. A stream that breaks because its gateway is lost goes on at another one, with the same tokens as if
    nothing had happened."""

    def __init__(self, target: Targets = DEFAULT_TARGET, **access: Unpack[AccessOptions]) -> None:
        targets = Target.all_of(target, **access)
        self.target = ",".join(map(str, targets))
        self._gateways = [AsyncGateway(each) for each in targets]
        self._turns = itertools.count()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Start a generation from text or token ids. Raises `InvalidRequest` at once if a field is wrong; all other
        errors are raised by the stream."""
        ask = Ask(prompt, options, several=len(self._gateways) > 1)
        first = next(self._turns) % len(self._gateways)
        return AsyncStream(ask, [*self._gateways[first:], *self._gateways[:first]])

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
                raise NotReady(f"the service at {self.target} was not ready within {timeout_s:g} s")
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
