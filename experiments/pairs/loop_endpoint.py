"""An endpoint with an event loop in a thread, like a worker's KV ends."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from experiments.pairs.endpoint import Endpoint, pin
from pdserve.core.config import TransferConfig

TRANSPORT_VARIABLE = "PDSERVE_BENCH_TRANSPORT"
TIMEOUT_S = 60.0
TRANSFER = TransferConfig()
"""What a service has by default."""

T = TypeVar("T")


class LoopEndpoint(Endpoint):
    """Base of our programs; ``transport_name`` is the transport that was asked for."""

    def start_loop(self) -> None:
        """Start the loop; call it before `on_loop`."""
        pin(self.role)
        self.transport_name = os.environ[TRANSPORT_VARIABLE]
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, TIMEOUT_S), self._loop).result()
