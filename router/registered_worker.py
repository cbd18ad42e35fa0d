"""A worker in the registry, and the load of one request on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from contract.control import WorkerHandle
from pdserve.core.errors import PdserveError
from pdserve.core.handoff import PeerLink
from pdserve.core.worker import Links, Role, WorkerEpoch, WorkerInfo, WorkerLoad
from router.breaker import Breaker
from router.cost_model import worker_kind
from router.view import WorkerView

_set = object.__setattr__


@dataclass(slots=True, eq=False)
class RegisteredWorker:
    """One incarnation (epoch) of a worker.

    ``heartbeat_s``, ``lost_s``: times of the last heartbeat and of its loss, on the router's clock.
    ``outstanding_tokens``, ``outstanding_requests``: what it has to compute for this router.
    ``prompt_tokens``: outstanding tokens of prompts of this router without a first token.
    ``decoding``: requests of this router past their first token.
    ``load``: its last report of itself, which has the requests of other gateways.
    ``held_blocks``: blocks of this router's requests on it now; ``held_at_beat``: at its last heartbeat.
    ``lost``: why it is gone (empty: it is not).
    ``breaker``: how it served its last requests, which its next incarnation inherits.
    ``retiring``: it finishes its requests and gets no more. So does a worker that is no member of the service.
    ``hand_offs``: requests that it has prefilled, and of which decode has given nothing yet.
    ``linked``, ``failed``: by its last heartbeat, its links to decode workers, and the errors of missing links.
    ``late``: its heartbeat is overdue.
    ``stalled_s``: since when its heartbeats say that it is stalled (`pdserve.core.worker.WorkerLoad`); infinite if not.
    ``avoided_sources``: workers from which it could not fetch the KV of a prefix lately.

    ``cached_view``: its `view`; None after any attribute was set.
    """

    handle: WorkerHandle
    info: WorkerInfo
    heartbeat_s: float
    breaker: Breaker
    load: WorkerLoad = field(default_factory=WorkerLoad)
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    prompt_tokens: int = 0
    decoding: int = 0
    held_blocks: int = 0
    held_at_beat: int = 0
    last_used: int = 0
    lost: str = ""
    lost_s: float = 0.0
    retiring: bool = False
    is_member: bool = True
    hand_offs: int = 0
    late: bool = False
    stalled_s: float = math.inf
    avoided_sources: frozenset[str] = frozenset()
    linked: Mapping[WorkerEpoch, PeerLink] = field(default_factory=dict)
    failed: Mapping[WorkerEpoch, PdserveError] = field(default_factory=dict)
    cached_view: WorkerView | None = field(default=None, init=False)
    _peers: Mapping[str, float] | None = field(default=None, init=False)

    def __setattr__(self, name: str, value: object) -> None:
        _set(self, name, value)
        _set(self, "cached_view", None)

    @property
    def worker_id(self) -> str:
        """Name of the worker, which all its incarnations share."""
        return self.info.worker_id

    @property
    def role(self) -> Role:
        """Its role, by its last heartbeat."""
        return self.info.role

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.info.ready and self.breaker.allows_requests and self.is_member and not (self.lost or self.retiring)

    @property
    def state(self) -> str:
        """``ready``, ``starting``, ``suspect``, ``failing``, ``retiring`` or ``lost``."""
        if self.lost:
            return "lost"
        if self.retiring or not self.is_member:
            return "retiring"
        if self.breaker.suspect:
            return "suspect"
        if not self.breaker.allows_requests:
            return "failing"
        return "ready" if self.info.ready else "starting"

    def view(self, live: frozenset[WorkerEpoch]) -> WorkerView:
        """Return its values for `router.placement`. Only links to ``live`` incarnations count."""
        info, load, peers = self.info, self.load, self._peers
        if peers is None:
            peers = {key[0]: link.ceiling_gbs for key, link in self.linked.items() if key in live}
            _set(self, "_peers", peers)
        view = WorkerView(
            worker_id=info.worker_id,
            role=info.role,
            block_size=info.layout.block_size,
            num_blocks=info.num_blocks,
            max_tokens=min(info.num_blocks * info.layout.block_size, info.max_model_len),
            node=info.node,
            running=load.running,
            waiting=load.waiting,
            free_blocks=load.free_blocks,
            blocks_placed=self.held_blocks - self.held_at_beat,
            outstanding_tokens=self.outstanding_tokens + load.others_tokens,
            outstanding_requests=self.outstanding_requests,
            others_requests=load.others_requests,
            prompt_tokens=self.prompt_tokens + load.others_prompt_tokens,
            others_prompt_tokens=load.others_prompt_tokens,
            live=not self.lost,
            ready=self.is_ready,
            late=self.late,
            linked=peers,
            link_errors=tuple([why for key, why in self.failed.items() if key in live]) if self.failed else (),
            last_used=self.last_used,
            decoding=self.decoding,
            kind=worker_kind(info.role, info.device),
            block_bytes=info.layout.block_bytes,
            max_num_seqs=info.max_num_seqs,
            serves_alone=info.serves_alone,
            step_tokens=info.max_num_batched_tokens,
            avoided_sources=self.avoided_sources,
        )
        _set(self, "cached_view", view)
        return view

    def peers_changed(self, changed: AbstractSet[WorkerEpoch]) -> None:
        """Note that these incarnations have come or are lost."""
        if not (self.linked.keys().isdisjoint(changed) and self.failed.keys().isdisjoint(changed)):
            self._peers = None

    @property
    def decoding_here(self) -> int:
        """Requests of all gateways that decode on it, if it is a decode worker."""
        return self.decoding + self.load.others_requests

    def beat(self, load: WorkerLoad, links: Links, info: WorkerInfo | None, now_s: float) -> bool:
        """Apply a heartbeat at ``now_s``. Returns whether its readiness, its role or its links have changed."""
        was_ready, role, linked = self.is_ready, self.role, self.linked
        self.heartbeat_s = now_s
        self.late = self.breaker.suspect = False
        self.load = load
        self.stalled_s = min(self.stalled_s, now_s) if load.stalled else math.inf
        self.held_at_beat = self.held_blocks
        if info is not None:
            self.info = info
        self.linked = {key: outcome for key, outcome in links.items() if isinstance(outcome, PeerLink)}
        self.failed = {key: outcome for key, outcome in links.items() if isinstance(outcome, PdserveError)}
        self._peers = None
        return self.is_ready != was_ready or self.role is not role or self.linked.keys() != linked.keys()


class Share:
    """The load of one request on one worker, until `end`. It counts what is still to be computed.

    The worker has to compute ``tokens``, of which ``prompt_tokens`` are prefilled first (0: it receives the KV). It
    holds the KV of ``kv_tokens`` at first. ``changed`` is called with the worker when it may take more requests.
    """

    def __init__(
        self,
        worker: RegisteredWorker,
        tokens: int,
        prompt_tokens: int,
        kv_tokens: int,
        changed: Callable[[RegisteredWorker], None],
    ) -> None:
        self.worker = worker
        self._kv_tokens = kv_tokens
        self._changed = changed
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens
        self._open = True
        self._decoding = False
        self.round = worker.breaker.begin()
        worker.held_blocks += worker.info.layout.blocks_for(kv_tokens)
        worker.outstanding_tokens += tokens
        worker.outstanding_requests += 1
        worker.prompt_tokens += prompt_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens that are to be computed before its first token; 0 after that."""
        return self._prompt_tokens

    def prefilled(self) -> None:
        """Note its first token: the prompt no longer waits. May be called again."""
        if self._prompt_tokens:
            self._less(self._prompt_tokens)
            self.worker.prompt_tokens -= self._prompt_tokens
            self._prompt_tokens = 0
            self._changed(self.worker)

    def token_made(self) -> None:
        """Note one output token."""
        self._less(1)
        if self._open:
            if not self._decoding:
                self._decoding = True
                self.worker.decoding += 1
            self.worker.held_blocks += self._kv_tokens % self.worker.info.layout.block_size == 0
            self._kv_tokens += 1

    def end(self) -> None:
        """Note that the request has left the worker. May be called again."""
        if self._open:
            self._open = False
            self.worker.decoding -= self._decoding
            self._less(self._tokens)
            self.worker.outstanding_requests -= 1
            self.worker.held_blocks -= self.worker.info.layout.blocks_for(self._kv_tokens)
            self.worker.prompt_tokens -= self._prompt_tokens
            self._prompt_tokens = 0
            self.worker.breaker.left(self.round)
            self._changed(self.worker)

    def _less(self, tokens: int) -> None:
        tokens = min(tokens, self._tokens)
        self._tokens -= tokens
        self.worker.outstanding_tokens -= tokens
