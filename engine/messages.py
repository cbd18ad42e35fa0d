"""What a worker process and its engine process say to each other: small msgpack messages over three pipes.

Commands go worker → engine. Events go engine → worker: what concerns requests to its control loop, what concerns
blocks straight to its KV thread. A frame is a 4-byte little-endian length and a `Message` as msgpack.
Nothing here knows sockets, gRPC or torch.

Block ids appear in events because the *worker* moves the bytes (it maps the same pool), while the *engine's* block
manager alone decides who owns a block.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from pdserve.core.handoff import FirstToken
from pdserve.core.kv_layout import KVLayout
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.request import Request


class KVRole(StrEnum):
    """What a submitted request does with KV."""

    LOCAL = "local"  # prefill and decode here (colocated)
    PUSH = "push"  # prefill here, one token, then hold the blocks until `Release`
    RECEIVE = "receive"  # make room for the prompt, wait for `KVReady`, then decode


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A command or an event: on the wire a list of its class's name and its fields, in the order they stand in."""


# --- commands: worker → engine ---------------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Take a request on. The engine computes all of its `Request.token_ids` (on a resume: prompt and outputs so far).

    `Request.max_tokens` counts the tokens still wanted, including (for RECEIVE) the one that prefill samples; a PUSH
    request makes one, whatever it says. The gateway has checked all fields; the engine answers `Rejected` for what can
    never fit. Requests share cached KV only with requests of the same ``salt``.
    """

    request: Request
    kv_role: KVRole

    @property
    def attempt_id(self) -> str:
        """The name of the request in this engine."""
        return self.request.attempt_id

    @property
    def max_tokens(self) -> int:
        """Tokens that this engine may add to those known."""
        return 1 if self.kv_role is KVRole.PUSH else self.request.max_tokens


class KVReady(Message, frozen=True):
    """All blocks of a RECEIVE request are verified and in the pool; ``first_token_id`` is prefill's token."""

    attempt_id: str
    first_token_id: int


class Release(Message, frozen=True):
    """Free the held blocks of a PUSH request (its receiver has confirmed them, or they are of no use any more)."""

    attempt_id: str


class Abort(Message, frozen=True):
    """Drop a request in whatever state it is in and free all its blocks. Unknown ids are ignored. No event follows."""

    attempt_id: str


class Ping(Message, frozen=True):
    """Answered by `Pong` between steps."""


class Shutdown(Message, frozen=True):
    """End the engine process."""


# --- events: engine → worker -----------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The model is loaded, the pool mapped and the engine warmed up. ``eos_token_ids`` end every request that does not
    ignore them."""

    layout: KVLayout
    num_blocks: int
    pool_handle: dict[str, Any]
    max_model_len: int
    vocab_size: int
    device: str
    cores: list[int]
    load_s: float
    eos_token_ids: list[int]


class Failed(Message, frozen=True):
    """The engine cannot go on (bad model folder, out of memory, a bug) and exits. See `pdserve.core.errors.to_wire`."""

    kind: str
    message: str


class Rejected(Message, frozen=True):
    """The engine will not take (or go on with) a request; its blocks are free. `pdserve.core.errors.to_wire` of why."""

    attempt_id: str
    kind: str
    message: str


class Finished(Message, frozen=True):
    """A request ended, and no `TokenOut` says so: the first token of a RECEIVE request, which came with its KV, was its
    last. ``finish_reason`` is a `pdserve.core.sampling.FinishReason` value; its blocks are free."""

    attempt_id: str
    finish_reason: str


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """A token a step sampled; a step may have several of a request, in order. ``finish_reason`` is a
    `pdserve.core.sampling.FinishReason` value or empty, ``logprobs`` are there if the request asked for them."""

    attempt_id: str
    token_id: int
    finish_reason: str
    first_scheduled_s: float  # begin of the first step that computed anything for the request in this engine
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0  # with a request's first token, if its prompt was computed here: those found in the cache


class Step(Message, frozen=True):
    """Everything one step did. Times are seconds of the host's monotonic clock: ``sampled_s`` when its tokens were
    known, ``step_started_s`` when it was scheduled."""

    sampled_s: float
    step_started_s: float
    tokens: list[TokenOut] = []


class Pong(Message, frozen=True):
    """The answer to `Ping`."""


class Load(Message, frozen=True):
    """How full the engine is; sent whenever it has changed, after each step and each batch of commands. The prefix
    cache's: prompt tokens of all requests admitted so far, how many of those it held, and its findable blocks now."""

    free_blocks: int
    running: int
    waiting: int
    preemptions: int
    prompt_tokens_looked_up: int = 0
    prompt_tokens_cached: int = 0
    cached_blocks: int = 0


# --- KV events: engine → the worker's KV thread, over a pipe of their own --------------------------------------------


class Reserved(Message, frozen=True):
    """A RECEIVE request got the blocks of its whole prompt. The first ``num_cached_blocks`` of them hold the right
    content already. ``reserved_s`` is when, on the host's monotonic clock."""

    attempt_id: str
    block_ids: list[int]
    num_cached_blocks: int
    reserved_s: float


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Of a PUSH request: the KV of its first ``num_computed_tokens`` tokens is in the pool. ``block_ids`` are all
    blocks that it owns so far, in order; empty: as told before.

    Within a step only the first ``num_layers`` layers are there yet (0: all are). With the last tokens comes
    ``first_token``.
    """

    attempt_id: str
    num_computed_tokens: int
    block_ids: list[int]
    num_layers: int = 0
    first_token: FirstToken | None = None


class Computed(Message, frozen=True):
    """How far some PUSH requests are: after a step, after some layers of one, or when cached blocks were found."""

    progress: list[Progress]


Command = Submit | KVReady | Release | Abort | Ping | Shutdown
EngineEvent = Ready | Failed | Rejected | Finished | Step | Pong | Load
KVEvent = Reserved | Computed

_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """One frame: 4-byte little-endian length, then msgpack."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


class FrameReader(Generic[M]):
    """Cuts a byte stream into messages: `feed` bytes as they come, get the messages that are complete. ``kinds`` is the
    union of the messages that may come."""

    def __init__(self, kinds: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Messages completed by ``data``, in order. ValueError for what is none of them."""
        self._buffer += data
        messages: list[M] = []
        start = 0
        while len(self._buffer) - start >= 4:
            end = start + 4 + int.from_bytes(self._buffer[start : start + 4], "little")
            if len(self._buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(self._buffer[start + 4 : end])))
            except (msgspec.DecodeError, ValueError) as error:  # ValueError: text that is not UTF-8
                raise ValueError(f"no engine message: {error}") from None
            start = end
        del self._buffer[:start]
        return messages
