"""Predicts the hand-off of a prompt on a measured link, with ``transfer.overlap: none``.

With B bytes per second and a one-way latency L, the *exposed* time, which decode waits for after the prompt is
computed, is L + bytes / B. The other values of ``transfer.overlap`` send most of the bytes during the prefill, and hide
them if the link keeps up with it (`hidden_tokens_per_s`).

Blocks are sent whole. B is min(link rate, window / round trip), because at most ``transfer.max_inflight_bytes`` are
unacknowledged. The prediction leaves out checksums and the gathering of scattered blocks (they overlap with the wire,
and matter only above about 1 GB/s: see docs/kv-transfer.md), headers (about 300 bytes per message), and other hand-offs
on the same link.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The rate of a link: ``gbs`` in 10^9 bytes per second (more than 0), the round trip of a nearly empty message, and
    the most bytes that may be unacknowledged."""

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


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted hand-off of a prompt of ``tokens``: bytes, and milliseconds on the wire and exposed with
    ``transfer.overlap: none``."""

    tokens: int
    num_bytes: int
    wire_ms: float
    exposed_none_ms: float


def predict(layout: KVLayout, tokens: int, link: LinkRate) -> Prediction:
    """The hand-off of a prompt of ``tokens``."""
    num_bytes = layout.expected_bytes(tokens)
    wire_s = num_bytes / link.bytes_per_s
    return Prediction(tokens, num_bytes, wire_s * 1e3, (wire_s + link.round_trip_s / 2) * 1e3)


def hidden_tokens_per_s(layout: KVLayout, link: LinkRate) -> float:
    """The prefill rate, in tokens per second, up to which the link keeps up."""
    return link.bytes_per_s / layout.token_bytes
