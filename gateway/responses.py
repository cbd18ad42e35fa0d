"""Messages of the response stream: one per token, and the completion at the end."""

from __future__ import annotations

from gateway.output_text import OutputText
from gateway.tokenizer import Tokenizer
from pdserve.core.request import Mode
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import EventKind, Figure, Timeline
from pdserve.pb import inference_pb2 as pb
from router.request_record import RequestRecord, RoutedToken, RoutingResult


def token_to_proto(token: RoutedToken, text: str, index: int, tokenizer: Tokenizer | None) -> pb.Token:
    """The message for one token. ``text`` is what the token adds to the output. Log-probabilities belong to the token
    itself, even if its text is held back or trimmed."""
    message = pb.Token(token_id=token.token_id, text=text, index=index)
    if (logprobs := token.logprobs) is not None:
        message.logprob = logprobs.logprob
        for token_id, logprob in logprobs.top:
            alone = tokenizer.token_text(token_id) if tokenizer else ""
            message.top_logprobs.append(pb.TopLogprob(token_id=token_id, text=alone, logprob=logprob))
    return message


_MODES: dict[Mode | None, pb.Mode.ValueType] = {Mode.PD: pb.MODE_PD, Mode.COLOCATED: pb.MODE_COLOCATED}


def completion_to_proto(
    record: RequestRecord, result: RoutingResult, output: OutputText, finish_reason: FinishReason
) -> pb.Completion:
    """The account of a finished request."""
    request, timeline = record.request, record.timeline
    return pb.Completion(
        request_id=request.request_id,
        text=output.text,
        finish_reason=finish_reason,
        mode=_MODES.get(result.mode, pb.MODE_UNSPECIFIED),
        prefill_worker=result.prefill_worker,
        decode_worker=result.decode_worker,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=len(record.output_token_ids),
        transfer=_transfer(timeline, result),
        events=[
            pb.Event(kind=event.kind, worker=event.worker, time_s=event.time_s) for event in timeline.events.values()
        ],
        clocks=[
            pb.Clock(worker=worker, offset_s=clock.offset_s, error_s=clock.error_s)
            for worker, clock in timeline.clocks.items()
        ],
        gateway_ttft_ms=_stages_ms(timeline, Figure.TTFT),
        gateway_ttft_decode_ms=_stages_ms(timeline, Figure.TTFT_DECODE),
        attempts=result.attempts,
        token_ids=output.token_ids,
        prefill_cached_tokens=result.prefill_cached_tokens,
    )


def _transfer(timeline: Timeline, result: RoutingResult) -> pb.Transfer:
    proof = result.proof
    transfer = pb.Transfer(kv_bytes_expected=result.kv_bytes_expected, block_size=result.block_size)
    if proof is not None:
        transfer.transport = proof.transport
        transfer.kv_bytes = proof.kv_bytes
        transfer.kv_bytes_retried = proof.kv_bytes_retried
        transfer.blocks_sent = proof.blocks_received
        transfer.blocks_skipped = proof.blocks_skipped
        transfer.messages = proof.messages
        transfer.checksum = proof.checksum
        transfer.wire_ms = proof.wire_ms
        transfer.request_to_ready_ms = proof.request_to_ready_ms
        transfer.export_ms, transfer.import_ms, transfer.span_ms = proof.export_ms, proof.import_ms, proof.span_ms
        transfer.gbs, transfer.ceiling_gbs = proof.gbs, proof.ceiling_gbs
    sampled, verified = EventKind.TOKEN_1_SAMPLED, EventKind.KV_VERIFIED
    if timeline.has(sampled) and timeline.has(verified):
        transfer.exposed_ms = max(0.0, timeline.gateway_time(verified) - timeline.gateway_time(sampled)) * 1e3
        transfer.room_wait_ms = timeline.room_wait_ms
    return transfer


def _stages_ms(timeline: Timeline, figure: Figure) -> dict[str, float]:
    breakdown = timeline.breakdown(figure)
    return {} if breakdown is None else dict(breakdown.stages_ms)
