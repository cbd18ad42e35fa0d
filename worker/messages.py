"""The control protocol: what gateway and worker say to each other over the control stream, what a worker reports of
itself, and the options of the gRPC channels between them.

Every message is a struct here, travels as msgpack inside a gRPC `Frame`, and is decoded strictly.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from pdserve.core.errors import PdserveError, from_wire, to_wire
from pdserve.core.handoff import KVPeer, PeerLink
from pdserve.core.request import Request
from pdserve.core.worker import Links, TokenOutput, WorkerInfo, WorkerLoad
from pdserve.pb import worker_pb2 as pb

MAX_CONTROL_BYTES = 64 * 2**20
"""Of one message: requests are bounded far below it, a step's outputs by the batch."""

CONTROL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_CONTROL_BYTES),
    ("grpc.max_send_message_length", MAX_CONTROL_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_000),
)
"""Of channels and servers: no proxies, quick reconnects, and a dead peer noticed."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """On the wire a list of its class's name and its fields, in the order they stand in."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error: `pdserve.core.errors.to_wire` of it."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that ``error`` is."""
        return cls(*to_wire(error))

    def error(self) -> PdserveError:
        """The error again."""
        return from_wire(self.kind, self.message)


# --- gateway → worker ------------------------------------------------------------------------------------------------


class Run(Message, frozen=True):
    """Prefill and decode here. `Outputs` follow; there is no `Reply`."""

    request: Request


class Push(Message, frozen=True):
    """Prefill here, give token 1, push the KV to ``peer``, which tells over its KV link where it goes."""

    request: Request
    peer: KVPeer


class Receive(Message, frozen=True):
    """Make room for the prompt's KV, tell ``peer`` over its KV link where it goes, decode from token 2 on. With
    ``tell_ready``, an output without a token says when all KV is there."""

    request: Request
    peer: KVPeer
    tell_ready: bool = False


class Abort(Message, frozen=True):
    """Drop a request in whatever state it is in. The `Reply` comes once everything it held is given back."""

    call_id: int
    attempt_id: str


class Ping(Message, frozen=True):
    """The `Reply` tells the worker's clock."""

    call_id: int


class BeatNow(Message, frozen=True):
    """Send the next heartbeat at once: its answer has news. There is no `Reply`."""


Work = Run | Push | Receive
Call = Abort | Ping


# --- worker → gateway ------------------------------------------------------------------------------------------------


class Reply(Message, frozen=True):
    """The answer to the `Call` with this id. ``received_s`` and ``replied_s`` are times of the worker's clock."""

    call_id: int
    received_s: float
    replied_s: float
    failure: Failure | None = None


class Outputs(Message, frozen=True):
    """Everything one step made, for all requests of the stream, and requests that have ended in an error; by
    attempt id."""

    outputs: list[tuple[str, TokenOutput]]
    failures: list[tuple[str, Failure]] = []


# --- registration ----------------------------------------------------------------------------------------------------


class LinkState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What has come of the link to one incarnation of a decode worker."""

    worker_id: str
    epoch: str
    outcome: PeerLink | Failure


class Beat(Message, frozen=True):
    """A worker is there. The first one registers it. ``link_states`` are those that were named to a prefill worker in
    an earlier answer, without those still being opened."""

    info: WorkerInfo
    load: WorkerLoad
    link_states: list[LinkState] = []

    @property
    def links(self) -> Links:
        """The same, by incarnation."""
        return {
            (state.worker_id, state.epoch): state.outcome.error()
            if isinstance(state.outcome, Failure)
            else state.outcome
            for state in self.link_states
        }


class BeatAnswer(Message, frozen=True):
    """``superseded``: another incarnation has taken this worker's place, or it was retired; it has to end. ``peers``
    are the decode workers that this (prefill) worker should have links to, all of them and no others."""

    gateway_epoch: str
    superseded: bool
    peers: list[KVPeer] = []


M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def to_frame(message: Message) -> pb.Frame:
    """The message as gRPC carries it."""
    return pb.Frame(data=_encoder.encode(message))


class FrameDecoder(Generic[M]):
    """Reads messages of the types ``kinds``, a struct or a union of them."""

    def __init__(self, kinds: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def decode(self, frame: pb.Frame) -> M:
        """The message in ``frame``; PdserveError if it is none of these."""
        try:
            return self._decoder.decode(frame.data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # not UTF-8; nested too deep
            raise PdserveError(f"an unreadable message ({error}); gateway and worker differ in version") from None


TO_WORKER: FrameDecoder[Work | Call | BeatNow] = FrameDecoder(Work | Call | BeatNow)  # type: ignore[arg-type]  # a union
TO_GATEWAY: FrameDecoder[Reply | Outputs] = FrameDecoder(Reply | Outputs)  # type: ignore[arg-type]  # a union
BEATS = FrameDecoder(Beat)
BEAT_ANSWERS = FrameDecoder(BeatAnswer)
