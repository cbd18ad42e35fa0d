"""What a hand-off will take on a link, as arithmetic: how long its bytes are on the wire, and how much of that is
*exposed*, which is what decode waits for after the prompt is computed.

The model. A prompt of n tokens is computed in chunks; each chunk takes its share of the prefill, and its layers take
equal shares of the chunk. The sender queues *parts*: blocks (or some of their layers) that become ready at a time r.
``transfer.overlap`` says which:

- ``none``: one part, all blocks, ready when the prompt is computed;
- ``chunk``: for each chunk the blocks that are full by its end, ready at its end; with the last chunk also the last,
  partly filled block. Blocks travel whole (`KVLayout.expected_bytes`);
- ``layer``: the same blocks, but in the groups of layers of `engine.scheduling.transfer_connector.group_ends`, each
  ready when its last layer is computed.

The link serves parts in order at B bytes per second: part i is over at ``end_i = max(end_(i-1), r_i) + bytes_i / B``.
With the one-way latency L, and T for the prefill, exposed = end_last + L - T. From this follow the cases that can be
said in a line: with ``none``, exposed = L + bytes / B; on a link that is infinitely fast, exposed = L; on one so slow
that it never idles from its first part (ready at r) on, exposed = r + bytes / B + L - T. The bandwidth at which the
last is about zero, bytes / T, is Φ: a link above it hides the hand-off up to the last part, one below it cannot.

B is min(link, window / round trip): no more than ``transfer.max_inflight_bytes`` travel unacknowledged. Not in the
model: checksums and the gathering of scattered blocks (they run beside the wire, and count where that is faster than
some 1 GB/s: see docs/kv-transfer.md), headers (some 300 bytes a message), other hand-offs on the same link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.scheduling.transfer_connector import group_ends
from pdserve.core.kv_layout import KVLayout

Overlap = Literal["none", "chunk", "layer"]


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What a link moves: ``gbs`` 10^9 bytes per second, ``round_trip_s`` of a message that is all but empty, and how
    many bytes may be on it unacknowledged."""

    gbs: float
    round_trip_s: float = 0.0
    max_inflight_bytes: int | None = None

    @property
    def bytes_per_s(self) -> float:
        """What a hand-off gets of it."""
        rate = self.gbs * 1e9
        if self.max_inflight_bytes is None or self.round_trip_s <= 0:
            return rate
        return min(rate, self.max_inflight_bytes / self.round_trip_s)


@dataclass(frozen=True, slots=True)
class Part:
    """``num_bytes`` of a hand-off that become ready at the same time: ``ready`` is the share of the prefill that is
    over by then (0 to 1)."""

    ready: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """How a prompt's blocks are cut up. ``chunk_tokens`` is the most that one step computes of it."""

    layout: KVLayout
    prompt_tokens: int
    chunk_tokens: int
    overlap: Overlap
    layer_groups: int

    def parts(self) -> tuple[Part, ...]:
        """In the order in which they are sent; their bytes sum to `KVLayout.expected_bytes` of the prompt."""
        if self.overlap == "none":
            return (Part(1.0, self.layout.expected_bytes(self.prompt_tokens)),)
        parts: list[Part] = []
        queued = start = 0
        while start < self.prompt_tokens:
            end = min(start + self.chunk_tokens, self.prompt_tokens)
            # The last block is complete with the prompt, however many tokens are in it.
            full = self.layout.blocks_for(end) if end == self.prompt_tokens else end // self.layout.block_size
            if full > queued:
                parts += self._chunk_parts(start, end, full - queued)
            queued, start = full, end
        return tuple(parts)

    def _chunk_parts(self, start: int, end: int, num_blocks: int) -> list[Part]:
        layers = self.layout.num_layers
        ends: tuple[int, ...] = (layers,)
        if self.overlap == "layer":
            touched = self.layout.blocks_for(end) - start // self.layout.block_size
            ends = (*group_ends(self.layout, self.layer_groups, touched), layers)
        first, last = start / self.prompt_tokens, end / self.prompt_tokens
        before = (0, *ends[:-1])
        return [
            Part(first + (last - first) * stop / layers, num_blocks * self.layout.layer_bytes(range(begin, stop)))
            for begin, stop in zip(before, ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class HandoffPrediction:
    """``wire_s`` is what all the bytes take on the link, ``exposed_s`` what of it (and of the way there) comes after
    the prefill's end. ``hidden`` is the share of ``wire_s`` that does not."""

    num_bytes: int
    wire_s: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        """0 to 1."""
        return max(0.0, 1.0 - self.exposed_s / self.wire_s) if self.wire_s > 0 else 1.0


def predict(parts: Sequence[Part], link: LinkRate, prefill_s: float) -> HandoffPrediction:
    """A hand-off of ``parts`` beside a prefill of ``prefill_s`` seconds. ValueError for a link that moves nothing."""
    if link.bytes_per_s <= 0:
        raise ValueError(f"a link of {link.gbs} GB/s moves nothing")
    end_s = 0.0
    for part in parts:
        end_s = max(end_s, part.ready * prefill_s) + part.num_bytes / link.bytes_per_s
    num_bytes = sum(part.num_bytes for part in parts)
    return HandoffPrediction(num_bytes, num_bytes / link.bytes_per_s, end_s + link.round_trip_s / 2 - prefill_s)


def hiding_gbs(parts: Sequence[Part], prefill_s: float) -> float:
    """Φ of this prompt: the bandwidth at which its bytes take as long as its prefill (10^9 bytes per second; infinite
    if the prefill takes no time)."""
    num_bytes = sum(part.num_bytes for part in parts)
    return num_bytes / prefill_s / 1e9 if prefill_s > 0 else math.inf


def hidden_tokens_per_s(layout: KVLayout, link: LinkRate) -> float:
    """The prefill rate up to which the link keeps up: tokens per second whose KV it moves in the same time."""
    return link.bytes_per_s / layout.token_bytes
