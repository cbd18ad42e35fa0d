"""Messages of the gRPC API: requests to submissions; tokens and completions to responses."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from gateway.inference import Completion, OutputToken
from gateway.submission import Submission
from gateway.tokenizer import Tokenizer
from pdserve.core.errors import InvalidRequest
from pdserve.core.request import Mode
from pdserve.core.sampling import MAX_BIASES, MAX_STOP_TOKEN_IDS, MAX_STOPS, SamplingParams
from pdserve.core.timeline import EventKind, Figure, Timeline
from pdserve.pb import inference_pb2 as pb
from router.request_record import RoutingResult

DEFAULT_MAX_TOKENS = 128

_MODES_ASKED: dict[int, Mode] = {
    pb.MODE_UNSPECIFIED: Mode.AUTO,
    pb.MODE_AUTO: Mode.AUTO,
    pb.MODE_PD: Mode.PD,
    pb.MODE_COLOCATED: Mode.COLOCATED,
}


def submission_of(data: bytes) -> Submission:
    """Parse a `GenerateRequest`. `InvalidRequest` if it is malformed, contains text that is not UTF-8, or names an
    unknown mode."""
    try:
        message = pb.GenerateRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            f"message: it is not a GenerateRequest, or a string in it is not UTF-8 ({error}); encode it by "
            "proto/pdserve/pb/inference.proto"
        ) from None
    if message.mode not in _MODES_ASKED:
        raise InvalidRequest(f"mode: {message.mode} is unknown; use MODE_AUTO, MODE_PD or MODE_COLOCATED")
    kind = message.WhichOneof("prompt")
    return Submission(
        prompt=None if kind is None else message.text if kind == "text" else message.token_ids.ids,
        sampling=_sampling(message.sampling),
        request_id=message.request_id,
        mode=_MODES_ASKED[message.mode],
        salt=message.salt,
        shorten=not message.sampling.HasField("max_tokens"),
    )


def _sampling(asked: pb.Sampling) -> SamplingParams:
    # Checked before they are copied.
    for name, most in (("stop", MAX_STOPS), ("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_BIASES)):
        if (count := len(getattr(asked, name))) > most:
            raise InvalidRequest(f"{name}: {count} entries are more than {most}; send fewer")
    return SamplingParams(
        max_tokens=asked.max_tokens if asked.HasField("max_tokens") else DEFAULT_MAX_TOKENS,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p if asked.HasField("top_p") else 1.0,
        seed=asked.seed if asked.HasField("seed") else None,
        stop=tuple(asked.stop),
        stop_token_ids=tuple(dict.fromkeys(asked.stop_token_ids)),
        ignore_eos=asked.ignore_eos,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty if asked.HasField("repetition_penalty") else 1.0,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=dict(asked.logit_bias),
        logprobs=asked.logprobs if asked.HasField("logprobs") else None,
    )


def token_to_proto(token: OutputToken, tokenizer: Tokenizer | None) -> pb.Token:
    """The message for one token."""
    message = pb.Token(token_id=token.token_id, text=token.text, index=token.index)
    if (logprobs := token.logprobs) is not None:
        message.logprob = logprobs.logprob
        for token_id, logprob in logprobs.top:
            alone = tokenizer.token_text(token_id) if tokenizer else ""
            message.top_logprobs.append(pb.TopLogprob(token_id=token_id, text=alone, logprob=logprob))
    return message


_MODES: dict[Mode | None, pb.Mode.ValueType] = {Mode.PD: pb.MODE_PD, Mode.COLOCATED: pb.MODE_COLOCATED}


def completion_to_proto(completion: Completion) -> pb.Completion:
    """The account of a finished request."""
    record, result, output = completion.record, completion.result, completion.output
    request, timeline = record.request, record.timeline
    return pb.Completion(
        request_id=request.request_id,
        text=output.text,
        finish_reason=completion.finish_reason,
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
