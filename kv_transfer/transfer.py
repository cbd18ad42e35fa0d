"""What a KV transfer has at either end: its result, and the lease that bounds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError

T = TypeVar("T")


class TransferEnded(LookupError):
    """There is no such transfer: ``wait`` or ``abort`` has returned, or it was never begun."""


class Lease:
    """Calls ``expire(why)`` once on the running loop, when ``deadline_s`` (a time of ``clock``) has passed, or when
    `renew` was not called for ``lease_s`` seconds. With None, that second limit begins with `watch`."""

    def __init__(self, clock: Clock, deadline_s: float, lease_s: float | None, expire: Callable[[str], None]) -> None:
        self._clock, self._deadline_s, self._lease_s, self._expire = clock, deadline_s, lease_s, expire
        self._loop = asyncio.get_running_loop()
        self._heard_s = clock.now()
        self._arm()

    def watch(self, lease_s: float) -> None:
        """Expire when `renew` is not called for ``lease_s`` seconds from now on."""
        self._lease_s = lease_s
        self.renew()
        self._timer.cancel()
        self._arm()

    def renew(self) -> None:
        """Note a message from the peer."""
        self._heard_s = self._clock.now()

    def cancel(self) -> None:
        """Stop the lease: it never expires."""
        self._timer.cancel()

    @property
    def _until_s(self) -> float:
        return self._deadline_s if self._lease_s is None else min(self._deadline_s, self._heard_s + self._lease_s)

    def _arm(self) -> None:
        self._timer = self._loop.call_later(max(0.0, self._until_s - self._clock.now()), self._fire)

    def _fire(self) -> None:
        now_s = self._clock.now()
        if now_s >= self._deadline_s:
            self._expire("its deadline passed")
        elif now_s >= self._until_s:
            self._expire(f"the peer was silent for {self._lease_s:g} s")
        else:
            self._arm()


class Transfer(Generic[T]):
    """One transfer at one end, whose result is a ``T``."""

    def __init__(self, attempt_id: str, lease: Lease) -> None:
        self.attempt_id, self.lease = attempt_id, lease
        self.error: PdserveError | None = None
        """Why it failed."""
        self._result: T
        self._ended = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, with a result or an error."""
        return self._ended.is_set()

    def conclude(self, outcome: T | PdserveError) -> None:
        """Set the result or the error, stop the lease, and let `ended` return."""
        if isinstance(outcome, PdserveError):
            self.error = outcome
        else:
            self._result = outcome
        self.lease.cancel()
        self._ended.set()

    async def ended(self) -> None:
        """Wait until it is over."""
        await self._ended.wait()

    def result(self) -> T:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self._result
