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
    )
    from pdserve.core.request import Mode
    from pdserve.core.timeline import Breakdown, ClockOffset, Event, EventKind, Figure

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
    "HandOffMissing",
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


_HOMES = (
    "core.errors",
    "core.request",
    "core.timeline",
    "client.generation",
    "client.status",
    "client.sync_client",
    "client.async_client",
)
"""The modules that the names come from. Each imports at most those before it."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"pdserve.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'pdserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
