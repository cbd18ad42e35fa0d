"""The account of a finished request, which both APIs give: where it ran, what its hand-off moved, and how long each
stage took."""

from __future__ import annotations

from typing import Any

from gateway.inference import Completion
from pdserve.core.timeline import Figure
from router.session import RoutingResult

_PROOF = (
    "transport", "kv_bytes", "kv_bytes_retried", "blocks_skipped", "messages", "checksum", "wire_ms",
    "request_to_ready_ms", "export_ms", "import_ms", "span_ms", "gbs", "ceiling_gbs", "wire_bytes",
)  # fmt: skip
"""Fields of a `TransferProof` that have the same name in the account."""


def account_of(completion: Completion) -> dict[str, Any]:
    """Plain values under the names of the message ``Completion`` in proto/pdserve/pb/inference.proto, which documents
    them; ``mode`` is ``pd``, ``colocated``, or empty."""
    record, result = completion.record, completion.result
    timeline = record.timeline
    return {
        "request_id": record.request.request_id,
        "finish_reason": completion.finish_reason.value,
        "mode": completion.mode,
        "prefill_worker": result.prefill_worker,
        "decode_worker": result.decode_worker,
        "prompt_tokens": len(record.request.prompt_token_ids),
        "output_tokens": len(record.output_token_ids),
        "prefill_cached_tokens": result.prefill_cached_tokens,
        "draft_tokens": result.draft_tokens,
        "accepted_draft_tokens": result.accepted_draft_tokens,
        "attempts": record.attempts,
        "placements": list(record.placements),
        "failures": [failed._asdict() for failed in record.failures],
        "transfer": _transfer(completion),
        "prefix_fetch": _prefix_fetch(result),
        "gateway_ttft_ms": _stages_ms(completion, Figure.TTFT),
        "gateway_ttft_decode_ms": _stages_ms(completion, Figure.TTFT_DECODE),
        "events": [
            {"kind": str(event.kind), "worker": event.worker, "time_s": event.time_s}
            for event in timeline.events.values()
        ],
        "clocks": [
            {"worker": worker, "offset_s": clock.offset_s, "error_s": clock.error_s}
            for worker, clock in timeline.clocks.items()
        ],
    }


def _transfer(completion: Completion) -> dict[str, Any]:
    result, proof = completion.result, completion.result.proof
    transfer: dict[str, Any] = {"kv_bytes_expected": result.kv_bytes_expected, "block_size": result.block_size}
    if proof is not None:
        transfer |= {name: getattr(proof, name) for name in _PROOF}
        transfer["blocks_sent"] = proof.blocks_received
    if completion.exposed_ms is not None:
        room_wait_ms = completion.record.timeline.room_wait_ms
        transfer |= {"exposed_ms": completion.exposed_ms, "room_wait_ms": room_wait_ms}
    return transfer


def _prefix_fetch(result: RoutingResult) -> dict[str, Any] | None:
    fetch = result.prefix_fetch
    if fetch is None:
        return None
    return {
        "source": fetch.source,
        "tokens": fetch.tokens,
        "tokens_wanted": fetch.tokens_wanted,
        "kv_bytes": 0 if fetch.proof is None else fetch.proof.kv_bytes,
        "kv_bytes_expected": result.prefix_bytes_expected,
        "transport": "" if fetch.proof is None else fetch.proof.transport,
        "duration_ms": fetch.duration_ms,
        "failure": fetch.failure,
    }


def _stages_ms(completion: Completion, figure: Figure) -> dict[str, float]:
    breakdown = completion.breakdowns[figure]
    return {} if breakdown is None else dict(breakdown.stages_ms)
