"""The router: assigns requests to workers and returns their tokens. It reaches workers through handles only."""

from __future__ import annotations

import itertools

from pdserve.core.clock import Clock
from pdserve.core.config import KVFailurePolicy, RouterConfig
from pdserve.core.request import Mode
from router.arrivals import Arrivals
from router.generation import Generation
from router.placement import WaitMode
from router.registry import WorkerRegistry
from router.request_record import RequestRecord
from router.retries import RetryBudget
from router.waiting_line import WaitingLine

MAX_TAKEN_IN = 1024
"""Bursts are no longer taken in first when so many requests wait and the queue is not full: a request needs less memory
inside gRPC."""


class Router:
    """Routes requests to the workers of ``registry``.

    ``auto_mode`` replaces mode ``auto``: it is ``auto`` itself, or ``colocated`` in a service with one role.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        config: RouterConfig,
        clock: Clock,
        auto_mode: WaitMode = Mode.AUTO,
        on_kv_failure: KVFailurePolicy = "retry",
    ) -> None:
        self.registry = registry
        self.auto_mode = auto_mode
        self._config = config
        self._clock = clock
        self._on_kv_failure = on_kv_failure
        self._line = WaitingLine(registry, config, clock)
        self._budget = RetryBudget(config.retry_share, clock, lambda: self._active)
        self._orders = itertools.count()
        self._arrivals = Arrivals()
        self._active = 0

    @property
    def queued(self) -> int:
        """Number of requests that wait for a worker."""
        return self._line.length

    @property
    def running(self) -> int:
        """Number of requests that are on workers."""
        return max(0, self._active - self._line.length)

    def arrived(self, being_read: int) -> None:
        """Note a new request before it is read. ``being_read`` is the number of requests that wait to be tokenized.
        `CapacityExceeded` if these, or the queue, have reached ``router.max_queue``."""
        if self._line.is_full or self._line.length < MAX_TAKEN_IN:
            self._arrivals.note()
        if self._line.is_full or being_read >= self._config.max_queue:
            raise self._line.refusal()

    def generate(self, record: RequestRecord) -> Generation:
        """Return the tokens of a request as an async iterator, which starts the request when the first is read.

        Iterating raises `NotReady` or `LayoutMismatch` (no worker can take it), `CapacityExceeded` (the queue is full,
        or the request does not fit), `DeadlineExceeded`, and `WorkerLost` or `TransferError` after the last attempt.
        """
        return Generation(
            record,
            next(self._orders),
            self._line,
            self.registry,
            self._config,
            self._clock,
            self.auto_mode,
            self._on_kv_failure,
            self._budget,
            self._arrivals,
            self._count,
        )

    def _count(self, change: int) -> None:
        self._active += change
