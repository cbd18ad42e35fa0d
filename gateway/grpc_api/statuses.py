"""The table of errors and gRPC statuses."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from pdserve.core.errors import (
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
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
)

STATUSES: Mapping[type[BaseException], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    CapacityExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    WorkerLost: grpc.StatusCode.UNAVAILABLE,
    TransferError: grpc.StatusCode.UNAVAILABLE,
    LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    ModelError: grpc.StatusCode.FAILED_PRECONDITION,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    LaunchError: grpc.StatusCode.FAILED_PRECONDITION,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestAborted: grpc.StatusCode.CANCELLED,
    PdserveError: grpc.StatusCode.INTERNAL,
}


def status_of(error: BaseException) -> grpc.StatusCode:
    """The status for an error: that of its class or nearest base class; INTERNAL for unexpected errors."""
    for kind in type(error).__mro__:
        if kind in STATUSES:
            return STATUSES[kind]
    return grpc.StatusCode.INTERNAL
