"""One worker, as placement and its policies see it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role

NO_LINKS: Mapping[str, float] = MappingProxyType({})

SPARE_SHARE = 4
"""A worker is full with ``max_num_seqs`` requests and one for every so many of them."""


class WorkerView(msgspec.Struct, frozen=True):
    """One worker, as `router.placement.place` sees it.

    ``block_size``, ``num_blocks``, ``max_tokens``: tokens per block, blocks in the pool, tokens of one request.
    ``node``: the host it runs on.
    ``running``, ``waiting``, ``free_blocks``: requests and blocks by its last heartbeat.
    ``blocks_placed``: blocks that the router has placed there since that heartbeat (negative: given back).
    ``outstanding_tokens``: what it has to compute: this router's own count, and what it reported of other gateways.
    ``outstanding_requests``: this router's requests on it. ``others_requests``: those of other gateways, by its last
    heartbeat.
    ``prompt_tokens``: outstanding tokens of prompts without a first token, and ``others_prompt_tokens`` those of them
    that other gateways have placed there.
    ``live``: not lost. ``ready``: takes requests. ``late``: its heartbeat is overdue.
    ``linked``: the decode workers that a prefill worker has links to, with the best rate measured on each link in 10^9
    bytes per second (0: none yet); ``link_errors``: why it has none to others.
    ``last_used``: grows with every choice; 0 if it was never chosen.
    ``decoding``: requests past their first token, by the router's count.
    ``max_num_seqs``: requests that it computes in one step; 0: not bounded.
    ``step_tokens``: the most tokens that one of its steps computes. ``avoided_sources``: workers from which it could
    not fetch the KV of a prefix lately.
    ``kind``: its kind in the cost model. ``block_bytes``: bytes of a KV block.
    ``waiting_blocks``, ``active_blocks``: blocks of ``prompt_tokens``, and the other blocks in use; both are computed.
    """

    worker_id: str
    role: Role
    block_size: int
    num_blocks: int
    max_tokens: int
    node: str = ""
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    blocks_placed: int = 0
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    others_requests: int = 0
    prompt_tokens: int = 0
    others_prompt_tokens: int = 0
    live: bool = True
    ready: bool = True
    late: bool = False
    linked: Mapping[str, float] = NO_LINKS
    link_errors: tuple[PdserveError, ...] = ()
    last_used: int = 0
    decoding: int = 0
    kind: str = ""
    block_bytes: int = 0
    max_num_seqs: int = 0
    step_tokens: int = 0
    avoided_sources: frozenset[str] = frozenset()
    waiting_blocks: int = 0
    active_blocks: int = 0

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
        """Whether it has all requests that it computes at a time, and a quarter more to replace those that end. Further
        ones would only make all of them late; in the router's queue they have turns, and a bound."""
        most = self.max_num_seqs
        return most > 0 and self.outstanding_requests + self.others_requests >= most + most // SPARE_SHARE

    @property
    def batch(self) -> int:
        """Number of requests that decode there, if it is a decode worker."""
        return max(self.decoding, self.outstanding_requests) + self.others_requests

    def has_room(self, tokens: int) -> bool:
        """Whether it can take a request and allocate blocks for ``tokens`` tokens now. A worker without requests of
        this router always can, so that no gateway is kept from a worker by the others."""
        if not self.outstanding_requests:
            return True
        return not self.is_full and self.blocks_for(tokens) <= self.room
