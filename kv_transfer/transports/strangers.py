"""Peers that have connected and not said yet who they are: how many there may be at a time, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

INTRODUCTION_S = 5.0
"""How long a peer has to introduce itself, from the moment its connection was accepted."""
MAX_STRANGERS = 64
"""How many connections of one transport may be waiting for that."""
PATIENCE_S = 1.0
"""How long each of them is left alone, whoever else waits. Workers introduce themselves within milliseconds."""
MAX_HELLO_BYTES = 16 * 2**10
"""The largest header that such a peer may send, and no payload with it."""

_log = logging.getLogger(__name__)


class Stranger:
    """One of them, from `Strangers.enter` until `leave`. ``cut`` is how its connection is ended (with the reason),
    as long as it can be; ``met``: somebody deals with it."""

    def __init__(self, strangers: Strangers, introduction_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.cut: Callable[[str], object] | None = None
        self.since_s = loop.time()
        self.met = self.turned_away = False
        self._strangers = strangers
        why = f"the peer did not introduce itself within {introduction_s:g} s"
        self._timer = loop.call_later(introduction_s, self.turn_away, why)

    def turn_away(self, why: str) -> None:
        """End its connection; it leaves once that is closed."""
        if not self.turned_away and self.cut is not None:
            self.turned_away = True
            _log.warning("a connection was given up: %s (%s)", why, self._strangers.name)
            self.cut(why)

    def leave(self) -> None:
        """It has introduced itself, or its connection is closed. Leaving twice is fine."""
        self._timer.cancel()
        self.cut = None
        self._strangers.forget(self)


class Strangers:
    """Those of one transport (``name``), at most ``limit``, each for at most ``introduction_s``. Belongs to one event
    loop."""

    def __init__(self, name: str, limit: int = MAX_STRANGERS, introduction_s: float = INTRODUCTION_S) -> None:
        self.name = name
        self._limit, self._introduction_s = limit, introduction_s
        self._present: dict[Stranger, None] = {}  # the oldest first
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._present)

    async def room(self) -> None:
        """Return when one more may enter. If nobody leaves, the oldest has to go once it has had `PATIENCE_S`, so that
        silent connections keep no worker out."""
        loop = asyncio.get_running_loop()
        while len(self._present) >= self._limit:
            wait_s = PATIENCE_S
            if (oldest := next((each for each in self._present if not each.turned_away), None)) is not None:
                wait_s = oldest.since_s + PATIENCE_S - loop.time()
                if wait_s <= 0:
                    oldest.turn_away(f"others wait, and the peer has not introduced itself for {PATIENCE_S:g} s")
                    wait_s = PATIENCE_S
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._left.wait()

    def enter(self) -> Stranger:
        """A new one. It is for the caller to wait for `room` before."""
        stranger = Stranger(self, self._introduction_s)
        self._present[stranger] = None
        return stranger

    def forget(self, stranger: Stranger) -> None:
        """It left."""
        self._present.pop(stranger, None)
        self._left.set()
