"""What router, gateway and workers say of a worker and of the work on it: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from pdserve.core.errors import PdserveError
from pdserve.core.handoff import KVEndpoint, KVPeer, PeerLink, PrefixFetch, TransferProof
from pdserve.core.kv_layout import KVLayout
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.core.timeline import Event

WorkerEpoch = tuple[str, str]
"""One incarnation of a worker: its id and its epoch."""

Links = Mapping[WorkerEpoch, PeerLink | PdserveError]
"""The result of connecting a prefill worker to decode workers: the link, or why there is none."""


class Role(StrEnum):
    """What the router gives a worker; its engine can always do both."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The other one."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself once; a new ``epoch`` means it (or its engine) started anew and holds nothing."""

    worker_id: str
    role: Role
    epoch: str
    control_address: str
    kv_endpoints: tuple[KVEndpoint, ...]
    node: str
    device: str
    pid: int
    engine_pid: int
    layout: KVLayout
    dtype: str  # that the engine computes in; the pool has that of the layout
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    cuda_visible_devices: str
    cores: str
    version: str
    engine_restarts: int
    ready: bool
    clock_id: str = ""  # equal non-empty ids: the very same monotonic clock (`pdserve.core.clock.clock_id`)
    life: str = ""  # of its process: the same over restarts of its engine
    service: str = ""  # the one it was started for
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 0  # requests in one step; 0: not bounded
    proves_transfers: bool = True  # each hand-off to it has a proof; else only where one runs at a time
    serves_alone: bool = True  # it can compute the prompt and decode; else only one of both, in a pair
    engine: tuple[tuple[str, str], ...] = ()  # of an engine that is not pdserve's own (`KVPeer.engine`)
    declares: tuple[tuple[str, str], ...] = ()  # what such an engine can do, in words

    @property
    def worker_epoch(self) -> WorkerEpoch:
        """This incarnation."""
        return self.worker_id, self.epoch

    @property
    def peer(self) -> KVPeer:
        """This worker as the other end of a KV link."""
        return KVPeer(self.worker_id, self.epoch, self.kv_endpoints, self.engine)


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Cores of a worker's engine that engines of another service are bound to as well: the service with this public
    ``port``, of the user with this ``uid`` (None: of the worker's own user). ``own``: of the worker's own service."""

    cores: tuple[int, ...]
    port: int
    uid: int | None = None
    own: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says of itself with every heartbeat: its engine's load; the ``steps`` of its engine, and the
    seconds that all of them took (``busy_s``; 0 if the engine does not tell); of its prefix cache, prompt tokens of all
    requests its engine admitted, how many of those were cached, the blocks that can be found now, and the cold blocks
    kept outside of the pool; how many KV messages it refused, by reason; the requests that it has of other gateways
    than the one that it reports to, and the tokens that they have still to compute on it (``others_prompt_tokens``: of
    prompts without a first token); the cores that it shares with other engines at present; whether it can compute
    nothing until hand-offs with other workers proceed; and what operators have to know of it (``note``)."""

    free_blocks: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    prompt_tokens_looked_up: int = 0
    prompt_tokens_cached: int = 0
    cached_blocks: int = 0
    stored_blocks: int = 0
    kv_refused: Mapping[str, int] = field(default_factory=dict)
    others_requests: int = 0
    others_tokens: int = 0
    others_prompt_tokens: int = 0
    shared_cores: tuple[SharedCores, ...] = ()
    stalled: bool = False
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    note: str = ""


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """One message about a request from a worker: a token (or None), the events it knows of, and how it goes on.

    ``events`` of a token: on prefill PREFILL_RECEIVED, PREFILL_SCHEDULED, TOKEN_1_SAMPLED with token 1; on decode
    ROOM_MADE, KV_VERIFIED, DECODE_SCHEDULED, TOKEN_2_SAMPLED with token 2; colocated, the first three with its first
    token and DECODE_SCHEDULED, TOKEN_2_SAMPLED with its second. ``proof`` comes with decode's first message. A last
    message has a ``finish_reason``; a worker's error is raised instead. ``logprobs`` are there if they were asked for.
    ``cached_tokens``, with the first token of the worker that computed the prompt (with its last one if the engine
    tells it then): how many of its tokens had their KV in the prefix cache, or got it from another worker's;
    ``prefix_fetch`` reports the latter, with the events PREFIX_AWAITED and PREFIX_READY. ``prompt_logprobs`` come with
    the first token, if they were asked for: those of each token of the prompt after the first. ``hand_off``, with
    token 1 of prefill, is what the engine wants the decode of the hand-off to know (empty: nothing, because the two
    tell each other over a KV link). ``draft_tokens`` guesses were verified in the step of this token, if it is the
    first one of the step; ``accepted_draft_tokens`` were right.
    """

    token_id: int | None
    finish_reason: FinishReason | None = None
    events: tuple[Event, ...] = ()
    proof: TransferProof | None = None
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0
    prefix_fetch: PrefixFetch | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    hand_off: bytes = b""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class OutputSink(Protocol):
    """Is given the outputs of one request on one worker, as they come. Its methods return at once and never raise."""

    def output(self, output: TokenOutput) -> None:
        """Take the next output. One with a finish reason is the last."""
        ...

    def failed(self, error: PdserveError) -> None:
        """Take the error that has ended the request."""
        ...
