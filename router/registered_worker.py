"""A worker as the registry knows it, and a request's share in its load."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role, WorkerInfo, WorkerLoad
from router.handles import WorkerHandle


@dataclass(slots=True, eq=False)
class RegisteredWorker:
    """One incarnation (epoch) of a worker.

    ``prompt_tokens`` are those sent to it whose first token has not come back yet; ``outstanding_tokens`` counts
    what it has still to compute of all requests on it. ``lost`` says why it is gone (empty: it is not); ``suspect`` is
    set when a request lost it before any heartbeat or broken connection said so; the next good heartbeat clears it.
    ``lost_s`` is when. ``retiring``: it finishes what it has and gets nothing more.
    ``confirmed`` holds the peers it answered to have connected to, whatever its heartbeats say meanwhile.
    ``held_blocks`` are those that the KV of the requests on it fills, ``held_at_beat`` what that was at its last
    heartbeat.
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
    confirmed: set[str] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)
    stale_peers: set[str] = field(default_factory=set)
    peer_errors: dict[str, PdserveError] = field(default_factory=dict)

    @property
    def worker_id(self) -> str:
        """Its name, the same over all incarnations."""
        return self.info.worker_id

    @property
    def role(self) -> Role:
        """What the router gives it."""
        return self.info.role

    @property
    def is_ready(self) -> bool:
        """Whether requests may go there."""
        return self.info.ready and not (self.lost or self.suspect or self.retiring)

    @property
    def state(self) -> str:
        """``ready``, ``starting``, ``suspect``, ``retiring`` or ``lost``, for people."""
        if self.lost:
            return "lost"
        if self.retiring:
            return "retiring"
        if self.suspect:
            return "suspect"
        return "ready" if self.info.ready else "starting"

    @property
    def peers(self) -> tuple[str, ...]:
        """Decode workers it is connected to."""
        return tuple(sorted((self.confirmed | set(self.load.peers)) - self.stale_peers))

    def is_connected_to(self, worker_id: str) -> bool:
        """Whether it has shaken hands with that decode worker's present incarnation."""
        return worker_id not in self.stale_peers and (worker_id in self.confirmed or worker_id in self.load.peers)

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV its pool holds."""
        return self.info.num_blocks * self.info.layout.block_size

    def fits(self, tokens: int) -> bool:
        """Whether a request of so many tokens, prompt and outputs, could ever run there."""
        return tokens <= min(self.pool_tokens, self.info.max_model_len)

    @property
    def free_blocks(self) -> int:
        """Blocks that are free there: as many as its last heartbeat said, less what requests have taken since, and with
        what they have given back."""
        return min(self.load.free_blocks + self.held_at_beat - self.held_blocks, self.info.num_blocks)

    def has_room(self, tokens: int) -> bool:
        """Whether it can allocate the blocks of so many tokens now. A worker without requests always can (see
        `fits`)."""
        return not self.outstanding_requests or self.info.layout.blocks_for(tokens) <= self.free_blocks

    def is_free(self, prefill_backlog_tokens: int) -> bool:
        """Whether another prompt may be sent: fewer prompt tokens than this wait on it, or none."""
        return self.prompt_tokens == 0 or self.prompt_tokens < prefill_backlog_tokens

    def beat(self, load: WorkerLoad, info: WorkerInfo | None, now_s: float) -> None:
        """Take in a heartbeat."""
        self.heartbeat_s = now_s
        self.load = load
        self.held_at_beat = self.held_blocks
        self.suspect = False
        if info is not None:
            self.info = info
        # A heartbeat may have left before a handshake it does not list was done: only the second in a row counts.
        unlisted = self.confirmed - set(load.peers)
        self.confirmed -= unlisted & self.unlisted
        self.unlisted = unlisted
