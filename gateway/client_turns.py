"""Turns of clients at threads that all of them share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Client:
    """One client. ``jobs``: those in line, and those that wait for ``free`` places in it."""

    free: asyncio.Semaphore
    jobs: int = 0


class ClientTurns:
    """Each client has at most ``count`` jobs in line for the threads, so that others do not wait for all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._clients: dict[str, _Client] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no client has a job."""
        return not self._clients

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """A job of ``client``, once it may be in line."""
        own = self._clients.setdefault(client, _Client(asyncio.Semaphore(self._count)))
        own.jobs += 1
        try:
            async with own.free:
                yield
        finally:
            own.jobs -= 1
            if not own.jobs:
                del self._clients[client]
