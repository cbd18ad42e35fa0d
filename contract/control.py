"""The control protocol: the messages between gateway and worker on the control stream, the heartbeats, and how the two
reach each other.

Each message is a struct that is sent as msgpack and decoded strictly. `worker.authentication` has the streams.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

import msgspec

from contract.message import Message
from pdserve.core.errors import PdserveError, from_wire, to_wire
from pdserve.core.handoff import KVPeer, PeerLink, PrefixSource
from pdserve.core.prefix_digests import BlockUpdate
from pdserve.core.request import Request
from pdserve.core.timeline import ClockOffset
from pdserve.core.worker import Links, OutputSink, Role, TokenOutput, WorkerInfo, WorkerLoad

MAX_CONTROL_BYTES = 64 * 2**20
"""Limit: a control message. Then: INVALID_ARGUMENT.

Validated requests and the outputs of one step are far smaller."""
MAX_BEAT_BYTES = 2**20
"""Limit: a heartbeat, or its answer. Then: a new stream."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error in the form of `pdserve.core.errors.to_wire`."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure for ``error``."""
        return cls(*to_wire(error))

    def error(self) -> PdserveError:
        """The error that this failure describes."""
        return from_wire(self.kind, self.message)


# --- gateway → worker ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message of a stream: the gateway at its other end is the one of this epoch (`BeatAnswer`)."""

    gateway_epoch: str


class Run(Message, frozen=True):
    """Prefill and decode on this worker; KV of the prompt's beginning may come from ``prefix_source``. Answered by
    `Outputs`, without a `Reply`."""

    request: Request
    prefix_source: PrefixSource | None = None


class Push(Message, frozen=True):
    """Prefill on this worker, output token 1, and push the KV to ``peer``, which announces its destination over the KV
    link. KV of the prompt's beginning may come from ``prefix_source``."""

    request: Request
    peer: KVPeer
    prefix_source: PrefixSource | None = None


class SendPrefix(Message, frozen=True):
    """Send what the prefix cache holds of the request's tokens, from the first on, to ``peer``, which announces its
    destination over the KV link. Nothing is computed: the only output is the last one, without a token."""

    request: Request
    peer: KVPeer


class Receive(Message, frozen=True):
    """Allocate blocks for the prompt's KV, announce them to ``peer`` over the KV link, and decode from token 2 on. With
    ``tell_ready``, an output without a token says when all KV is there."""

    request: Request
    peer: KVPeer
    tell_ready: bool = False


class HandOver(Message, frozen=True):
    """What the prefill worker's answer says for a `Receive` (`TokenOutput.hand_off`). There is no `Reply`."""

    attempt_id: str
    hand_off: bytes


class Abort(Message, frozen=True):
    """Abort a request in any state. The `Reply` is sent when its resources are released."""

    call_id: int
    attempt_id: str


class Ping(Message, frozen=True):
    """Asks for the worker's clock, which the `Reply` has."""

    call_id: int


class RequestHeartbeat(Message, frozen=True):
    """Asks for a heartbeat at once, because its answer will name new peers. There is no `Reply`."""


Work = Run | Push | Receive | SendPrefix
Call = Abort | Ping


# --- worker → gateway ------------------------------------------------------------------------------------------------


class Reply(Message, frozen=True):
    """The answer to the `Call` with this id. ``received_s`` and ``replied_s`` are times of the worker's clock."""

    call_id: int
    received_s: float
    replied_s: float
    failure: Failure | None = None


class Outputs(Message, frozen=True):
    """The tokens of one step for all requests of the stream, and the errors that ended requests. Each entry begins with
    the attempt id."""

    outputs: list[tuple[str, TokenOutput]]
    failures: list[tuple[str, Failure]] = msgspec.field(default_factory=list)


# --- registration ----------------------------------------------------------------------------------------------------


class LinkState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The link to one incarnation of a decode worker, or the error that kept it from being opened."""

    worker_id: str
    epoch: str
    outcome: PeerLink | Failure


class Beat(Message, frozen=True):
    """A heartbeat. The first one registers the worker. ``load`` has the requests of other gateways than the one that
    gets it. ``link_states`` are the states of the links that an earlier
    answer asked for, without those that are still being opened. ``blocks`` is there if the last answer wanted it and
    the prefix cache has changed."""

    info: WorkerInfo
    load: WorkerLoad
    link_states: list[LinkState] = msgspec.field(default_factory=list)
    blocks: BlockUpdate | None = None

    @property
    def links(self) -> Links:
        """``link_states`` by incarnation."""
        return {
            (state.worker_id, state.epoch): state.outcome.error()
            if isinstance(state.outcome, Failure)
            else state.outcome
            for state in self.link_states
        }


class BeatAnswer(Message, frozen=True):
    """The answer to a heartbeat. A ``superseded`` worker has to end: another one has taken its name, it was retired, or
    it belongs to another service. ``peers`` are all decode workers known to this gateway, which a prefill worker should
    have links to. ``blocks_after`` is up to where the gateway knows the changes of the worker's prefix cache
    (`pdserve.core.prefix_digests.BlockUpdate`); None if it does not follow them. ``role`` is what the service wants the
    worker to be, by this ``version`` of its members (None: the gateway was not told). Of several gateways the highest
    version counts.
    """

    gateway_epoch: str
    superseded: bool
    peers: list[KVPeer] = msgspec.field(default_factory=list)
    blocks_after: int | None = None
    role: Role | None = None
    version: int = 0


M = TypeVar("M")


class MessageDecoder(Generic[M]):
    """Decodes messages of the types ``kinds``, a struct or a union of structs."""

    def __init__(self, kinds: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def decode(self, data: bytes) -> M:
        """The message in ``data``. PdserveError if it is malformed or of another type."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # not UTF-8; nested too deep
            raise PdserveError(f"an unreadable message ({error}); gateway and worker differ in version") from None


TO_WORKER: MessageDecoder[Hello | Work | HandOver | Call | RequestHeartbeat] = MessageDecoder(
    Hello | Work | HandOver | Call | RequestHeartbeat  # type: ignore[arg-type]  # a union
)
TO_GATEWAY: MessageDecoder[Reply | Outputs] = MessageDecoder(Reply | Outputs)  # type: ignore[arg-type]  # a union
BEATS = MessageDecoder(Beat)
BEAT_ANSWERS = MessageDecoder(BeatAnswer)


# --- how the two are reached ------------------------------------------------------------------------------------------

Serve: TypeAlias = Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes, None]]
"""Serves one stream: messages in, answers out. A PdserveError ends the stream with INVALID_ARGUMENT."""


class Wire(Protocol):
    """A way to open streams to one server. `worker.authentication.ServiceWire` is the real one."""

    async def open(self, requests: AsyncIterator[bytes], *, timeout_s: float = ...) -> AsyncIterator[bytes]:
        """Open a stream, and return its answers. PdserveError if the server does not answer within ``timeout_s``;
        reading the answers raises it when the stream breaks."""
        ...

    async def aclose(self) -> None:
        """Close the connection, and all its streams."""
        ...


class WorkerHandle(Protocol):
    """A live worker, as the router sees it (`worker.client.WorkerClient`).

    Requests are sent without waiting; their outputs and errors go to a sink, `WorkerLost` if the connection breaks.
    Attempt ids must be unique. Each request has to end with its last output, an error, `forget`, or `abort`.
    """

    @property
    def info(self) -> WorkerInfo:
        """The worker's last description of itself."""
        ...

    @property
    def clock(self) -> ClockOffset:
        """Offset of the worker's clock from the gateway's."""
        ...

    def push(self, request: Request, peer: KVPeer, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """Prefill the prompt, give token 1 as the only output, and push the KV to ``peer``, which announces the
        destination. The two workers release the blocks without the router. KV of the prompt's beginning may come from
        ``prefix_source``, which `send_prefix` asks for it.

        After token 1 the sink still gets `WorkerLost` if the connection breaks, until `forget`.
        """
        ...

    def receive(self, request: Request, peer: KVPeer, sink: OutputSink, tell_ready: bool = False) -> None:
        """Receive the KV of the prompt from ``peer`` and give the outputs from token 2 on. The first of them
        carries the proof. If token 1 ended the request, it is the only output, with a finish reason and no token.

        With ``tell_ready``, an output with the event DECODE_READY and no token precedes token 2, as soon as all KV is
        there.
        """
        ...

    def hand_over(self, attempt_id: str, hand_off: bytes) -> None:
        """Give a request that was sent by `receive` what prefill's output says for it (`TokenOutput.hand_off`)."""
        ...

    def run(self, request: Request, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """Prefill and decode on this worker (colocated), and give all outputs. ``prefix_source`` as for `push`."""
        ...

    def send_prefix(self, request: Request, peer: KVPeer, sink: OutputSink) -> None:
        """Send the KV that the worker has cached of the request's tokens to ``peer``, which announces the destination
        under the attempt id of this request. Its only output has a finish reason and no token."""
        ...

    def forget(self, attempt_id: str) -> None:
        """Give the request's sink nothing more, because its KV has been handed off. Has no effect for an unknown
        request."""
        ...

    async def abort(self, attempt_id: str) -> None:
        """Drop the request in any state; its sink gets nothing more. Does not raise for an unknown request."""
        ...

    def request_heartbeat(self) -> None:
        """Ask the worker to send its next heartbeat at once, because the answer has changed. Never raises."""
        ...

    async def wait_closed(self) -> None:
        """Wait until the control connection has ended, on either side."""
        ...

    async def aclose(self) -> None:
        """End the control connection. Requests on it raise `WorkerLost`; this method never raises."""
        ...
