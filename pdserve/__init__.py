"""pdserve: LLM serving with prefill and decode on separate workers, which shows the hand-off's cost for every request.

    from pdserve import Client

    with Client("localhost:50051") as client:
        for token in (stream := client.generate("def fibonacci(n):", max_tokens=64)):
            print(token.text, end="")
        print(stream.result().breakdowns)

Names are loaded on first use, so that importing the package is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.client.async_client import AsyncClient, AsyncStream
    from pdserve.client.generation import Generation, PrefixFetch, Token, TopLogprob, TransferDetails
    from pdserve.client.status import ServiceStatus, ServiceWorker
    from pdserve.client.sync_client import Client, Stream
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
    from pdserve.core.request import Mode
    from pdserve.core.timeline import Breakdown, ClockOffset, Event, EventKind, Figure

_HOME = {
    "AsyncClient": "pdserve.client.async_client",
    "AsyncStream": "pdserve.client.async_client",
    "Breakdown": "pdserve.core.timeline",
    "CapacityExceeded": "pdserve.core.errors",
    "Client": "pdserve.client.sync_client",
    "ClockOffset": "pdserve.core.timeline",
    "ConfigError": "pdserve.core.errors",
    "DeadlineExceeded": "pdserve.core.errors",
    "Event": "pdserve.core.timeline",
    "EventKind": "pdserve.core.timeline",
    "Figure": "pdserve.core.timeline",
    "Generation": "pdserve.client.generation",
    "InvalidRequest": "pdserve.core.errors",
    "LaunchError": "pdserve.core.errors",
    "LayoutMismatch": "pdserve.core.errors",
    "Mode": "pdserve.core.request",
    "ModelError": "pdserve.core.errors",
    "NotReady": "pdserve.core.errors",
    "PdserveError": "pdserve.core.errors",
    "PrefixFetch": "pdserve.client.generation",
    "RequestAborted": "pdserve.core.errors",
    "ServiceStatus": "pdserve.client.status",
    "ServiceWorker": "pdserve.client.status",
    "Stream": "pdserve.client.sync_client",
    "Token": "pdserve.client.generation",
    "TopLogprob": "pdserve.client.generation",
    "TransferDetails": "pdserve.client.generation",
    "TransferError": "pdserve.core.errors",
    "Unauthenticated": "pdserve.core.errors",
    "WorkerLost": "pdserve.core.errors",
}

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Breakdown",
    "CapacityExceeded",
    "Client",
    "ClockOffset",
    "ConfigError",
    "DeadlineExceeded",
    "Event",
    "EventKind",
    "Figure",
    "Generation",
    "InvalidRequest",
    "LaunchError",
    "LayoutMismatch",
    "Mode",
    "ModelError",
    "NotReady",
    "PdserveError",
    "PrefixFetch",
    "RequestAborted",
    "ServiceStatus",
    "ServiceWorker",
    "Stream",
    "Token",
    "TopLogprob",
    "TransferDetails",
    "TransferError",
    "Unauthenticated",
    "WorkerLost",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
