"""A worker in the registry, and the load of one request on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdserve.core.errors import PdserveError
from pdserve.core.handoff import PeerLink
from pdserve.core.worker import Links, Role, WorkerEpoch, WorkerInfo, WorkerLoad
from router.handles import WorkerHandle
from router.placement import WorkerView


@dataclass(slots=True, eq=False)
class RegisteredWorker:
    """One incarnation (epoch) of a worker.

    ``heartbeat_s``, ``lost_s``: times of the last heartbeat and of its loss, on the router's clock.
    ``outstanding_tokens``, ``outstanding_requests``: what it has to compute.
    ``prompt_tokens``: outstanding tokens of prompts without a first token.
    ``held_blocks``: blocks of the requests on it now; ``held_at_beat``: at its last heartbeat.
    ``lost``: why it is gone (empty: it is not).
    ``suspect``: a request lost its connection; the next heartbeat clears it.
    ``retiring``: it finishes its requests and gets no more.
    ``linked``, ``failed``: by its last heartbeat, its links to decode workers, and the errors of missing links.
    """

    handle: WorkerHandle
    info: WorkerInfo
    heartbeat_s: float
    load: WorkerLoad = field(default_factory=WorkerLoad)
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    prompt_tokens: int = 0
    held_blocks: int = 0
    held_at_beat: int = 0
    last_used: int = 0
    lost: str = ""
    lost_s: float = 0.0
    suspect: bool = False
    retiring: bool = False
    linked: Mapping[WorkerEpoch, PeerLink] = field(default_factory=dict)
    failed: Mapping[WorkerEpoch, PdserveError] = field(default_factory=dict)

    @property
    def worker_id(self) -> str:
        """Name of the worker, which all its incarnations share."""
        return self.info.worker_id

    @property
    def role(self) -> Role:
        """Role of the worker."""
        return self.info.role

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.info.ready and not (self.lost or self.suspect or self.retiring)

    @property
    def state(self) -> str:
        """``ready``, ``starting``, ``suspect``, ``retiring`` or ``lost``."""
        if self.lost:
            return "lost"
        if self.retiring:
            return "retiring"
        if self.suspect:
            return "suspect"
        return "ready" if self.info.ready else "starting"

    def view(self, live: frozenset[WorkerEpoch], *, late: bool = False) -> WorkerView:
        """Return its values for `router.placement`. Only links to ``live`` incarnations count."""
        info, load = self.info, self.load
        return WorkerView(
            worker_id=info.worker_id,
            role=info.role,
            block_size=info.layout.block_size,
            num_blocks=info.num_blocks,
            max_tokens=min(info.num_blocks * info.layout.block_size, info.max_model_len),
            running=load.running,
            waiting=load.waiting,
            free_blocks=load.free_blocks,
            blocks_placed=self.held_blocks - self.held_at_beat,
            outstanding_tokens=self.outstanding_tokens,
            outstanding_requests=self.outstanding_requests,
            prompt_tokens=self.prompt_tokens,
            live=not self.lost,
            ready=self.is_ready,
            late=late,
            linked=frozenset([worker_id for worker_id, _ in self.linked.keys() & live]),
            link_errors=tuple([why for key, why in self.failed.items() if key in live]),
            last_used=self.last_used,
        )

    def beat(self, load: WorkerLoad, links: Links, info: WorkerInfo | None, now_s: float) -> None:
        """Apply a heartbeat at ``now_s``."""
        self.heartbeat_s = now_s
        self.load = load
        self.failed = {key: outcome for key, outcome in links.items() if isinstance(outcome, PdserveError)}
        self.linked = {key: outcome for key, outcome in links.items() if isinstance(outcome, PeerLink)}
        self.held_at_beat = self.held_blocks
        self.suspect = False
        if info is not None:
            self.info = info


class Share:
    """The load of one request on one worker, until `end`. It counts what is still to be computed.

    The worker has to compute ``tokens``, of which ``prompt_tokens`` are prefilled first. It holds the KV of
    ``kv_tokens`` at first. ``changed`` is called when the worker may take more requests.
    """

    def __init__(
        self, worker: RegisteredWorker, tokens: int, prompt_tokens: int, kv_tokens: int, changed: Callable[[], None]
    ) -> None:
        self.worker = worker
        self._kv_tokens = kv_tokens
        self._changed = changed
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens
        self._open = True
        worker.held_blocks += worker.info.layout.blocks_for(kv_tokens)
        worker.outstanding_tokens += tokens
        worker.outstanding_requests += 1
        worker.prompt_tokens += prompt_tokens

    def prefilled(self) -> None:
        """Note its first token: the prompt no longer waits. May be called again."""
        if self._prompt_tokens:
            self.worker.prompt_tokens -= self._prompt_tokens
            self._less(self._prompt_tokens)
            self._prompt_tokens = 0
            self._changed()

    def token_made(self) -> None:
        """Note one output token."""
        self._less(1)
        if self._open:
            self.worker.held_blocks += self._kv_tokens % self.worker.info.layout.block_size == 0
            self._kv_tokens += 1

    def end(self) -> None:
        """Note that the request has left the worker. May be called again."""
        if self._open:
            self._open = False
            self._less(self._tokens)
            self.worker.outstanding_requests -= 1
            self.worker.held_blocks -= self.worker.info.layout.blocks_for(self._kv_tokens)
            self.worker.prompt_tokens -= self._prompt_tokens
            self._prompt_tokens = 0
            self._changed()

    def _less(self, tokens: int) -> None:
        tokens = min(tokens, self._tokens)
        self._tokens -= tokens
        self.worker.outstanding_tokens -= tokens
