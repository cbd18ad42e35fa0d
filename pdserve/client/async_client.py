"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.async_stream import AsyncStream, Call
from pdserve.client.channel import (
    CHANNEL_OPTIONS,
    CONNECT_TIMEOUT_S,
    client_closed,
    credentials_of,
    error_from_status,
    unreachable,
)
from pdserve.client.request import GenerateOptions, Prompt, build_request, metadata_of, timeout_of
from pdserve.client.status import ServiceStatus
from pdserve.client.target import DEFAULT_TARGET, AccessOptions, Target
from pdserve.core.errors import NotReady
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc as pb_grpc


class AsyncClient:
    """Client of the service at ``target`` (host, host:port or URL; https:// means TLS) with the options of
    `AccessOptions`. Use it within one event loop; ``async with`` closes it. After `close` every method raises
    `RequestAborted`."""

    def __init__(self, target: str | Target = DEFAULT_TARGET, **access: Unpack[AccessOptions]) -> None:
        service = Target.of(target, **access)
        self.target = str(service)
        self._access = service.metadata
        self._closed = False
        credentials = credentials_of(service)
        self._channel = (
            grpc.aio.insecure_channel(service.address, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(service.address, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub: pb_grpc.InferenceAsyncStub = pb_grpc.InferenceStub(self._channel)  # type: ignore[assignment]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Start a generation from text or token ids. Raises `InvalidRequest` at once if a field is wrong; all other
        errors are raised by the stream."""
        request = build_request(prompt, options)
        timeout_s, metadata = timeout_of(options), (*metadata_of(options), *self._access)

        def start() -> Call:
            with self._while_open():
                return self._stub.Generate(request, timeout=timeout_s, metadata=metadata)

        async def connect() -> None:
            await self.connect(min(CONNECT_TIMEOUT_S, timeout_s or CONNECT_TIMEOUT_S))

        return AsyncStream(connect, start, self.target, lambda: self._closed)

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect in advance, so that no request has to wait for it; `NotReady` if nothing answers within
        ``timeout_s``."""
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

    async def status(self, timeout_s: float = 10.0) -> ServiceStatus:
        """The service's workers, their load, and their blocks."""
        await self.connect(timeout_s)
        try:
            with self._while_open():
                request, metadata = pb.GetStatusRequest(), self._access
                answer = await self._stub.GetStatus(request, timeout=timeout_s, metadata=metadata)
                return ServiceStatus.from_proto(answer)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error.code(), error.details(), self.target, error.trailing_metadata()) from None

    async def ready(self, timeout_s: float = 10.0) -> bool:
        """Whether the service accepts requests (grpc.health.v1); False if nothing answers."""
        try:
            await self.connect(timeout_s)
            with self._while_open():
                answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except (NotReady, grpc.aio.AioRpcError):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the service accepts requests; `NotReady` after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while not await self.ready(max(0.05, deadline_s - time.monotonic())):
            if time.monotonic() >= deadline_s:
                raise NotReady(f"the service at {self.target} was not ready within {timeout_s:g} s")
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Close the channel; running requests are cancelled."""
        self._closed = True
        await self._channel.close(None)

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
