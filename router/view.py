"""What placement decides upon: the needs of a request, and the workers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from pdserve.core.config import RouterConfig
from pdserve.core.errors import PdserveError
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.cost_model import NOTHING_KNOWN, Costs

WaitMode = Literal[Mode.PD, Mode.COLOCATED, Mode.AUTO]
"""Mode of a request. ``auto`` is what is cheaper (`router.auto_mode`)."""

NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})

NO_LINKS: Mapping[str, float] = MappingProxyType({})

SPARE_SHARE = 4
"""A worker is full with ``max_num_seqs`` requests and one for every so many of them."""


class Needs(msgspec.Struct, frozen=True):
    """What a request needs from its workers."""

    mode: WaitMode
    prompt_tokens: int
    """Tokens to compute first."""
    output_tokens: int
    """The most tokens to sample after them."""
    avoid: frozenset[str] = frozenset()
    """Workers that failed the request."""
    prefer: str = ""
    """Prefill worker of the last attempt, whose prefix cache holds the prompt (empty: none)."""
    ticket: int = 0
    """A number of its own, from which random policies draw."""
    session: str = ""
    """The session that it belongs to (empty: none)."""
    cached: Mapping[str, int] = NOTHING_CACHED
    """How many of its first tokens workers have in their prefix caches, as far as known; others have none."""
    min_output_tokens: int = 1
    """The fewest tokens to sample."""
    ahead: bool = False
    """Its client has fewer requests in progress than another one, and is given room that the others are not."""

    @property
    def tokens(self) -> int:
        """Tokens of prompt and outputs."""
        return self.prompt_tokens + self.output_tokens

    def uncached(self, worker_id: str) -> int:
        """Tokens of the prompt that this worker has to compute, at least the last one."""
        return max(1, self.prompt_tokens - self.cached.get(worker_id, 0))


class WorkerView(msgspec.Struct, frozen=True):
    """One worker, as `router.placement.place` sees it."""

    worker_id: str
    role: Role
    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Blocks in the pool."""
    max_tokens: int
    """Tokens of one request."""
    node: str = ""
    """The host it runs on."""
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    """Requests and blocks by its last heartbeat."""
    blocks_placed: int = 0
    """Blocks that the router has placed there since that heartbeat (negative: given back)."""
    outstanding_tokens: int = 0
    """What it has to compute: this router's own count, and what it reported of other gateways."""
    outstanding_requests: int = 0
    """This router's requests on it."""
    others_requests: int = 0
    """Those of other gateways, by its last heartbeat."""
    prompt_tokens: int = 0
    """Outstanding tokens of prompts without a first token."""
    others_prompt_tokens: int = 0
    """Those of them that other gateways have placed there."""
    live: bool = True
    """It is not lost."""
    ready: bool = True
    """It takes requests."""
    late: bool = False
    """Its heartbeat is overdue."""
    linked: Mapping[str, float] = NO_LINKS
    """The decode workers that a prefill worker has links to, with the best rate measured on each link in 10^9 bytes per
    second (0: none yet)."""
    link_errors: tuple[PdserveError, ...] = ()
    """Why it has no links to others."""
    last_used: int = 0
    """Grows with every choice; 0 if it was never chosen."""
    decoding: int = 0
    """Requests past their first token, by the router's count."""
    kind: str = ""
    """Its kind in the cost model."""
    block_bytes: int = 0
    """Bytes of a KV block."""
    max_num_seqs: int = 0
    """Requests that it computes in one step; 0: not bounded."""
    step_tokens: int = 0
    """The most tokens that one of its steps computes."""
    serves_alone: bool = True
    """It can serve a request without another worker."""
    avoided_sources: frozenset[str] = frozenset()
    """Workers from which it could not fetch the KV of a prefix lately."""
    waiting_blocks: int = 0
    active_blocks: int = 0
    """Computed: blocks of ``prompt_tokens``, and the other blocks in use."""

    def __post_init__(self) -> None:
        # Policies read these for every request, and a view serves many.
        waiting = self.blocks_for(self.prompt_tokens)
        msgspec.structs.force_setattr(self, "waiting_blocks", waiting)
        msgspec.structs.force_setattr(self, "active_blocks", max(0, self.num_blocks - self.room - waiting))

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for the KV of ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    @property
    def room(self) -> int:
        """Number of free blocks, less those placed since the last heartbeat."""
        return min(self.free_blocks - self.blocks_placed, self.num_blocks)

    @property
    def is_full(self) -> bool:
        """`is_full_for` the requests of a client that has the most of them."""
        return self.is_full_for(ahead=False)

    def is_full_for(self, *, ahead: bool) -> bool:
        """Whether it has all requests that it computes at a time, and a quarter more to replace those that end. Further
        ones would only make all of them late; in the router's queue they have turns, and a bound. Another quarter is
        for requests ``ahead``."""
        most = self.max_num_seqs
        spare = most // SPARE_SHARE + (max(1, most // SPARE_SHARE) if ahead else 0)
        return most > 0 and self.outstanding_requests + self.others_requests >= most + spare

    @property
    def batch(self) -> int:
        """Number of requests that decode there, if it is a decode worker."""
        return max(self.decoding, self.outstanding_requests) + self.others_requests

    def has_room(self, tokens: int, *, ahead: bool = False) -> bool:
        """Whether it can take a request and allocate blocks for ``tokens`` tokens now. A worker without requests of
        this router always can, so that no gateway is kept from a worker by the others."""
        if not self.outstanding_requests:
            return True
        return not self.is_full_for(ahead=ahead) and self.blocks_for(tokens) <= self.room


class ClusterView(msgspec.Struct, frozen=True):
    """All registered workers, including recently lost ones, and the settings of the router."""

    workers: tuple[WorkerView, ...]
    config: RouterConfig
    gateways: int = 1
    """The service's gateways. Each may give a worker its share of ``router.prefill_backlog_tokens``."""
    costs: Costs = NOTHING_KNOWN
    """What the requests of the deployment have shown."""

    def ready(self, role: Role | None = None) -> list[WorkerView]:
        """Ready workers of one role, or of all."""
        return [worker for worker in self.workers if worker.ready and (role is None or worker.role is role)]

    def is_free(self, worker: WorkerView, *, ahead: bool = False) -> bool:
        """Whether the worker may get another prompt: none of this router waits there, or fewer tokens than the backlog
        allows (twice as many for requests ``ahead``), or fewer of this router than its share of it. With a share, no
        gateway is kept from a worker whose backlog the others refill."""
        backlog = self.config.prefill_backlog_tokens * (2 if ahead else 1)
        own = worker.prompt_tokens - worker.others_prompt_tokens
        return own == 0 or worker.prompt_tokens < backlog or own * self.gateways < backlog
