"""Messages of the gRPC API: requests to submissions; tokens and completions to responses."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from gateway.account import account_of
from gateway.inference import Completion
from gateway.tokenizer import Tokenizer
from gateway.validation import Submission
from pdserve.core.errors import InvalidRequest
from pdserve.core.request import Mode
from pdserve.core.sampling import (
    MAX_BIASES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
    StructuredOutputs,
    TokenLogprobs,
)
from pdserve.pb import inference_pb2 as pb

PROTO = "proto/pdserve/pb/inference.proto"
MAX_UNKNOWN_BYTES = 4096
"""Unknown fields are named if they are not longer than this."""

_MODES_ASKED: dict[int, Mode] = {
    pb.MODE_UNSPECIFIED: Mode.AUTO,
    pb.MODE_AUTO: Mode.AUTO,
    pb.MODE_PD: Mode.PD,
    pb.MODE_COLOCATED: Mode.COLOCATED,
}


def submission_of(data: bytes) -> Submission:
    """Parse a `GenerateRequest`. `InvalidRequest` if it is malformed, contains text that is not UTF-8, has fields that
    this service does not know, or names an unknown mode."""
    try:
        message = pb.GenerateRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            f"message: it is not a GenerateRequest, or a string in it is not UTF-8 ({error}); encode it by {PROTO}"
        ) from None
    _refuse_unknown_fields(message, data)
    if message.mode not in _MODES_ASKED:
        raise InvalidRequest(f"mode: {message.mode} is unknown; use MODE_AUTO, MODE_PD or MODE_COLOCATED")
    kind = message.WhichOneof("prompt")
    return Submission(
        prompt=None if kind is None else message.text if kind == "text" else message.token_ids.ids,
        sampling=_sampling(message.sampling),
        request_id=message.request_id,
        mode=_MODES_ASKED[message.mode],
        salt=message.salt,
        priority=message.priority,
        session_id=message.session_id,
        shorten=not message.sampling.HasField("max_tokens"),
        resume=message.resume_token_ids,
    )


def _refuse_unknown_fields(message: pb.GenerateRequest, data: bytes) -> None:
    """Discard the unknown fields of a message that was parsed from ``data``; `InvalidRequest` if it had any. A field of
    a newer version, or of another type than it has here, would be ignored in silence."""
    size = message.ByteSize()
    message.DiscardUnknownFields()
    unknown_bytes = size - message.ByteSize()
    if 0 < unknown_bytes <= MAX_UNKNOWN_BYTES:
        whole = pb.GenerateRequest.FromString(data)
        parts: tuple[Message, ...] = (whole, whole.sampling, whole.sampling.structured_outputs, whole.token_ids)
        for part in parts:
            unknown_fields = UnknownFieldSet(part)
            if len(unknown_fields):
                unknown = unknown_fields[0]
                field = part.DESCRIPTOR.fields_by_number.get(unknown.field_number)
                if field is not None:
                    raise InvalidRequest(f"{field.name}: it has the wrong type; encode it by {PROTO}")
                name = part.DESCRIPTOR.name
                raise InvalidRequest(f"message: {name} has no field {unknown.field_number} here; leave it out")
    if unknown_bytes:
        raise InvalidRequest(f"message: {unknown_bytes} bytes of it are fields that are not known here; leave them out")


def _sampling(asked: pb.Sampling) -> SamplingParams:
    """Fields have the same names and defaults in both."""
    # Checked before they are copied.
    for name, most in (("stop", MAX_STOPS), ("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_BIASES)):
        if (count := len(getattr(asked, name))) > most:
            raise InvalidRequest(f"{name}: {count} entries are more than {most}; send fewer")
    given: dict[str, Any] = {field.name: value for field, value in asked.ListFields()}
    given["stop"], given["logit_bias"] = tuple(asked.stop), dict(asked.logit_bias)
    given["stop_token_ids"] = tuple(dict.fromkeys(asked.stop_token_ids))
    if (structure := given.get("structured_outputs")) is not None:
        if (kind := structure.WhichOneof("kind")) is None:
            raise InvalidRequest("structured_outputs: it is empty; set json, regex or grammar")
        given["structured_outputs"] = StructuredOutputs(kind, getattr(structure, kind))
    return SamplingParams(**given)


def token_to_proto(
    token_id: int, text: str, index: int, logprobs: TokenLogprobs | None, tokenizer: Tokenizer | None
) -> pb.Token:
    """The message for one token."""
    message = pb.Token(token_id=token_id, text=text, index=index)
    if logprobs is not None:
        message.logprob = logprobs.logprob
        for token_id, logprob in logprobs.top:
            alone = tokenizer.token_text(token_id) if tokenizer else ""
            message.top_logprobs.append(pb.TopLogprob(token_id=token_id, text=alone, logprob=logprob))
    return message


_MODES_USED = {Mode.PD.value: pb.MODE_PD, Mode.COLOCATED.value: pb.MODE_COLOCATED}


def completion_to_proto(completion: Completion, tokenizer: Tokenizer | None) -> pb.Completion:
    """The account of a finished request, with its whole output, and its prompt if the log-probabilities of that were
    asked for."""
    request, prompt = completion.record.request, []
    if request.sampling.prompt_logprobs is not None:
        told = zip(request.prompt_token_ids, (None, *completion.record.prompt_logprobs), strict=True)
        text = tokenizer.token_text if tokenizer else lambda token_id: ""
        prompt = [token_to_proto(each, text(each), index, known, tokenizer) for index, (each, known) in enumerate(told)]
    account = account_of(completion)
    mode = _MODES_USED.get(account.pop("mode"), pb.MODE_UNSPECIFIED)
    output = completion.output
    return pb.Completion(text=output.text, token_ids=output.token_ids, mode=mode, prompt_logprobs=prompt, **account)
