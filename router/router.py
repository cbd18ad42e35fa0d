"""The router: takes requests, gives tokens. All decisions, no I/O of its own: workers are handles."""

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
"""With so many requests in a line that is not full, the rest of a burst is left to gRPC, which needs less memory for
each."""


class Router:
    """``auto_mode`` is what mode ``auto`` means here: ``auto`` itself, or ``colocated`` in a deployment of one role."""

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
        """Requests that wait for a worker."""
        return self._line.length

    @property
    def running(self) -> int:
        """Requests that are on workers."""
        return max(0, self._active - self._line.length)

    def arrived(self, being_read: int) -> None:
        """Note a new request, before anything is done for it. `CapacityExceeded` if it would find the queue full, or
        ``router.max_queue`` requests (``being_read``) wait to be tokenized."""
        if self._line.is_full or self._line.length < MAX_TAKEN_IN:
            self._arrivals.note()
        if self._line.is_full or being_read >= self._config.max_queue:
            raise self._line.refusal()

    def generate(self, record: RequestRecord) -> Generation:
        """The request's tokens; nothing happens before the first is asked for.

        Iterating raises `NotReady` or `LayoutMismatch` (no worker can take it), `CapacityExceeded` (queue full, does
        not fit), `DeadlineExceeded`, and `WorkerLost` or `TransferError` once the attempts are used up.
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
