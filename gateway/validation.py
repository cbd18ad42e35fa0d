"""Requests as clients submit them, and their validation, for both APIs. Every refusal names the field, the problem, and
the remedy."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.tokenizer import Tokenizer
from pdserve.core.errors import CapacityExceeded, InvalidRequest
from pdserve.core.request import Mode
from pdserve.core.sampling import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_STRUCTURE_CHARACTERS,
    FinishReason,
    SamplingParams,
)

MAX_STOP_CHARACTERS = 1024
"""Limit: characters of each string of `Sampling.stop`."""
MAX_PROMPT_LOGPROBS = 2**17
"""Limit: log-probabilities of prompts that a call may ask for, with the likeliest ones."""
MAX_SHORT_CHARACTERS = 256
"""Limit: characters of `GenerateRequest.salt` and `GenerateRequest.session_id`."""
MAX_ID_BYTES = 5  # of a token id on the wire
MIN_MESSAGE_BYTES = 2**20

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a client asks for, whichever API it came by, before it is checked."""

    prompt: str | Sequence[int] | None
    """Text, token ids, or None if it is missing."""
    sampling: SamplingParams
    request_id: str = ""
    """Empty: the request gets a new one. A seed that is missing is made from the id."""
    mode: Mode = Mode.AUTO
    salt: str = ""
    session_id: str = ""
    shorten: bool = False
    """``sampling.max_tokens`` is a default, and is reduced to what fits."""
    special_tokens: bool = True
    """A text gets the special tokens that the model expects at the beginning of a prompt."""
    priority: int = 0
    """Lower values are served earlier."""
    user: str = ""
    """Whom the client names as the one it asks for."""
    resume: Sequence[int] = ()
    """The tokens that the client already has; the output goes on after them."""

    def asks_the_same(self, other: Submission) -> bool:
        """Whether both ask for the same output, wherever they resume it."""
        return (
            self.sampling == other.sampling
            and (self.mode, self.salt, self.shorten) == (other.mode, other.salt, other.shorten)
            and self.special_tokens == other.special_tokens
            and self.prompt == other.prompt
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the workers, from the worker that takes the most."""

    context_length: int  # prompt plus output
    pool_tokens: int  # in a KV pool
    vocab_size: int  # above all token ids
    eos_token_ids: frozenset[int] = frozenset()  # of the model


def max_message_bytes(context_length: int, tokenizer: Tokenizer | None) -> int:
    """The size limit of request messages: twice the longest valid one, so that a request that is slightly too long
    still gets an error that names the field."""
    token_bytes = max(MAX_ID_BYTES, tokenizer.longest_token_bytes if tokenizer is not None else 0)
    others = MAX_STOPS * 4 * MAX_STOP_CHARACTERS + MAX_STOP_TOKEN_IDS * MAX_ID_BYTES + MAX_BIASES * 4 * MAX_ID_BYTES
    others += 4 * MAX_STRUCTURE_CHARACTERS
    return max(MIN_MESSAGE_BYTES, 2 * (context_length * token_bytes + others))


def check_request_id(asked: str) -> None:
    """Refuse ids that cannot stand in headers, logs and attempt ids."""
    if not _REQUEST_ID.fullmatch(asked):
        raise InvalidRequest(
            f"request_id: {asked[:150]!r} is not 1 to 128 letters, digits or any of . _ : -; leave it out to get one"
        )


def check_short(field: str, text: str) -> None:
    """Refuse a salt or session id that is too long. An empty one is valid."""
    if len(text) > MAX_SHORT_CHARACTERS:
        raise InvalidRequest(
            f"{field}: {len(text)} characters are more than {MAX_SHORT_CHARACTERS}; send a digest of it instead"
        )


def check_sampling(sampling: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Refuse parameters out of range. Does not check ``max_tokens`` against the context, nor token ids against the
    vocabulary."""
    sampling.validate()
    if sampling.stop and tokenizer is None:
        raise InvalidRequest("stop: this model has no tokenizer, so no text to find strings in; use stop_token_ids")
    if sampling.structured_outputs and tokenizer is None:
        raise InvalidRequest("structured_outputs: this model has no tokenizer, so no text to match; leave it out")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in sampling.stop):
        raise InvalidRequest(f"stop: a string is longer than {MAX_STOP_CHARACTERS} characters; shorten it")


def seeded(sampling: SamplingParams, request_id: str) -> SamplingParams:
    """``sampling`` with a seed: its own, or one from the request id. So a request that is sent again gets the same
    tokens, from any gateway."""
    if sampling.seed is not None:
        return sampling
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return msgspec.structs.replace(sampling, seed=int.from_bytes(digest, "big") >> 1)


async def prompt_of(
    submission: Submission, tokenizer: Tokenizer | None, limits: Limits, client: str = ""
) -> tuple[int, ...]:
    """The prompt's token ids, at least one and all within the vocabulary. Prompts that exceed the context are refused
    before they are tokenized or copied. ``client``: see `Tokenizer.encode_async`."""
    prompt = submission.prompt
    if prompt is None:
        raise InvalidRequest("prompt: it is missing; set text or token_ids")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest(
                "prompt: this model has no tokenizer; send token ids (--token-ids 1,2,3; over HTTP "
                '"prompt": [1, 2, 3]; over gRPC token_ids)'
            )
        special_tokens = submission.special_tokens
        token_ids = await text_to_token_ids(prompt, tokenizer, limits, special_tokens, client) if prompt else ()
        check_token_ids("prompt", token_ids, limits)
    else:
        check_token_ids("prompt", prompt, limits)
        token_ids = tuple(prompt)
    if not token_ids:
        raise InvalidRequest("prompt: it is empty; send at least one token")
    return token_ids


async def text_to_token_ids(
    text: str, tokenizer: Tokenizer, limits: Limits, special_tokens: bool, client: str
) -> tuple[int, ...]:
    """The token ids of a prompt's text. Texts that exceed the context are refused, before they are tokenized if their
    length says so."""
    most_bytes = limits.context_length * tokenizer.longest_token_bytes
    if len(text) > most_bytes or (4 * len(text) > most_bytes and len(text.encode()) > most_bytes):
        raise InvalidRequest(
            f"prompt: {len(text)} characters are more than the context of {limits.context_length} tokens can hold (of "
            f"{tokenizer.longest_token_bytes} bytes each at most); shorten it"
        )
    return await tokenizer.encode_async(text, limits.context_length, special_tokens=special_tokens, client=client)


def check_token_ids(field: str, token_ids: Sequence[int], limits: Limits) -> None:
    """Refuse more ids than the context holds, and ids outside the vocabulary."""
    if (count := len(token_ids)) > limits.context_length:
        raise InvalidRequest(f"{field}: {count} tokens exceed the context of {limits.context_length}; shorten it")
    if token_ids and max(token_ids) >= limits.vocab_size:  # neither API lets negative ones pass
        position = next(i for i, token_id in enumerate(token_ids) if token_id >= limits.vocab_size)
        raise InvalidRequest(
            f"{field}: token id {token_ids[position]} at position {position} is not below the vocabulary's "
            f"{limits.vocab_size}; use this model's own tokenizer"
        )


def fit_max_tokens(submission: Submission, prompt_tokens: int, limits: Limits) -> SamplingParams:
    """The submission's sampling with ``max_tokens`` that fit: the requested ones, or the default limited to them."""
    sampling = submission.sampling
    if prompt_tokens >= limits.context_length:
        raise InvalidRequest(
            f"prompt: {prompt_tokens} tokens leave no room in the context of {limits.context_length}; shorten it"
        )
    room = min(limits.context_length, limits.pool_tokens) - prompt_tokens
    wanted = max(1, min(sampling.max_tokens, room)) if submission.shorten else sampling.max_tokens
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


def check_resume(resume: Sequence[int], sampling: SamplingParams, limits: Limits) -> tuple[int, ...]:
    """The tokens that a resumed request already has. Refuses more than ``max_tokens``, ids outside the vocabulary, and
    sampling whose draws cannot be repeated."""
    if not resume:
        return ()
    if len(resume) > sampling.max_tokens:
        raise InvalidRequest(
            f"resume_token_ids: {len(resume)} tokens are more than max_tokens ({sampling.max_tokens}); send those of "
            "the broken stream only"
        )
    check_token_ids("resume_token_ids", resume, limits)
    if sampling.temperature > 0 and sampling.seed is None:
        raise InvalidRequest(
            "seed: a sampled request can be resumed only with the seed that it had; send one with both"
        )
    return tuple(resume)


def end_of(output: Sequence[int], sampling: SamplingParams, limits: Limits) -> FinishReason | None:
    """Why a request ended with these tokens; None if it has more to come."""
    if output and (
        output[-1] in sampling.stop_token_ids or (output[-1] in limits.eos_token_ids and not sampling.ignore_eos)
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(output) >= sampling.max_tokens else None


def check_token_options(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, and biases that forbid every token."""
    for field, token_ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"{field}: token id {token_id} is not below the vocabulary's {vocab_size}; leave it out"
                )
    if sum(bias <= -MAX_BIAS for bias in sampling.logit_bias.values()) >= vocab_size:
        raise InvalidRequest(f"logit_bias: all {vocab_size} tokens are forbidden; leave at least one")
