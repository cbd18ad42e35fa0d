"""Layout of the waterfall's bars, shared by terminal and picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.client.generation import Generation
from pdserve.core.timeline import NETWORK, UNATTRIBUTED, Breakdown, Figure

COLORS: Mapping[str, str] = {
    NETWORK: "#9aa5b1",
    "gateway": "#7b6fb5",
    "route": "#4f6bd8",
    "dispatch": "#23b5c4",
    "prefix_fetch": "#b5533c",
    "prefill_queue": "#f2c14e",
    "prefill": "#3fa34d",
    "prefill_leg": "#2f7d3b",
    "kv_exposed": "#d62246",
    "decode_queue": "#f79256",
    "leg_gap": "#8c564b",
    "decode_leg": "#e377c2",
    "drafting": "#17becf",
    "first_decode": "#a0c55f",
    UNATTRIBUTED: "#444444",
}


@dataclass(frozen=True, slots=True)
class StageBar:
    """A stage, which starts where the previous one ended. ``length_ms`` is negative for a clock error or residue; the
    next bar then starts earlier."""

    stage: str
    start_ms: float
    length_ms: float
    percent: float

    @property
    def left_ms(self) -> float:
        """The bar's left edge."""
        return min(self.start_ms, self.start_ms + self.length_ms)


def bars(breakdown: Breakdown) -> list[StageBar]:
    """The breakdown's stages, laid end to end from 0 to its total."""
    placed: list[StageBar] = []
    start_ms = 0.0
    for stage, length_ms in breakdown.stages_ms.items():
        percent = 100 * length_ms / breakdown.total_ms if breakdown.total_ms else 0.0
        placed.append(StageBar(stage, start_ms, length_ms, percent))
        start_ms += length_ms
    return placed


def longest(generation: Generation) -> Breakdown | None:
    """The most comprehensive breakdown: that of ``ttft_decode`` if there was a second token, else of ``ttft``."""
    return generation.breakdowns.get(Figure.TTFT_DECODE) or generation.breakdowns.get(Figure.TTFT)


def human_bytes(count: float) -> str:
    """1234567 → '1.2 MB' (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def reused(generation: Generation) -> str:
    """One line on what prefix caches saved: 'prefix cache: 128 of 200 prompt tokens not computed, …'."""
    parts = []
    if generation.prefill_cached_tokens:
        parts.append(f"{generation.prefill_cached_tokens} of {generation.prompt_tokens} prompt tokens not computed")
    if (fetch := generation.prefix_fetch) is not None:
        what = f"{human_bytes(fetch.kv_bytes)} in {fetch.duration_ms:.1f} ms"
        parts.append(f"{fetch.tokens} of these fetched from {fetch.source}: {fetch.failure or what}")
    if generation.kv_blocks_skipped:
        total = generation.kv_blocks_skipped + generation.kv_blocks_sent
        parts.append(f"{generation.kv_blocks_skipped} of {total} blocks not sent")
    return "prefix cache: " + (", ".join(parts) or "nothing found")


def guessed(generation: Generation) -> str:
    """One line on speculation: '40 of 64 guessed tokens right'. Empty if no guess was verified."""
    accepted, drafts = generation.accepted_draft_tokens, generation.draft_tokens
    return f"speculation: {accepted} of {drafts} guessed tokens right" if drafts else ""


def proof(generation: Generation) -> str:
    """One line on the KV bytes that were transferred: 'kv 1.2 MB = expected, 5 blocks over grpc_stream'."""
    if not generation.kv_bytes and not generation.kv_bytes_expected and not generation.kv_blocks_skipped:
        if generation.mode == "pd" and not generation.transport and len(generation.token_ids) > 1:
            return "kv transferred by the engine, which counts the bytes of all requests together"
        why = "colocated" if generation.mode == "colocated" else "no hand-off needed"
        return f"kv not transferred ({why})"
    parts = [f"kv {human_bytes(generation.kv_bytes)}"]
    if generation.kv_bytes == generation.kv_bytes_expected:
        parts[0] += " = expected"
    else:
        parts[0] += f" ≠ expected {human_bytes(generation.kv_bytes_expected)} ({generation.kv_bytes} ≠ "
        parts[0] += f"{generation.kv_bytes_expected} bytes)"
    blocks = "block" if generation.kv_blocks_sent == 1 else "blocks"
    parts.append(f"{generation.kv_blocks_sent} {blocks} over {generation.transport}")
    if generation.kv_blocks_skipped:
        parts.append(f"{generation.kv_blocks_skipped} already on decode")
    if 0 < generation.transfer.wire_bytes < generation.kv_bytes:
        parts.append(f"coded in {human_bytes(generation.transfer.wire_bytes)}")
    if generation.transfer.kv_bytes_retried:
        parts.append(f"{human_bytes(generation.transfer.kv_bytes_retried)} retried")
    if generation.transfer.checksum:
        parts.append(generation.transfer.checksum)
    return ", ".join(parts)
