"""Bounds on pending peers: those that have connected, and have not proven that they know the service's secret, or not
introduced themselves yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from runtime.logs import LimitedLog

INTRODUCTION_S = 5.0
"""Limit: time until a connection has proven and introduced itself. Then: closed."""
MAX_PENDING_PEERS = 64
"""Limit: unproven connections of a transport; 16 with `grpc_stream`, `torch_dist`. Then: the oldest is closed."""
MIN_PENDING_S = 1.0
"""A pending peer is not closed in favour of another one before this time. Workers introduce themselves within
milliseconds."""
MAX_HELLO_BYTES = 16 * 2**10
"""The largest header that a pending peer may send, once it is proven. It may send no payload."""

_log = logging.getLogger(__name__)


class PendingPeer:
    """A peer between `HandshakeLimit.add` and `leave`.

    ``cut`` closes its connection, for the reason given; None if nothing is left to close."""

    def __init__(self, limit: HandshakeLimit, introduction_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.cut: Callable[[str], object] | None = None
        self.since_s = loop.time()
        self.rejected = False
        self._limit = limit
        why = f"the peer did not introduce itself within {introduction_s:g} s"
        self._timer = loop.call_later(introduction_s, self.reject, why)

    def reject(self, why: str) -> None:
        """Close the connection, after which the peer leaves."""
        if not self.rejected and self.cut is not None:
            self.rejected = True
            self._limit.log_rejection(why)
            self.cut(why)

    def leave(self) -> None:
        """The peer has introduced itself, or its connection is closed. May be called twice."""
        self._timer.cancel()
        self.cut = None
        self._limit.remove(self)


class HandshakeLimit:
    """The pending peers of the transport ``name``: at most ``limit``, each for at most ``introduction_s``. Belongs to
    one event loop."""

    def __init__(self, name: str, limit: int = MAX_PENDING_PEERS, introduction_s: float = INTRODUCTION_S) -> None:
        self.name = name
        self._most, self._introduction_s = limit, introduction_s
        self._present: dict[PendingPeer, None] = {}  # the oldest first
        self._left = asyncio.Event()
        self._rejections = LimitedLog(_log)

    def __len__(self) -> int:
        return len(self._present)

    async def room(self) -> None:
        """Return when one more may be added. If there are as many as allowed, the oldest is closed after
        `MIN_PENDING_S`, so that silent connections keep no worker out."""
        loop = asyncio.get_running_loop()
        while len(self._present) >= self._most:
            wait_s = MIN_PENDING_S
            if (oldest := next((each for each in self._present if not each.rejected), None)) is not None:
                wait_s = oldest.since_s + MIN_PENDING_S - loop.time()
                if wait_s <= 0:
                    oldest.reject(f"the peer did not introduce itself within {MIN_PENDING_S:g} s, and others wait")
                    wait_s = MIN_PENDING_S
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._left.wait()

    def log_rejection(self, why: str) -> None:
        """Log that a pending peer's connection was closed, for this reason. A flood of them is not logged."""
        self._rejections.warning(f"a peer's connection was closed: {why} ({self.name})")

    def add(self) -> PendingPeer:
        """Add a pending peer. The caller has waited for `room`."""
        pending = PendingPeer(self, self._introduction_s)
        self._present[pending] = None
        return pending

    def remove(self, pending: PendingPeer) -> None:
        """Remove a peer that left."""
        self._present.pop(pending, None)
        self._left.set()
