"""Messages between a worker process and its engine process, sent over three pipes, and how a worker reaches an engine.

Commands go from worker to engine. Events go from engine to worker: those about requests to its control loop, those
about blocks to its KV thread. A frame is a 4-byte little-endian length and a `Message` in msgpack.

Events carry block ids because the worker, which maps the same pool, moves the bytes. The engine's block manager alone
assigns blocks to requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from contract.message import Message, encode
from pdserve.core.handoff import FirstToken
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Request
from pdserve.core.sampling import TokenLogprobs


class KVRole(StrEnum):
    """How a request uses KV transfer."""

    LOCAL = "local"  # prefill and decode here (colocated)
    PUSH = "push"  # prefill here and sample one token, then hold the blocks until `Release`
    RECEIVE = "receive"  # allocate the blocks of the prompt, wait for `KVReady`, then decode


# --- commands: worker → engine ---------------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Start a request. The engine computes all of its `Request.token_ids` (on a resume: prompt and outputs so far).

    `Request.max_tokens` counts the tokens still wanted. For RECEIVE it includes the one that prefill samples; for PUSH
    it is ignored. The gateway has checked all fields; the engine answers `Rejected` if the request can never fit.

    Of a LOCAL or PUSH request, the KV of the first ``prefix_tokens`` tokens (whole blocks, less than all tokens) may
    come from another worker: the engine answers `Reserved` under `pdserve.core.handoff.prefix_transfer_id`, and
    computes nothing of the request before `KVReady`.
    """

    request: Request
    kv_role: KVRole
    prefix_tokens: int = 0

    @property
    def attempt_id(self) -> str:
        """Id of the request in this engine."""
        return self.request.attempt_id

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens that this engine adds."""
        return 1 if self.kv_role is KVRole.PUSH else self.request.max_tokens


class KVReady(Message, frozen=True):
    """Report that all blocks of a RECEIVE request are verified and in the pool. ``first_token_id`` is token 1. Of other
    requests, report that the KV of their first ``num_tokens`` tokens is, which came from another worker's cache or was
    read by the engine itself (`engine.offload`)."""

    attempt_id: str
    first_token_id: int | None
    num_tokens: int | None = None


class PinPrefix(Message, frozen=True):
    """Keep the cached blocks that hold the beginning of ``token_ids`` until `Release` or `Abort`, for another worker to
    read. Nothing is computed. The engine answers `Reserved` with as many blocks as are cached, maybe none."""

    attempt_id: str
    salt: str
    token_ids: tuple[int, ...]


class Release(Message, frozen=True):
    """Free the held blocks of a PUSH request, or of a `PinPrefix`: the receiver has them, or the transfer has ended."""

    attempt_id: str


class Abort(Message, frozen=True):
    """Drop a request in any state and free all its blocks. Unknown ids are ignored. No event follows."""

    attempt_id: str


class SetTokenBudget(Message, frozen=True):
    """Set the most tokens of a step, from the next one on. More than the engine was started with has no effect beyond
    that."""

    num_tokens: int


class Ping(Message, frozen=True):
    """Ask for a `Pong`, which the engine sends between steps."""


class PoolMemory(Message, frozen=True):
    """Answers `WantsPool`: ``share`` opens memory of the worker on the engine's GPU (`runtime.cuda.Cuda.open`); empty:
    the engine allocates the pool itself."""

    share: list[Any]


# --- events: engine → worker -----------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The engine is ready: model loaded, pool mapped, warmed up.

    ``pool_handle`` tells other processes how to map the pool (`kv_transfer.pool.Pool.open`). ``max_model_len`` is in
    tokens. ``load_s`` is the time from start to ready. ``eos_token_ids`` end every request that does not ignore them.
    The engine computes in ``dtype``. ``notes`` are messages for the user. ``declares`` says what an engine that is not
    pdserve's own is, and can do.
    """

    layout: KVLayout
    dtype: str
    num_blocks: int
    pool_handle: dict[str, Any]
    max_model_len: int
    vocab_size: int
    device: str
    cores: list[int]
    load_s: float
    eos_token_ids: list[int]
    notes: list[str] = []  # noqa: RUF012 - each message gets a copy
    declares: dict[str, str] = {}  # noqa: RUF012


class WantsPool(Message, frozen=True):
    """Before `Ready`, of an engine on a GPU: its pool takes ``num_bytes``. Answered by `PoolMemory`."""

    num_bytes: int


class Failed(Message, frozen=True):
    """The engine failed and exits. ``kind`` and ``message`` are the result of `pdserve.core.errors.to_wire`."""

    kind: str
    message: str


class Rejected(Message, frozen=True):
    """The engine refuses a request. ``kind`` and ``message`` are the result of `pdserve.core.errors.to_wire`."""

    attempt_id: str
    kind: str
    message: str


class Finished(Message, frozen=True):
    """A RECEIVE request ended with token 1, which came with its KV, so that no `TokenOut` follows. Its blocks are free.

    ``finish_reason`` is a `pdserve.core.sampling.FinishReason` value.
    """

    attempt_id: str
    finish_reason: str


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token. A step may have several tokens of a request, in order.

    ``finish_reason`` is a `pdserve.core.sampling.FinishReason` value, or empty. ``first_scheduled_s`` is the start of
    the first step that computed anything for the request in this engine. ``logprobs`` is set if the request asked for
    them. ``cached_tokens`` comes with the first token of a prompt computed here: its tokens found in the prefix cache.
    So do ``prompt_logprobs``, of each token of the prompt after the first, if the request asked for them.
    ``draft_tokens`` comes with the first token of a step: how many guessed tokens the step verified, of which
    ``accepted_draft_tokens`` were right.
    """

    attempt_id: str
    token_id: int
    finish_reason: str
    first_scheduled_s: float
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class Step(Message, frozen=True):
    """The end of a step, and its tokens (none, if it computed a part of a prompt). ``sampled_s`` is when they were
    known, and ``step_started_s`` when the step was scheduled, or the step before it had ended if that was later.
    ``drafted_s`` is when a draft model was done with guesses for it (None: it had none to make): all in seconds of the
    host's monotonic clock."""

    sampled_s: float
    step_started_s: float
    tokens: list[TokenOut] = []  # noqa: RUF012 - each step gets a copy
    drafted_s: float | None = None


class Pong(Message, frozen=True):
    """Answer to `Ping`."""


class Load(Message, frozen=True):
    """Load of the engine, sent after a step or a batch of commands that changed it.

    ``preemptions`` counts since the start, and so do ``prompt_tokens_looked_up`` in the prefix cache and
    ``prompt_tokens_cached`` found there. ``cached_blocks`` are the blocks that the cache can find now, and
    ``stored_blocks`` the cold ones kept outside of the pool. ``stalled``: it can compute nothing and admit nothing,
    because requests lack blocks, and those that have them await KV or an end of their hand-off. ``draft_tokens`` were
    verified since the start, and ``accepted_draft_tokens`` of them were right. ``steps`` were computed since the start,
    in ``busy_s`` seconds; without ``steps``, the worker counts the `Step` events and their seconds.
    """

    free_blocks: int
    running: int
    waiting: int
    preemptions: int
    prompt_tokens_looked_up: int = 0
    prompt_tokens_cached: int = 0
    cached_blocks: int = 0
    stored_blocks: int = 0
    stalled: bool = False
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    steps: int | None = None
    busy_s: float = 0.0


class CacheChanged(Message, frozen=True):
    """Blocks that the prefix cache finds since the last such event, and blocks that it no longer finds: the
    `pdserve.core.prefix_digests.block_hash` of each, packed (`pdserve.core.prefix_digests.pack`)."""

    added: bytes
    removed: bytes


# --- KV events: engine → the worker's KV thread, over a pipe of their own --------------------------------------------


class Reserved(Message, frozen=True):
    """A request that awaits KV has the blocks of its whole prompt, or the blocks of a `PinPrefix` are pinned. The first
    ``num_cached_blocks`` already hold the right KV. ``reserved_s`` is the time of the allocation on the host's
    monotonic clock."""

    attempt_id: str
    block_ids: list[int]
    num_cached_blocks: int
    reserved_s: float


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a PUSH request: the KV of its first ``num_computed_tokens`` tokens is in the pool.

    ``block_ids`` is its block table (empty: unchanged). ``num_layers`` is the number of layers that are in the pool
    (0: all). ``first_token`` comes with the last tokens of the prompt.
    """

    attempt_id: str
    num_computed_tokens: int
    block_ids: list[int]
    num_layers: int = 0
    first_token: FirstToken | None = None


class Computed(Message, frozen=True):
    """Progress of PUSH requests: after a step, after some layers of a step, or when cached blocks were found."""

    progress: list[Progress]


CoreCommand = Submit | KVReady | PinPrefix | Release | Abort | SetTokenBudget
Command = CoreCommand | Ping
AnyCommand = Command | PoolMemory
EngineEvent = WantsPool | Ready | Failed | Rejected | Finished | Step | Pong | Load | CacheChanged
KVEvent = Reserved | Computed

M = TypeVar("M", bound=Message)


def encode_frame(message: Message) -> bytes:
    """Encode a message as one frame."""
    body = encode(message)
    return len(body).to_bytes(4, "little") + body


class FrameReader(Generic[M]):
    """Splits a byte stream into messages. ``kinds`` is the union of the expected messages."""

    def __init__(self, kinds: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Add ``data`` and return the messages that are complete now, in order. ValueError for an invalid message."""
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
                raise ValueError(f"invalid engine message: {error}") from None
            start = end
        del self._buffer[:start]
        return messages


# --- how an engine is reached ----------------------------------------------------------------------------------------


class KVEventReader(Protocol):
    """The events of an engine about blocks, for the KV loop."""

    def follow(self, on_event: Callable[[KVEvent], None]) -> None:
        """Call ``on_event`` for each event, in order, on the running loop."""
        ...

    def close(self) -> None:
        """Stop. A second call has no effect."""
        ...


class EnginePort(Protocol):
    """An engine that has been started (`engine.process.client.EngineClient`)."""

    @property
    def pid(self) -> int:
        """Id of its process."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        ...

    def send(self, command: Command) -> None:
        """Send a command, from any thread. Ignored after its end."""
        ...

    def events(self) -> AsyncIterator[EngineEvent]:
        """Its events, in order, for one reader. Ends with the engine."""
        ...

    def take_kv_events(self) -> KVEventReader:
        """The reader of its events about blocks, once."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """End it."""
        ...
