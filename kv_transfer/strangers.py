"""Bounds on strangers: peers that have connected, and have not proven that they know the service's secret, or not
introduced themselves yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from runtime.limited_log import LimitedLog

INTRODUCTION_S = 5.0
"""Limit: time until a connection has proven and introduced itself. Then: closed."""
MAX_STRANGERS = 64
"""Limit: connections of a transport that have not; 16 with `grpc_stream`, `torch_dist`. Then: the oldest is closed."""
PATIENCE_S = 1.0
"""A stranger is not closed in favour of another one before this time. Workers introduce themselves within
milliseconds."""
MAX_HELLO_BYTES = 16 * 2**10
"""The largest header that a stranger may send, once it is proven. It may send no payload."""

_log = logging.getLogger(__name__)


class Stranger:
    """A peer between `Strangers.enter` and `leave`.

    ``cut`` closes its connection, for the reason given; None if nothing is left to close. ``met``: a task handles the
    connection.
    """

    def __init__(self, strangers: Strangers, introduction_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.cut: Callable[[str], object] | None = None
        self.since_s = loop.time()
        self.met = self.turned_away = False
        self._strangers = strangers
        why = f"the peer did not introduce itself within {introduction_s:g} s"
        self._timer = loop.call_later(introduction_s, self.turn_away, why)

    def turn_away(self, why: str) -> None:
        """Close the connection, after which the stranger leaves."""
        if not self.turned_away and self.cut is not None:
            self.turned_away = True
            self._strangers.complain(why)
            self.cut(why)

    def leave(self) -> None:
        """The peer has introduced itself, or its connection is closed. May be called twice."""
        self._timer.cancel()
        self.cut = None
        self._strangers.forget(self)


class Strangers:
    """The strangers of the transport ``name``: at most ``limit``, each for at most ``introduction_s``. Belongs to one
    event loop."""

    def __init__(self, name: str, limit: int = MAX_STRANGERS, introduction_s: float = INTRODUCTION_S) -> None:
        self.name = name
        self._limit, self._introduction_s = limit, introduction_s
        self._present: dict[Stranger, None] = {}  # the oldest first
        self._left = asyncio.Event()
        self._complaints = LimitedLog(_log)

    def __len__(self) -> int:
        return len(self._present)

    async def room(self) -> None:
        """Return when one more may enter. If all places are taken, the oldest stranger is closed after `PATIENCE_S`, so
        that silent connections keep no worker out."""
        loop = asyncio.get_running_loop()
        while len(self._present) >= self._limit:
            wait_s = PATIENCE_S
            if (oldest := next((each for each in self._present if not each.turned_away), None)) is not None:
                wait_s = oldest.since_s + PATIENCE_S - loop.time()
                if wait_s <= 0:
                    oldest.turn_away(f"the peer did not introduce itself within {PATIENCE_S:g} s, and others wait")
                    wait_s = PATIENCE_S
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._left.wait()

    def complain(self, why: str) -> None:
        """Log that a stranger's connection was closed, for this reason. A flood of them is not logged."""
        self._complaints.warning(f"a peer's connection was closed: {why} ({self.name})")

    def enter(self) -> Stranger:
        """Add a stranger. The caller has waited for `room`."""
        stranger = Stranger(self, self._introduction_s)
        self._present[stranger] = None
        return stranger

    def forget(self, stranger: Stranger) -> None:
        """Remove a stranger that left."""
        self._present.pop(stranger, None)
        self._left.set()
