"""What a worker process and its engine process say to each other: small msgpack messages over two pipes.

Commands go worker → engine, events engine → worker. A frame is a 4-byte little-endian length and a msgpack list
``[message name, field, …]`` in the order of the dataclass's fields. Nothing here knows sockets, gRPC or torch.

Block ids appear in events because the *worker* moves the bytes (it maps the same pool), while the *engine's* block
manager alone decides who owns a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import msgpack

from pdserve.core.logprobs import TokenLogprobs


class KVRole(StrEnum):
    """What a submitted request does with KV."""

    LOCAL = "local"  # prefill and decode here (colocated)
    PUSH = "push"  # prefill here, one token, then hold the blocks until `Release`
    RECEIVE = "receive"  # make room for the prompt, wait for `KVReady`, then decode


# --- commands: worker → engine ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Submit:
    """Take a request on. ``prompt_token_ids`` are all tokens known so far (on a resume: prompt + outputs, the last
    ``num_prior_outputs`` of them outputs: penalties tell them apart).

    ``max_tokens`` counts the tokens still wanted, including (for RECEIVE) the one that prefill samples.
    ``vocab_size`` bounds are the gateway's to check; the engine answers `Rejected` for what can never fit.
    Requests share cached KV only with requests of the same ``salt``.
    """

    request_id: str
    kv_role: KVRole
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: list[int]
    ignore_eos: bool
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    num_prior_outputs: int = 0
    salt: str = ""


@dataclass(slots=True)
class KVReady:
    """All blocks of a RECEIVE request are verified and in the pool; ``first_token_id`` is prefill's token."""

    request_id: str
    first_token_id: int


@dataclass(slots=True)
class Release:
    """Free the held blocks of a PUSH request (its receiver has confirmed them, or they are of no use any more)."""

    request_id: str


@dataclass(slots=True)
class Abort:
    """Drop a request in whatever state it is in and free all its blocks. Unknown ids are ignored. No event follows."""

    request_id: str


@dataclass(slots=True)
class Ping:
    """Answered by `Pong` between steps."""


@dataclass(slots=True)
class Shutdown:
    """End the engine process."""


# --- events: engine → worker -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ready:
    """The model is loaded, the pool mapped and the engine warmed up. ``layout`` is `core.KVLayout.to_wire()`.
    ``eos_token_ids`` end every request that does not ignore them."""

    layout: dict[str, Any]
    num_blocks: int
    pool_handle: dict[str, Any]
    max_model_len: int
    vocab_size: int
    device: str
    cores: list[int]
    load_s: float
    eos_token_ids: list[int]


@dataclass(slots=True)
class Failed:
    """The engine cannot go on (bad model folder, out of memory, a bug) and exits. See `pdserve.core.errors.to_wire`."""

    kind: str
    message: str


@dataclass(slots=True)
class Reserved:
    """A request got its blocks: a RECEIVE request its whole prompt's. The first ``num_cached_blocks`` of them hold the
    right content already."""

    request_id: str
    block_ids: list[int]
    num_cached_blocks: int


@dataclass(slots=True)
class PrefixFound:
    """A LOCAL or PUSH request was admitted, and the KV of its first ``num_tokens`` tokens was in the pool already, in
    ``block_ids`` (one at least, all full). Comes before the first step that computes the other tokens."""

    request_id: str
    num_tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class Rejected:
    """The engine will not take (or go on with) a request; its blocks are free. `pdserve.core.errors.to_wire` of why."""

    request_id: str
    kind: str
    message: str


@dataclass(slots=True)
class Finished:
    """A request ended, and no `TokenOut` says so: the first token of a RECEIVE request, which came with its KV, was its
    last. ``finish_reason`` is a `pdserve.core.sampling.FinishReason` value; its blocks are free."""

    request_id: str
    finish_reason: str


@dataclass(slots=True)
class Progress:
    """Of a PUSH request after a step: the KV of its first ``num_computed_tokens`` tokens is in the pool, in
    ``block_ids`` (all it owns so far, in order)."""

    request_id: str
    num_computed_tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class LayersDone:
    """Within a step: of all it computes, the KV of the first ``num_layers`` layers is in the pool. The first such
    message of a step says how far it brings its PUSH requests; those after it leave that out."""

    num_layers: int
    progress: list[Progress]


@dataclass(slots=True)
class TokenOut:
    """A token a step sampled; a step may have several of a request, in order. ``finish_reason`` is a
    `pdserve.core.sampling.FinishReason` value or empty, ``logprobs`` are there if the request asked for them."""

    request_id: str
    token_id: int
    finish_reason: str
    first_scheduled_s: float  # begin of the first step that computed anything for the request in this engine
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class Step:
    """Everything one step did. Times are seconds of the host's monotonic clock: ``sampled_s`` when its tokens were
    known, ``step_started_s`` when it was scheduled."""

    sampled_s: float
    step_started_s: float
    tokens: list[TokenOut] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)


@dataclass(slots=True)
class Pong:
    """The answer to `Ping`."""


@dataclass(slots=True)
class Load:
    """How full the engine is; sent whenever it has changed, after each step and each batch of commands. The prefix
    cache's: prompt tokens of all requests admitted so far, how many of those it held, and its findable blocks now."""

    free_blocks: int
    running: int
    waiting: int
    preemptions: int
    prompt_tokens_looked_up: int = 0
    prompt_tokens_cached: int = 0
    cached_blocks: int = 0


Command = Submit | KVReady | Release | Abort | Ping | Shutdown
EngineEvent = Ready | Failed | Reserved | PrefixFound | Rejected | Finished | LayersDone | Step | Pong | Load

_TYPES: dict[str, type[Any]] = {
    t.__name__: t
    for t in (
        Submit, KVReady, Release, Abort, Ping, Shutdown,
        Ready, Failed, Reserved, PrefixFound, Rejected, Finished, LayersDone, Step, Pong, Load,
    )
}  # fmt: skip


def encode(message: Command | EngineEvent) -> bytes:
    """One frame: 4-byte little-endian length, then msgpack."""
    body = msgpack.packb([type(message).__name__, *_values(message)], use_bin_type=True)
    return len(body).to_bytes(4, "little") + bytes(body)


def decode(body: bytes | memoryview) -> Command | EngineEvent:
    """The message of a frame's body (without its length); ValueError if it is none of ours."""
    name, *values = msgpack.unpackb(body, raw=False, strict_map_key=False)  # keys of `Submit.logit_bias` are numbers
    kind = _TYPES.get(name)
    if kind is None:
        raise ValueError(f"unknown engine message {name!r}")
    if kind is Step:
        sampled_s, step_started_s, tokens, progress = values
        return Step(sampled_s, step_started_s, [_token_out(*t) for t in tokens], [Progress(*p) for p in progress])
    if kind is LayersDone:
        return LayersDone(values[0], [Progress(*p) for p in values[1]])
    if kind is Submit:
        values[1] = KVRole(values[1])
    message: Command | EngineEvent = kind(*values)
    return message


def _values(message: Any) -> list[Any]:
    values = [getattr(message, f.name) for f in fields(message)]
    if isinstance(message, Step):
        values[2:] = [[_token_values(t) for t in message.tokens], [_values(p) for p in message.progress]]
    elif isinstance(message, LayersDone):
        values[1] = [_values(p) for p in message.progress]
    return values


def _token_values(token: TokenOut) -> list[Any]:
    values = [token.request_id, token.token_id, token.finish_reason, token.first_scheduled_s]
    if token.logprobs is not None:
        values.append(token.logprobs.to_wire())
    return values


def _token_out(
    request_id: str, token_id: int, finish_reason: str, first_scheduled_s: float, logprobs: list[float] | None = None
) -> TokenOut:
    known = None if logprobs is None else TokenLogprobs.from_wire(logprobs)
    return TokenOut(request_id, token_id, finish_reason, first_scheduled_s, known)


class FrameReader:
    """Cuts a byte stream into messages: `feed` bytes as they come, get the messages that are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Command | EngineEvent]:
        """Messages completed by ``data``, in order."""
        self._buffer += data
        messages: list[Command | EngineEvent] = []
        start = 0
        while len(self._buffer) - start >= 4:
            end = start + 4 + int.from_bytes(self._buffer[start : start + 4], "little")
            if len(self._buffer) < end:
                break
            messages.append(decode(bytes(self._buffer[start + 4 : end])))
            start = end
        del self._buffer[:start]
        return messages
