"""What a KV transfer has at either end: its result, and the lease that bounds it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, Self, TypeVar

from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, RequestAborted, TransferTimeout

T = TypeVar("T")


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


class Transfer(ABC, Generic[T]):
    """A session: one transfer at one end, whose result is a ``T``. Its owner must `wait` for it or `abort` it.

    ``on_end`` is called once, when it has ended. ``deadline_s`` and ``lease_s`` are those of `Lease`.
    """

    _end_name: ClassVar[str]
    _unfinished: ClassVar[str]

    def __init__(
        self,
        attempt_id: str,
        clock: Clock,
        deadline_s: float,
        lease_s: float | None,
        on_end: Callable[[Self], None],
    ) -> None:
        self.attempt_id = attempt_id
        self.lease = Lease(clock, deadline_s, lease_s, self._expire)
        self.error: PdserveError | None = None
        """Why it failed."""
        self._on_end: Callable[[], None] = lambda: on_end(self)
        self._result: T
        self._ended = asyncio.Event()

    async def wait(self) -> T:
        """Wait for the result. When this returns or raises, nothing accesses the blocks. A cancellation aborts the
        transfer."""
        try:
            await self._ended.wait()
            await self._at_rest()
        except asyncio.CancelledError:
            await self.abort()
            raise
        if self.error is not None:
            raise self.error
        return self._result

    async def abort(self) -> None:
        """End the transfer, and tell the peer, unless it has ended. When this returns, nothing accesses the blocks."""
        self.end(RequestAborted(f"the KV transfer of {self.attempt_id} was aborted by its {self._end_name}"))
        await self._at_rest()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, with a result or an error."""
        return self._ended.is_set()

    def end(self, outcome: T | PdserveError) -> None:
        """Set the result or the error. The first call counts."""
        if self.is_over:
            return
        if isinstance(outcome, PdserveError):
            self.error = outcome
        else:
            self._result = outcome
        self.lease.cancel()
        self._ended.set()
        self._on_end()

    def _expire(self, why: str) -> None:
        self.end(TransferTimeout(f"KV of {self.attempt_id} is {self._unfinished} and {why}"))

    @abstractmethod
    async def _at_rest(self) -> None:
        """Wait until nothing accesses the blocks of the ended transfer."""
