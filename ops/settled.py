"""Waiting until a service is idle, and counting the KV blocks that did not come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from pdserve.client.status import ServiceStatus


class ReportsStatus(Protocol):
    """Something that has a service's status, such as a client of the service."""

    async def status(self) -> ServiceStatus:
        """The service's status now; `PdserveError` if it does not answer."""


async def settled(client: ReportsStatus, timeout_s: float = 10.0) -> ServiceStatus:
    """The service's status once it is idle, no KV block is in use and every worker has reported since this call, or the
    last one after ``timeout_s``. A worker may keep blocks for a moment after its last request: until a transfer of them
    has ended at both ends."""
    return await _poll(client, lambda status: status.used_blocks == 0, timeout_s)


async def leaked_blocks(client: ReportsStatus, before: ServiceStatus, timeout_s: float = 10.0) -> int:
    """KV blocks that were free at ``before`` and are not any more, after waiting up to ``timeout_s`` for them."""
    after = await _poll(client, lambda status: _missing(before, status) == 0, timeout_s)
    return _missing(before, after)


async def _poll(client: ReportsStatus, good: Callable[[ServiceStatus], bool], timeout_s: float) -> ServiceStatus:
    started_s = time.monotonic()
    while True:
        status = await client.status()
        elapsed_s = time.monotonic() - started_s
        # Heartbeats from before this call may be outdated.
        fresh = all(worker.heartbeat_age_s < elapsed_s for worker in status.workers if worker.state == "ready")
        if (fresh and status.idle and good(status)) or elapsed_s >= timeout_s:
            return status
        await asyncio.sleep(0.1)


def _missing(before: ServiceStatus, after: ServiceStatus) -> int:
    free_before = {worker.worker_id: worker.free_blocks for worker in before.workers}
    return sum(
        max(0, free_before[worker.worker_id] - worker.free_blocks)
        for worker in after.workers
        if worker.worker_id in free_before
    )
