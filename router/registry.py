"""The registered workers, their links, and their load."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from pdserve.core.clock import Clock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import LayoutMismatch, NotReady
from pdserve.core.handoff import PeerLink
from pdserve.core.request import Mode
from pdserve.core.worker import Links, Role, WorkerEpoch, WorkerInfo, WorkerLoad
from router.handles import WorkerHandle
from router.placement import ClusterView, Needs, Placed, unavailable
from router.registered_worker import RegisteredWorker, Share

_NO_LINKS: Links = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Assignment:
    """The load of a placed request on its workers. ``decode`` is None if one worker does both."""

    prefill: Share
    decode: Share | None
    reason: str

    def end(self) -> None:
        """Remove the load from both workers."""
        self.prefill.end()
        if self.decode is not None:
            self.decode.end()


class WorkerRegistry:
    """The workers of a router. Not thread-safe: it belongs to the router's event loop.

    Listeners (`subscribe`) are called synchronously when a worker may have become ready, free or lost.
    """

    def __init__(self, clock: Clock, config: RouterConfig) -> None:
        self._clock = clock
        self._config = config
        self._workers: dict[str, RegisteredWorker] = {}
        self._lives: dict[str, str] = {}  # the last life of each worker id, including forgotten workers
        self._superseded: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._worker_listeners: list[Callable[[], None]] = []
        self._choices = itertools.count(1)
        self._were_available: set[Mode] = set()

    # --- the workers -------------------------------------------------------------------------------------------------

    def add(self, handle: WorkerHandle, load: WorkerLoad | None = None, links: Links = _NO_LINKS) -> RegisteredWorker:
        """Register a worker by its first heartbeat, or replace its earlier incarnation, whose handle the caller must
        close."""
        info = handle.info
        replaced = self._workers.get(info.worker_id)
        worker = RegisteredWorker(handle, info, self._clock.now())
        worker.beat(load or WorkerLoad(), links, info, self._clock.now())
        self._workers[info.worker_id] = worker
        last = self._lives.get(info.worker_id)
        if last is not None and last != info.life:
            self._superseded.add(last)
        self._lives[info.worker_id] = info.life
        if replaced is not None:
            worker.last_used = replaced.last_used
            worker.retiring = replaced.retiring and replaced.info.life == info.life
            self._lose(replaced, "it was replaced by a new incarnation")
        self._came()
        return worker

    def heartbeat(
        self, worker_id: str, load: WorkerLoad, info: WorkerInfo | None = None, links: Links = _NO_LINKS
    ) -> bool:
        """Apply a heartbeat with the state of the worker's ``links``. Returns False if this incarnation is not
        registered, or is lost; the caller must add it."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.lost or (info is not None and info.epoch != worker.info.epoch):
            return False
        before = worker.is_ready, worker.linked
        worker.beat(load, links, info, self._clock.now())
        if (worker.is_ready, worker.linked) == before:
            self.notify_load()
        else:
            self._came()
        return True

    def lost(self, worker_id: str, why: str = "its control connection broke", *, epoch: str | None = None) -> None:
        """Mark a worker as lost; with ``epoch``, only that incarnation. Unknown workers are ignored."""
        worker = self._workers.get(worker_id)
        if worker is not None and not worker.lost and epoch in (None, worker.info.epoch):
            self._lose(worker, why)
            self.notify()

    def expire(self) -> list[RegisteredWorker]:
        """Mark workers without heartbeats as lost, and forget those lost long ago. Returns the newly lost workers; the
        caller must close their handles."""
        now_s = self._clock.now()
        expired = [
            worker
            for worker in self._workers.values()
            if not worker.lost and now_s - worker.heartbeat_s > self._config.heartbeat_timeout_s
        ]
        for worker in expired:
            self._lose(worker, f"no heartbeat for {now_s - worker.heartbeat_s:.1f} s")
        for worker in [w for w in self._workers.values() if w.lost and now_s - w.lost_s > self._config.forget_s]:
            self._forget(worker)
        if expired:
            self.notify()
        return expired

    def retire(self, worker_id: str) -> None:
        """Give the worker no more requests; it finishes those it has. Unknown workers are ignored."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.retiring = True
            self.notify()

    def dismiss(self, worker_id: str) -> RegisteredWorker | None:
        """Forget the worker and never accept its process again. The caller must close its handle."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._lose(worker, "it was retired")
            self._superseded.add(worker.info.life)
            self._forget(worker)
            self.notify()
        return worker

    def is_superseded(self, life: str) -> bool:
        """Whether a process must not register again, because another process has its worker id or it was dismissed."""
        return life in self._superseded

    def _lose(self, worker: RegisteredWorker, why: str) -> None:
        if not worker.lost:
            worker.lost, worker.lost_s = why, self._clock.now()

    def _forget(self, worker: RegisteredWorker) -> None:
        del self._workers[worker.worker_id]

    def suspect(self, worker: RegisteredWorker) -> None:
        """Give the worker no more requests until its next heartbeat, because a request lost its connection."""
        worker.suspect = True
        self.notify()

    # --- queries ------------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[RegisteredWorker, ...]:
        """All registered workers, including recently lost ones, by worker id."""
        return tuple(self._workers[worker_id] for worker_id in sorted(self._workers))

    def get(self, worker_id: str) -> RegisteredWorker | None:
        """The current incarnation of a worker."""
        return self._workers.get(worker_id)

    def age_s(self, worker: RegisteredWorker) -> float:
        """Seconds since the last heartbeat of ``worker``."""
        return self._clock.now() - worker.heartbeat_s

    def links(self, worker: RegisteredWorker) -> tuple[PeerLink, ...]:
        """The links of ``worker`` to live workers, by worker id."""
        return tuple(worker.linked[key] for key in sorted(worker.linked.keys() & self._live()))

    def _live(self) -> frozenset[WorkerEpoch]:
        return frozenset([worker.info.worker_epoch for worker in self._workers.values() if not worker.lost])

    def ready(self, role: Role | None = None) -> list[RegisteredWorker]:
        """Ready workers of one role, or of all."""
        return [w for w in self._workers.values() if w.is_ready and (role is None or w.role == role)]

    def was_available(self, mode: Mode) -> bool:
        """Whether requests of ``mode`` could run at some time, so that missing workers may come back."""
        return mode in self._were_available

    def unavailable(self, mode: Mode) -> NotReady | LayoutMismatch | None:
        """Why no request of ``mode`` can run now, or None. See `router.placement.unavailable`."""
        return unavailable(mode, self.view())

    def view(self) -> ClusterView:
        """The current state of all workers for `router.placement.place`."""
        late_s = self._clock.now() - self._config.heartbeat_timeout_s / 2
        live = self._live()
        return ClusterView(
            tuple([worker.view(live, late=worker.heartbeat_s < late_s) for worker in self._workers.values()]),
            self._config.policy,
            self._config.prefill_backlog_tokens,
        )

    # --- load --------------------------------------------------------------------------------------------------------

    def begin(self, worker_id: str, tokens: int, prompt_tokens: int = 0, kv_tokens: int = 0) -> Share:
        """Add a request to the load of a worker (see `Share`). KeyError for an unknown worker."""
        worker = self._workers[worker_id]
        worker.last_used = next(self._choices)
        return Share(worker, tokens, prompt_tokens, kv_tokens, self.notify_load)

    def assign(self, needs: Needs, placed: Placed) -> Assignment:
        """Add a placed request to the load of its workers. KeyError for an unknown worker."""
        prompt = needs.prompt_tokens
        if placed.decode is None:
            return Assignment(self.begin(placed.prefill, needs.tokens, prompt, prompt), None, placed.reason)
        return Assignment(
            self.begin(placed.prefill, prompt, prompt, prompt),
            self.begin(placed.decode, needs.output_tokens, kv_tokens=prompt),
            placed.reason,
        )

    # --- changes -----------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change, until the returned function is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def subscribe_workers(self, listener: Callable[[], None]) -> Callable[[], None]:
        """As `subscribe`, but not after changes of the load."""
        self._worker_listeners.append(listener)
        return lambda: self._worker_listeners.remove(listener)

    def notify_load(self) -> None:
        """Call the listeners after a change of the load."""
        for listener in list(self._listeners):
            listener()

    def notify(self) -> None:
        """Call all listeners after a change of workers or links."""
        for listener in list(self._worker_listeners):
            listener()
        self.notify_load()

    def _came(self) -> None:
        """Note that a worker or a link may have become ready."""
        for mode in Mode:
            if mode not in self._were_available and self.unavailable(mode) is None:
                self._were_available.add(mode)
        self.notify()
