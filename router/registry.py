"""The registered workers, their links, and their load."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import xxhash

from contract.control import WorkerHandle
from pdserve.core.clock import Clock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import LayoutMismatch, NotReady, PdserveError
from pdserve.core.handoff import PeerLink
from pdserve.core.prefix_digests import BlockUpdate
from pdserve.core.request import Mode, Request
from pdserve.core.worker import Links, Role, WorkerEpoch, WorkerInfo, WorkerLoad
from router.breaker import Breaker, BreakerState
from router.cost_model import CostModel
from router.placement import Placed, unavailable
from router.policies import compares_all, policy, uses_prefixes
from router.prefix_fetch import PAUSE_S, Fetch
from router.prefix_index import PrefixIndex, Prompt
from router.registered_worker import RegisteredWorker, Share
from router.view import ClusterView, Needs

log = logging.getLogger(__name__)

SAMPLE = 32
"""Limit: workers of each role among which one is chosen for a request, where there are more; all others only if none of
these can take it."""
FREED = 8
"""Of the workers whose load changed last, so many are among them."""

_NO_LINKS: Links = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Assignment:
    """The load of a placed request on its workers. ``decode`` is None if one worker does both. ``fetch``: what the
    worker that computes the prompt gets from another one's cache."""

    prefill: Share
    decode: Share | None
    reason: str
    fetch: Fetch | None = None

    def end(self) -> None:
        """Remove the load from both workers."""
        self.prefill.end()
        if self.decode is not None:
            self.decode.end()


class WorkerRegistry:
    """The workers of a router, one of the service's ``gateways``. Not thread-safe: it belongs to the router's event
    loop.

    Listeners (`subscribe`) are called synchronously when a worker may have become ready, free or lost.
    """

    def __init__(self, clock: Clock, config: RouterConfig, gateways: int = 1) -> None:
        self._clock = clock
        self._config = config
        self._gateways = gateways
        self.cost_model = CostModel()
        """Learns from the requests that the workers complete."""
        policies = [config.policy_of(role) for role in Role]
        for name in policies:
            policy(name)  # a plug-in that cannot be loaded is an error now
        wanted = config.prefix_fetch != "off" or any(map(uses_prefixes, policies))
        self.prefixes = PrefixIndex() if wanted else None
        """What the workers have in their prefix caches, if a policy needs to know, or workers fetch prefixes."""
        self._samples = not any(map(compares_all, policies))
        self._workers: dict[str, RegisteredWorker] = {}
        self._of_role: dict[Role, list[RegisteredWorker]] = {role: [] for role in Role}  # those that are not lost
        self._members: frozenset[str] = frozenset()
        self._lives: dict[str, str] = {}  # the last life of each worker id, including forgotten workers
        self._superseded: set[str] = set()
        self.restarts = Counter[str]()
        """How often a worker of an id came back in another process, as far as this router has seen it."""
        self._listeners: list[Callable[[], None]] = []
        self._worker_listeners: list[Callable[[], None]] = []
        self._choices = itertools.count(1)
        self._were_available: set[Mode] = set()
        self._freed: deque[str] = deque(maxlen=FREED)  # the workers whose load changed last
        self._live: frozenset[WorkerEpoch] = frozenset()
        self._look_for_late_s = float("-inf")  # no heartbeat becomes overdue before
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop holds only weak references to tasks

    # --- the workers -------------------------------------------------------------------------------------------------

    def add(self, handle: WorkerHandle, load: WorkerLoad | None = None, links: Links = _NO_LINKS) -> RegisteredWorker:
        """Register a worker by its first heartbeat, or replace its earlier incarnation, whose handle the caller must
        close."""
        info = handle.info
        replaced = self._workers.get(info.worker_id)
        breaker = replaced.breaker if replaced is not None else Breaker()
        worker = RegisteredWorker(handle, info, self._clock.now(), breaker)
        worker.is_member = self._is_member(info.worker_id)
        worker.beat(load or WorkerLoad(), links, info, self._clock.now())
        self._workers[info.worker_id] = worker
        for other in self._workers.values():
            self._fetch_again(other, info.worker_id)
        self._note_live()
        last = self._lives.get(info.worker_id)
        if self.prefixes is not None:
            self.prefixes.remove(info.worker_id)
        if last is not None and last != info.life:
            self._superseded.add(last)
            self.restarts[info.worker_id] += 1
        self._lives[info.worker_id] = info.life
        if replaced is not None:
            worker.last_used = replaced.last_used
            worker.retiring = replaced.retiring and replaced.info.life == info.life
            self._lose(replaced, "it was replaced by a new incarnation")
        self._came()
        return worker

    def heartbeat(
        self,
        worker_id: str,
        load: WorkerLoad,
        info: WorkerInfo | None = None,
        links: Links = _NO_LINKS,
        blocks: BlockUpdate | None = None,
    ) -> bool:
        """Apply a heartbeat with the state of the worker's ``links`` and the changes of its prefix cache. Returns False
        if this incarnation is not registered, or is lost; the caller must add it."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.lost or (info is not None and info.epoch != worker.info.epoch):
            return False
        if blocks is not None and self.prefixes is not None:
            self.prefixes.apply(worker_id, worker.info.epoch, blocks)
        if worker.beat(load, links, info, self._clock.now()):
            self._note_roles()
            self._came()
        else:
            self._load_changed(worker)
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

    def set_members(self, worker_ids: Collection[str]) -> None:
        """Give requests to these workers alone from now on (none are named: to all)."""
        self._members = frozenset(worker_ids)
        for worker in self._workers.values():
            if worker.is_member is not self._is_member(worker.worker_id):
                worker.is_member = not worker.is_member
                self._came()

    def _is_member(self, worker_id: str) -> bool:
        return not self._members or worker_id in self._members

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
            self._lives.pop(worker_id, None)
            self.restarts.pop(worker_id, None)
            self._forget(worker)
            self.notify()
        return worker

    def is_superseded(self, life: str) -> bool:
        """Whether a process must not register again, because another process has its worker id or it was dismissed."""
        return life in self._superseded

    def _lose(self, worker: RegisteredWorker, why: str) -> None:
        if not worker.lost:
            worker.lost, worker.lost_s = why, self._clock.now()
            self._note_live()
            if self.prefixes is not None and self._workers.get(worker.worker_id) is worker:
                self.prefixes.remove(worker.worker_id)

    def _forget(self, worker: RegisteredWorker) -> None:
        del self._workers[worker.worker_id]
        self._note_live()

    def blocks_after(self, worker_id: str) -> int | None:
        """Up to where the changes of a worker's prefix cache are known; None if it need not announce them."""
        worker = self._workers.get(worker_id)
        if self.prefixes is None or worker is None or worker.lost:
            return None
        return self.prefixes.position(worker_id, worker.info.epoch)

    def prompt(self, request: Request, token_ids: Sequence[int]) -> Prompt | None:
        """The tokens of a request, to be looked up in prefix caches. None if nothing needs that."""
        if self.prefixes is None or not self._workers or request.sampling.prompt_logprobs is not None:
            return None
        # Workers of different block sizes are not linked; those of the others get no prefix.
        block_size = next(iter(self._workers.values())).info.layout.block_size
        return Prompt(self.prefixes, request.salt, block_size, token_ids)

    def suspect(self, worker: RegisteredWorker) -> None:
        """Give the worker no more requests until its next heartbeat, because a request lost its connection."""
        if self._workers.get(worker.worker_id) is worker:  # its next incarnation has the same breaker
            worker.breaker.suspect = True
            self._breaker_changed(worker.worker_id)

    def failed(self, share: Share, error: PdserveError) -> None:
        """Count a request as failed by its worker. If that opens the breaker, the worker pauses; the last ready worker
        of a role does not."""
        worker = share.worker
        others = any(other.is_ready and other.role is worker.role and other is not worker for other in self.workers)
        breaker = worker.breaker
        if breaker.failed(error, share.round, may_open=others):
            log.warning("worker %s: %s", worker.worker_id, breaker.explanation)
            asyncio.get_running_loop().call_later(breaker.pause_s, self._probe, worker.worker_id, breaker)
        self._breaker_changed(worker.worker_id)

    def answered(self, share: Share) -> None:
        """Note that a request has its first token from its worker: if that is probed, it serves again."""
        if share.worker.breaker.answered(share.round):
            log.info("worker %s serves requests again", share.worker.worker_id)
            self._breaker_changed(share.worker.worker_id)

    @staticmethod
    def succeeded(share: Share) -> None:
        """Count a request as served by its worker."""
        share.worker.breaker.succeeded(share.round)

    def fetch_failed(self, worker: RegisteredWorker, source_id: str) -> None:
        """Let the worker fetch no prefix from this incarnation of the source for a while."""
        worker.avoided_sources |= {source_id}
        asyncio.get_running_loop().call_later(PAUSE_S, self._fetch_again, worker, source_id)

    @staticmethod
    def _fetch_again(worker: RegisteredWorker, source_id: str) -> None:
        if source_id in worker.avoided_sources:
            worker.avoided_sources -= {source_id}

    def _probe(self, worker_id: str, breaker: Breaker) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and worker.breaker is breaker:
            breaker.half_open()
            self._breaker_changed(worker_id)

    def _breaker_changed(self, worker_id: str) -> None:
        """Look anew at a worker's breaker, and call the listeners."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.cached_view = None
        self.notify()

    def _spare_the_last(self) -> None:
        """Let a worker that pauses or is probed have requests if no other of its role is ready."""
        paused = [w for w in self._workers.values() if w.breaker.state is not BreakerState.CLOSED and not w.lost]
        for worker in paused:
            if not self.ready(worker.role):
                worker.breaker.spare()
                worker.cached_view = None

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
        return tuple(worker.linked[key] for key in sorted(worker.linked.keys() & self._live))

    def _note_live(self) -> None:
        before = self._live
        self._live = frozenset([worker.info.worker_epoch for worker in self._workers.values() if not worker.lost])
        changed = before ^ self._live
        for worker in self._workers.values():
            worker.peers_changed(changed)
        self._note_roles()

    def _note_roles(self) -> None:
        for role, workers in self._of_role.items():
            workers[:] = [worker for worker in self._workers.values() if worker.role is role and not worker.lost]

    def ready(self, role: Role | None = None) -> list[RegisteredWorker]:
        """Ready workers of one role, or of all."""
        return [w for w in self._workers.values() if w.is_ready and (role is None or w.role == role)]

    def was_available(self, mode: Mode) -> bool:
        """Whether requests of ``mode`` could run at some time, so that missing workers may come back."""
        return mode in self._were_available

    def expect_workers(self, modes: Collection[Mode]) -> None:
        """Count these modes as available before: this gateway was restarted, and the workers have not reported yet."""
        self._were_available.update(modes)

    def unavailable(self, mode: Mode) -> NotReady | LayoutMismatch | None:
        """Why no request of ``mode`` can run now, or None. See `router.placement.unavailable`."""
        return unavailable(mode, self.view())

    def view(self) -> ClusterView:
        """The current state of all workers for `router.placement.place`. Only the values of workers that have changed
        are made anew."""
        self._note_late()
        return self._view_of(self._workers.values())

    def _view_of(self, workers: Iterable[RegisteredWorker]) -> ClusterView:
        live = self._live
        views = tuple([worker.cached_view or worker.view(live) for worker in workers])
        return ClusterView(views, self._config, self._gateways, self.cost_model.costs)

    @property
    def is_sampled(self) -> bool:
        """Whether requests are compared with a part of the workers."""
        return self._samples and len(self._workers) > len(Role) * SAMPLE

    def sample(self, needs: Needs) -> ClusterView | None:
        """A part of `view` in which a request may be placed, so that placement does not take longer the more workers
        there are: `SAMPLE` workers of each role, drawn by its ticket, that of its last attempt, those that have its
        prefix cached, and those that may just have become free. None if there are few workers, or a policy compares
        all."""
        if not self.is_sampled:
            return None
        self._note_late()
        number = xxhash.xxh3_64_intdigest(needs.ticket.to_bytes(8, "little"))
        chosen: dict[str, RegisteredWorker] = {}
        for workers in self._of_role.values():
            start = number % len(workers) if len(workers) > SAMPLE else 0
            drawn = workers[start : start + SAMPLE]
            for worker in drawn + workers[: SAMPLE - len(drawn)]:
                chosen[worker.worker_id] = worker
        cached = heapq.nlargest(SAMPLE, needs.cached, key=needs.cached.__getitem__)
        for worker_id in (needs.prefer, *cached, *self._freed):
            if (known := self._workers.get(worker_id)) is not None:
                chosen[worker_id] = known
        return self._view_of(chosen.values())

    def _note_late(self) -> None:
        """Note which heartbeats are overdue, if one may have become so since the last time."""
        now_s = self._clock.now()
        if now_s <= self._look_for_late_s:
            return
        allowed_s = self._config.heartbeat_timeout_s / 2
        self._look_for_late_s = now_s + allowed_s
        for worker in self._workers.values():
            if worker.heartbeat_s < now_s - allowed_s:
                worker.late = True
            else:
                self._look_for_late_s = min(self._look_for_late_s, worker.heartbeat_s + allowed_s)

    # --- load --------------------------------------------------------------------------------------------------------

    def begin(self, worker_id: str, tokens: int, prompt_tokens: int = 0, kv_tokens: int = 0) -> Share:
        """Add a request to the load of a worker (see `Share`). KeyError for an unknown worker."""
        worker = self._workers[worker_id]
        worker.last_used = next(self._choices)
        return Share(worker, tokens, prompt_tokens, kv_tokens, self._load_changed)

    def assign(self, needs: Needs, placed: Placed) -> Assignment:
        """Add a placed request to the load of its workers. KeyError for an unknown worker."""
        prompt = needs.prompt_tokens
        if needs.mode is Mode.AUTO:
            self.cost_model.placed(placed.explores)
        computed = needs.uncached(placed.prefill)
        if placed.fetch is not None:
            computed = min(computed, prompt - placed.fetch.num_tokens)
        if placed.decode is None:
            share = self.begin(placed.prefill, computed + needs.output_tokens, computed, prompt)
            return Assignment(share, None, placed.reason, placed.fetch)
        return Assignment(
            self.begin(placed.prefill, computed, computed, prompt),
            self.begin(placed.decode, needs.output_tokens, kv_tokens=prompt),
            placed.reason,
            placed.fetch,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run calls to workers that outlast the request that they are for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- changes -----------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change, until the returned function is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def subscribe_workers(self, listener: Callable[[], None]) -> Callable[[], None]:
        """As `subscribe`, but not after changes of the load."""
        self._worker_listeners.append(listener)
        return lambda: self._worker_listeners.remove(listener)

    def _load_changed(self, worker: RegisteredWorker) -> None:
        self._freed.append(worker.worker_id)
        self._notify_load()

    def _notify_load(self) -> None:
        for listener in list(self._listeners):
            listener()

    def notify(self) -> None:
        """Call all listeners after a change of workers or links."""
        self._spare_the_last()
        for listener in list(self._worker_listeners):
            listener()
        self._notify_load()

    def _came(self) -> None:
        """Note that a worker or a link may have become ready."""
        for mode in Mode:
            if mode not in self._were_available and self.unavailable(mode) is None:
                self._were_available.add(mode)
        self.notify()
