"""How a client's channel is opened, and what a gRPC status becomes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LaunchError,
    NotReady,
    PdserveError,
    RequestAborted,
    from_wire,
)
from gateway.statuses import ERROR_KIND_KEY

DEFAULT_TARGET = "localhost:50051"
CONNECT_TIMEOUT_S = 10.0

_MAX_MESSAGE_BYTES = 64 * 2**20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A hidden retry would make a request look slow instead of failed.
    ("grpc.enable_retries", 0),
    # The service is the cluster's own: a proxy for the outside world is not on its way.
    ("grpc.enable_http_proxy", 0),
    # A connection of its own for each client, with its own back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

_CLASSES: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: LaunchError,
    grpc.StatusCode.CANCELLED: RequestAborted,
}


Trailing = Iterable[Any]
"""Pairs of key and value; the type stubs know two kinds of them."""


def error_from_status(
    code: grpc.StatusCode, details: str | None, target: str, trailing: Trailing | None = None
) -> PdserveError:
    """The error that the service names in its trailing metadata; where it names none (or one of a later version), the
    class for the gRPC status. Its message can stand alone."""
    details = " ".join((details or "").split())
    kind = next((value for key, value in trailing or () if key == ERROR_KIND_KEY), "")
    if isinstance(kind, str) and details:
        error = from_wire(kind, details)
        if type(error) is not PdserveError:
            return error
    if code is grpc.StatusCode.UNAVAILABLE:
        return NotReady(f"the service at {target} is not available: {details or 'no reason given'}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # grpc's own words for it ("Deadline Exceeded", "Stream removed (Deadline Exceeded)") tell a user nothing.
        own = not details or "deadline exceeded" in details.lower()
        return DeadlineExceeded("the request's deadline passed; raise it or reduce the load" if own else details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return PdserveError(f"the server at {target} is not pdserve, or of another version: {details}")
    if code in _CLASSES:
        return _CLASSES[code](details or code.name)
    return PdserveError(f"{code.name}: {details or 'no reason given'} (service at {target})")


def unreachable(target: str) -> NotReady:
    """Nothing listens at ``target``."""
    return NotReady(
        f"nothing answers at {target}: start the service with `pdserve up`, or name the right host:port as the target"
    )
