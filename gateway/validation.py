"""Validation of requests of the public API. Every refusal names the field, the problem, and the remedy."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Container
from dataclasses import dataclass

import msgspec
from google.protobuf.message import DecodeError

from gateway.tokenizer import Tokenizer
from pdserve.core.errors import CapacityExceeded, InvalidRequest
from pdserve.core.request import Mode
from pdserve.core.sampling import MAX_BIAS, MAX_BIASES, MAX_STOP_TOKEN_IDS, MAX_STOPS, SamplingParams
from pdserve.pb import inference_pb2 as pb

DEFAULT_MAX_TOKENS = 128
MAX_STOP_CHARACTERS = 1024
MAX_SALT_CHARACTERS = 256
MAX_ID_BYTES = 5  # of a token id on the wire
MIN_MESSAGE_BYTES = 2**20

MODES: dict[int, Mode] = {
    pb.MODE_UNSPECIFIED: Mode.AUTO,
    pb.MODE_AUTO: Mode.AUTO,
    pb.MODE_PD: Mode.PD,
    pb.MODE_COLOCATED: Mode.COLOCATED,
}

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the workers, from the worker that takes the most: prompt plus output (``context_length``), what a KV
    pool holds (``pool_tokens``), and the bound of token ids (``vocab_size``)."""

    context_length: int
    pool_tokens: int
    vocab_size: int


def max_message_bytes(context_length: int, tokenizer: Tokenizer | None) -> int:
    """The size limit of request messages: twice the longest valid one, so that a request that is slightly too long
    still gets an error that names the field."""
    token_bytes = max(MAX_ID_BYTES, tokenizer.longest_token_bytes if tokenizer is not None else 0)
    others = MAX_STOPS * 4 * MAX_STOP_CHARACTERS + MAX_STOP_TOKEN_IDS * MAX_ID_BYTES + MAX_BIASES * 4 * MAX_ID_BYTES
    return max(MIN_MESSAGE_BYTES, 2 * (context_length * token_bytes + others))


def read_message(data: bytes) -> pb.GenerateRequest:
    """Parse a request; `InvalidRequest` if it is malformed or contains text that is not UTF-8."""
    try:
        return pb.GenerateRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            f"message: it is not a GenerateRequest, or a string in it is not UTF-8 ({error}); encode it by "
            "proto/pdserve/pb/inference.proto"
        ) from None


def read_request_id(message: pb.GenerateRequest, in_use: Container[str]) -> str:
    """The client's request id, or a new one."""
    request_id = message.request_id
    if not request_id:
        return f"req-{uuid.uuid4().hex}"
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"request_id: {request_id[:150]!r} is not 1 to 128 letters, digits or any of . _ : -; "
            "leave it out to get one"
        )
    if request_id in in_use:
        raise InvalidRequest(f"request_id: {request_id!r} is in use by another request; choose another or leave it out")
    return request_id


def read_mode(message: pb.GenerateRequest) -> Mode:
    """The requested mode."""
    if message.mode not in MODES:
        raise InvalidRequest(f"mode: {message.mode} is unknown; use MODE_AUTO, MODE_PD or MODE_COLOCATED")
    return MODES[message.mode]


def read_salt(message: pb.GenerateRequest) -> str:
    """The salt of the request's cached KV, which may be empty."""
    if len(message.salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest(
            f"salt: {len(message.salt)} characters are more than {MAX_SALT_CHARACTERS}; send a digest of it instead"
        )
    return message.salt


def read_sampling(message: pb.GenerateRequest, tokenizer: Tokenizer | None) -> SamplingParams:
    """The requested sampling with defaults and a seed. Does not check ``max_tokens`` against the context."""
    asked = message.sampling
    # Checked before they are copied.
    for name, most in (("stop", MAX_STOPS), ("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_BIASES)):
        if (count := len(getattr(asked, name))) > most:
            raise InvalidRequest(f"{name}: {count} entries are more than {most}; send fewer")
    sampling = SamplingParams(
        max_tokens=asked.max_tokens if asked.HasField("max_tokens") else DEFAULT_MAX_TOKENS,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p if asked.HasField("top_p") else 1.0,
        seed=asked.seed if asked.HasField("seed") else random.getrandbits(63),
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
    sampling.validate()
    if sampling.stop and tokenizer is None:
        raise InvalidRequest("stop: this model has no tokenizer, so no text to find strings in; use stop_token_ids")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in sampling.stop):
        raise InvalidRequest(f"stop: a string is longer than {MAX_STOP_CHARACTERS} characters; shorten it")
    return sampling


async def read_prompt(message: pb.GenerateRequest, tokenizer: Tokenizer | None, limits: Limits) -> tuple[int, ...]:
    """The prompt's token ids, all within the vocabulary. Prompts that exceed the context are refused before they are
    tokenized or copied."""
    context_length, vocab_size = limits.context_length, limits.vocab_size
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt: it is missing; set text or token_ids")
    if kind == "text":
        if tokenizer is None:
            raise InvalidRequest("prompt: this model has no tokenizer; send token_ids")
        text = message.text
        most_bytes = context_length * tokenizer.longest_token_bytes
        if 4 * len(text) > most_bytes and len(text.encode()) > most_bytes:
            raise InvalidRequest(
                f"prompt: {len(text)} characters are more than the context of {context_length} tokens can hold (of "
                f"{tokenizer.longest_token_bytes} bytes each at most); shorten it"
            )
        token_ids = await tokenizer.encode_async(text, context_length) if text else ()
    else:
        if (count := len(message.token_ids.ids)) > context_length:
            raise InvalidRequest(f"prompt: {count} tokens exceed the context of {context_length}; shorten it")
        token_ids = tuple(message.token_ids.ids)
    if not token_ids:
        raise InvalidRequest("prompt: it is empty; send at least one token")
    if max(token_ids) >= vocab_size:
        position = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidRequest(
            f"prompt: token id {token_ids[position]} at position {position} is not below the vocabulary's "
            f"{vocab_size}; use this model's own tokenizer"
        )
    return token_ids


def fit_max_tokens(
    message: pb.GenerateRequest, prompt_tokens: int, limits: Limits, sampling: SamplingParams
) -> SamplingParams:
    """``sampling`` with the requested ``max_tokens``, or the default limited to what fits."""
    if prompt_tokens >= limits.context_length:
        raise InvalidRequest(
            f"prompt: {prompt_tokens} tokens leave no room in the context of {limits.context_length}; shorten it"
        )
    room = min(limits.context_length, limits.pool_tokens) - prompt_tokens
    if not message.sampling.HasField("max_tokens"):
        wanted = max(1, min(sampling.max_tokens, room))
    else:
        wanted = sampling.max_tokens
    if prompt_tokens + wanted > limits.context_length:
        raise InvalidRequest(
            f"max_tokens: {wanted} after a prompt of {prompt_tokens} tokens exceed the context of "
            f"{limits.context_length}; ask for at most {limits.context_length - prompt_tokens}"
        )
    if wanted > room:
        raise CapacityExceeded(
            f"prompt and max_tokens: {prompt_tokens} + {wanted} tokens exceed the {limits.pool_tokens} that a worker's "
            "KV pool holds; ask for less, or raise engine.kv_memory_mb"
        )
    return msgspec.structs.replace(sampling, max_tokens=wanted)


def check_stop_token_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary."""
    for token_id in sampling.stop_token_ids:
        if token_id >= vocab_size:
            raise InvalidRequest(f"stop_token_ids: {token_id} is not below the vocabulary's {vocab_size}; leave it out")


def check_logit_bias(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, and biases that forbid every token."""
    for token_id in sampling.logit_bias:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: token id {token_id} is not below the vocabulary's {vocab_size}; leave it out"
            )
    if sum(bias <= -MAX_BIAS for bias in sampling.logit_bias.values()) >= vocab_size:
        raise InvalidRequest(f"logit_bias: all {vocab_size} tokens are forbidden; leave at least one")
