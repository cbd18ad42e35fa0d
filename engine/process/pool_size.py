"""The default size of a KV pool on a GPU, from what a profiling run needed: no figure depends on the moment, so two
engines that start at once on one GPU get the same pools as two that start one after the other."""

from __future__ import annotations

from dataclasses import dataclass

CONTEXT_BYTES = 640 * 2**20
"""A CUDA context with its libraries and loaded kernels, outside of torch's allocator."""

_PROCESSES = 2  # engine and worker have a context each
_USABLE = 0.95  # of what is left after contexts; the rest is for fragmentation
_GRAPH_BYTES = 64 * 2**20  # what the driver keeps for recorded graphs, besides their tensors


@dataclass(frozen=True, slots=True)
class ProfiledMemory:
    """Bytes of an engine without its pool. ``held``: weights and tables. ``step``: the largest step's activations,
    logits and sampling, at its peak. ``graphs``: the same for the largest decode step, whose memory recorded graphs
    keep (0: no graphs)."""

    held: int
    step: int
    graphs: int = 0


def default_pool_bytes(total_bytes: int, share: float, needed: ProfiledMemory, limit_bytes: int | None = None) -> int:
    """Bytes for the pool of an engine that has the share ``share`` (0 to 1) of a GPU with ``total_bytes``, and may
    allocate at most ``limit_bytes``; 0 if nothing is left."""
    mine = total_bytes * share - _PROCESSES * CONTEXT_BYTES
    if limit_bytes is not None:
        mine = min(mine, limit_bytes - CONTEXT_BYTES)
    graphs = needed.graphs + _GRAPH_BYTES if needed.graphs else 0
    return max(0, int(mine * _USABLE) - needed.held - needed.step - graphs)
