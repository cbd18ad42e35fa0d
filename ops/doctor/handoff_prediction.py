"""Predicts the duration of a hand-off on a link: the time of its bytes on the wire, and the *exposed* part of it, which
decode waits for after the prompt is computed.

The model. A prompt of n tokens is computed in chunks; each chunk takes its share of the prefill, and its layers take
equal shares of the chunk. The sender queues *parts*: blocks, or some of their layers, that become ready at a time r.
``transfer.overlap`` determines the parts:

- ``none``: one part with all blocks, ready when the prompt is computed;
- ``chunk``: for each chunk the blocks that are full by its end, ready at its end; with the last chunk also the last,
  partly filled block. Blocks travel whole (`KVLayout.expected_bytes`);
- ``layer``: the same blocks in the groups of layers of `engine.scheduling.kv_connector.group_ends`, each ready
  when its last layer is computed.

The link serves parts in order at B bytes per second, so part i ends at ``end_i = max(end_(i-1), r_i) + bytes_i / B``.
With the one-way latency L and the prefill time T, exposed = end_last + L - T. Special cases: with ``none``,
exposed = L + bytes / B. On an infinitely fast link, exposed = L. On a link that is busy from its first part (ready at
r) on, exposed = r + bytes / B + L - T. The last one is about zero at the bandwidth Φ = bytes / T: a faster link hides
the hand-off except for its last part, a slower one cannot.

B is min(link rate, window / round trip), because at most ``transfer.max_inflight_bytes`` are unacknowledged. The model
leaves out checksums and the gathering of scattered blocks (they overlap with the wire, and matter only above about
1 GB/s: see docs/kv-transfer.md), headers (about 300 bytes per message), and other hand-offs on the same link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.scheduling.kv_connector import group_ends
from pdserve.core.kv_layout import KVLayout

Overlap = Literal["none", "chunk", "layer"]


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The rate of a link: ``gbs`` in 10^9 bytes per second, the round trip of a nearly empty message, and the most
    bytes that may be unacknowledged."""

    gbs: float
    round_trip_s: float = 0.0
    max_inflight_bytes: int | None = None

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second available to one hand-off."""
        rate = self.gbs * 1e9
        if self.max_inflight_bytes is None or self.round_trip_s <= 0:
            return rate
        return min(rate, self.max_inflight_bytes / self.round_trip_s)


class HandoffPart(NamedTuple):
    """``num_bytes`` of a hand-off that become ready at the same time, after the share ``ready`` of the prefill
    (0 to 1)."""

    ready: float
    num_bytes: int


def handoff_parts(
    layout: KVLayout, prompt_tokens: int, chunk_tokens: int, overlap: Overlap, layer_groups: int
) -> tuple[HandoffPart, ...]:
    """The parts of a prompt in sending order; their bytes sum to `KVLayout.expected_bytes` of it. ``chunk_tokens`` is
    the most that one step computes of it."""
    if overlap == "none":
        return (HandoffPart(1.0, layout.expected_bytes(prompt_tokens)),)
    parts: list[HandoffPart] = []
    queued = start = 0
    while start < prompt_tokens:
        end = min(start + chunk_tokens, prompt_tokens)
        # The last block is complete with the prompt, however many tokens are in it.
        full = layout.blocks_for(end) if end == prompt_tokens else end // layout.block_size
        if full > queued:
            layers = layout.num_layers
            ends: tuple[int, ...] = (layers,)
            if overlap == "layer":
                touched = layout.blocks_for(end) - start // layout.block_size
                ends = (*group_ends(layout, layer_groups, touched), layers)
            for begin, stop in itertools.pairwise((0, *ends)):
                ready = (start + (end - start) * stop / layers) / prompt_tokens
                parts.append(HandoffPart(ready, (full - queued) * layout.layer_bytes(range(begin, stop))))
        queued, start = full, end
    return tuple(parts)


class HandoffPrediction(NamedTuple):
    """``wire_s`` is the time of all bytes on the link, ``exposed_s`` the time from the prefill's end to the last byte's
    arrival."""

    num_bytes: int
    wire_s: float
    exposed_s: float


def predict(parts: Sequence[HandoffPart], link: LinkRate, prefill_s: float) -> HandoffPrediction:
    """The hand-off of ``parts`` during a prefill of ``prefill_s`` seconds. ValueError if the link's rate is not
    positive."""
    if link.bytes_per_s <= 0:
        raise ValueError(f"a link of {link.gbs} GB/s transfers nothing")
    end_s = 0.0
    for part in parts:
        end_s = max(end_s, part.ready * prefill_s) + part.num_bytes / link.bytes_per_s
    num_bytes = sum(part.num_bytes for part in parts)
    return HandoffPrediction(num_bytes, num_bytes / link.bytes_per_s, end_s + link.round_trip_s / 2 - prefill_s)


def hiding_gbs(parts: Sequence[HandoffPart], prefill_s: float) -> float:
    """Φ of this prompt: the bandwidth, in 10^9 bytes per second, at which its bytes take as long as its prefill;
    infinite for a prefill of no duration."""
    num_bytes = sum(part.num_bytes for part in parts)
    return num_bytes / prefill_s / 1e9 if prefill_s > 0 else math.inf


def hidden_tokens_per_s(layout: KVLayout, link: LinkRate) -> float:
    """The prefill rate, in tokens per second, up to which the link keeps up."""
    return link.bytes_per_s / layout.token_bytes
