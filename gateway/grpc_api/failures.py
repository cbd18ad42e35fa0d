"""How failed gRPC calls end: status, message, trailing metadata, and `google.rpc.Status` with details."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from gateway.grpc_api.statuses import status_of
from pdserve.core.errors import ERROR_KIND_KEY, RETRY_AFTER_KEY, CapacityExceeded, NotReady, field_of, to_wire

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata that gRPC libraries read `google.rpc.Status` from."""
DOMAIN = "pdserve"
MAX_MESSAGE_BYTES = 1024
"""Longer messages are cut. A message travels up to four times, once with three bytes for each of its own, and clients
refuse trailing metadata of more than 8 KiB."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """How a failed call ends."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]

    async def end(self, context: Context) -> NoReturn:
        """End the call."""
        await context.abort(self.code, self.message, self.trailing_metadata)


def failure_of(error: BaseException) -> Failure:
    """The failure for ``error``. Its details are an ``ErrorInfo`` with the error's class, a ``BadRequest`` if a field
    is wrong, and a ``RetryInfo`` if it is known when to come back."""
    code = status_of(error)
    kind, message = to_wire(error)
    message = _shortened(message)
    metadata: list[tuple[str, str | bytes]] = [(ERROR_KIND_KEY, kind)]
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=kind, domain=DOMAIN)]
    if (field := field_of(error)) is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shortened(field), description=message.removeprefix(f"{field}: ")
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, CapacityExceeded | NotReady) and error.retry_after_s is not None:
        retry_after_ms = round(error.retry_after_s * 1e3)
        metadata.append((RETRY_AFTER_KEY, str(retry_after_ms)))
        delay = Duration()
        delay.FromMilliseconds(retry_after_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    metadata.append((STATUS_DETAILS_KEY, status.SerializeToString()))
    return Failure(code, message, tuple(metadata))


def _shortened(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    return f"{data[: MAX_MESSAGE_BYTES - 3].decode(errors='ignore')}…"
