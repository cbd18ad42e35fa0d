"""What a KV transfer has at either end: its result, and the lease that bounds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError

T = TypeVar("T")


class TransferEnded(LookupError):
    """The transfer has ended here (``wait`` or ``abort`` returned), or was never begun. Not a `ValueError`, so that
    wrong arguments are never taken for it."""


class Lease:
    """Calls ``expire(why)`` once, on the running loop, when ``deadline_s`` (of ``clock``) has passed, or when `renew`
    was not called for ``lease_s`` seconds (None: silence does not count before `watch`); not after `cancel`."""

    def __init__(self, clock: Clock, deadline_s: float, lease_s: float | None, expire: Callable[[str], None]) -> None:
        self._clock, self._deadline_s, self._lease_s, self._expire = clock, deadline_s, lease_s, expire
        self._loop = asyncio.get_running_loop()
        self._heard_s = clock.now()
        self._arm()

    def watch(self, lease_s: float) -> None:
        """Expire after so much silence from now on."""
        self._lease_s = lease_s
        self.renew()
        self._timer.cancel()
        self._arm()

    def renew(self) -> None:
        """The peer has been heard of."""
        self._heard_s = self._clock.now()

    def cancel(self) -> None:
        """Never expire."""
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
    """One transfer at one end, whose result is a ``T``. ``outcome`` is None until `conclude`."""

    def __init__(self, attempt_id: str, lease: Lease) -> None:
        self.attempt_id, self.lease = attempt_id, lease
        self.outcome: T | PdserveError | None = None
        self._ended = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether it has an outcome."""
        return self.outcome is not None

    def conclude(self, outcome: T | PdserveError) -> None:
        """End it: the lease is over, and `ended` returns."""
        self.outcome = outcome
        self.lease.cancel()
        self._ended.set()

    async def ended(self) -> None:
        """Return once it has an outcome."""
        await self._ended.wait()

    def result(self) -> T:
        """The result, or the error it ended with, raised."""
        if isinstance(self.outcome, PdserveError):
            raise self.outcome
        return cast(T, self.outcome)
