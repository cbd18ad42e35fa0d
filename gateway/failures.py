"""What failed calls answer: statuses of both APIs, gRPC's trailing metadata, and OpenAI's object ``error``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from pdserve.core.errors import (
    ERROR_KIND_KEY,
    RETRY_AFTER_KEY,
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    HandOffMissing,
    InvalidRequest,
    LaunchError,
    LayoutMismatch,
    ModelError,
    NotReady,
    PdserveError,
    RequestAborted,
    TransferError,
    Unauthenticated,
    WorkerLost,
    field_of,
    to_wire,
)
from runtime.awake_clock import wait_awake

STATUSES: Mapping[type[BaseException], tuple[StatusCode, int]] = {
    InvalidRequest: (StatusCode.INVALID_ARGUMENT, 400),
    Unauthenticated: (StatusCode.UNAUTHENTICATED, 401),
    CapacityExceeded: (StatusCode.RESOURCE_EXHAUSTED, 429),
    NotReady: (StatusCode.UNAVAILABLE, 503),
    WorkerLost: (StatusCode.UNAVAILABLE, 503),
    TransferError: (StatusCode.UNAVAILABLE, 503),
    LayoutMismatch: (StatusCode.FAILED_PRECONDITION, 503),
    HandOffMissing: (StatusCode.FAILED_PRECONDITION, 503),
    ModelError: (StatusCode.FAILED_PRECONDITION, 503),
    ConfigError: (StatusCode.FAILED_PRECONDITION, 503),
    LaunchError: (StatusCode.FAILED_PRECONDITION, 503),
    DeadlineExceeded: (StatusCode.DEADLINE_EXCEEDED, 504),
    RequestAborted: (StatusCode.CANCELLED, 499),
    BaseException: (StatusCode.INTERNAL, 500),
}
"""The gRPC and the HTTP status of errors; that of the nearest base class holds for others."""

INVALID = {
    "HostNotAllowed": 403,  # the header Host is not a name of the service
    "NotAnOperator": 403,  # the token is not an operator's
    "UnknownModel": 404,  # another model is served
    "UnknownPath": 404,  # of HTTP: the API has no such path
    "BodyIncomplete": 408,  # the body did not arrive within the deadline
    "DuplicateRequest": 409,  # another request in progress has the same request id
    "BodyTooLarge": 413,  # the body exceeds the limit of messages
    "UnsupportedMediaType": 415,  # the body is not said to be JSON
}
"""The kinds of `InvalidRequest` that have an HTTP status of their own."""

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata that gRPC libraries read `google.rpc.Status` from."""
DOMAIN = "pdserve"
SEND_FAILURE_S = 5.0
"""Time for sending a failure's reason to the client."""
MAX_MESSAGE_BYTES = 1024
"""Longer messages of gRPC are cut. A message travels up to four times, once with three bytes for each of its own, and
clients refuse trailing metadata of more than 8 KiB."""

Context = grpc.aio.ServicerContext[Any, Any]
GrpcFailure = tuple[StatusCode, str, tuple[tuple[str, str | bytes], ...]]


def statuses_of(error: BaseException) -> tuple[StatusCode, int]:
    """The gRPC and the HTTP status of an error. Over HTTP a request that can never fit has status 400, as no other time
    would help."""
    code, status = next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    if isinstance(error, InvalidRequest):
        status = INVALID.get(error.kind, status)
    return code, 400 if status == 429 and _retry_after_s(error) is None else status


def grpc_failure(error: BaseException) -> GrpcFailure:
    """The status, message and trailing metadata of a call that ended with ``error``. Its details are an ``ErrorInfo``
    with the error's kind, a ``BadRequest`` if a field is wrong, and a ``RetryInfo`` if it is known when to come
    back."""
    code, _ = statuses_of(error)
    kind, message = to_wire(error)
    message = _shortened(message)
    metadata: list[tuple[str, str | bytes]] = [(ERROR_KIND_KEY, kind)]
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=kind, domain=DOMAIN)]
    if (field := field_of(error)) is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shortened(field), description=message.removeprefix(f"{field}: ")
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if (retry_after_s := _retry_after_s(error)) is not None:
        retry_after_ms = round(retry_after_s * 1e3)
        metadata.append((RETRY_AFTER_KEY, str(retry_after_ms)))
        delay = Duration()
        delay.FromMilliseconds(retry_after_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    metadata.append((STATUS_DETAILS_KEY, status.SerializeToString()))
    return code, message, tuple(metadata)


async def sent_in_time(sending: Coroutine[Any, Any, Any]) -> None:
    """Send the reason of a failure, and give up if the client does not read."""
    task = asyncio.create_task(sending)
    if await wait_awake(task, SEND_FAILURE_S):
        task.result()
    else:
        task.cancel()


async def end_call(context: Context, error: BaseException) -> NoReturn:
    """End a gRPC call with ``error``."""
    await context.abort(*grpc_failure(error))


def error_object(error: BaseException, status: int) -> Mapping[str, Any]:
    """The body of an HTTP answer: ``error.param`` is the field, if one is wrong; ``error.code`` its kind."""
    kind, message = to_wire(error)
    sort = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": sort, "param": field_of(error), "code": kind}}


def http_failure(
    error: BaseException, headers: Mapping[str, str] | None = None
) -> tuple[Mapping[str, Any], int, dict[str, str]]:
    """The body, status and headers of an HTTP call that ended with ``error``."""
    _, status = statuses_of(error)
    sent = dict(headers or {})
    if (retry_after_s := _retry_after_s(error)) is not None:
        sent["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if status == 401:
        sent["www-authenticate"] = "Bearer"
    return error_object(error, status), status, sent


def _retry_after_s(error: BaseException) -> float | None:
    return error.retry_after_s if isinstance(error, PdserveError) else None


def _shortened(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    return f"{data[: MAX_MESSAGE_BYTES - 3].decode(errors='ignore')}…"
