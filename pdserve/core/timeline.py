"""The breakdown of a request: a table defines which stage lies between which events.

A request collects `Event`s: (kind, worker, monotonic seconds of that host). `Timeline.breakdown` computes the stages of
a figure (``ttft`` or ``ttft_decode``). No stage but ``network`` is computed as a remainder: ``unattributed``, the
client's own figure minus the sum of the stages, shows whether the events leave a gap.

A span between two hosts is corrected by the measured clock offsets; `Breakdown.clock_error_ms` bounds the error of each
stage. If two spans of one stage go to the same worker and back (``dispatch`` of ``ttft``), the offset cancels out, and
the stage is exact."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

GATEWAY = "gateway"


class EventKind(StrEnum):
    """The events of a request. Clock: ``g`` gateway, ``p`` worker that prefills, ``d`` worker that decodes."""

    RECEIVED = "received"  # g: the gateway has the request
    TOKENIZED = "tokenized"  # g: tokens handed to the router
    PAIR_CHOSEN = "pair_chosen"  # g: workers chosen, and the prefill worker is free
    PREFILL_SENT = "prefill_sent"  # g: the request leaves for both workers
    PREFILL_RECEIVED = "prefill_received"  # p: ... and is there
    PREFIX_AWAITED = "prefix_awaited"  # p: has blocks for KV of the prompt's prefix, which another worker sends
    PREFIX_READY = "prefix_ready"  # p: this KV is verified and in the pool, or it was given up
    PREFILL_SCHEDULED = "prefill_scheduled"  # p: first step that computes any of its tokens begins
    TOKEN_1_SAMPLED = "token_1_sampled"  # p
    PREFILL_ANSWERED = "prefill_answered"  # g: the first token of an engine that tells nothing of the above is there
    TOKEN_1_ARRIVED = "token_1_arrived"  # g: the router has it
    TOKEN_1_EMITTED = "token_1_emitted"  # g: written to the client's stream
    DECODE_SENT = "decode_sent"  # g: the request leaves for a decode engine that fetches KV by itself
    DECODE_ANSWERED = "decode_answered"  # g: ... and its repetition of token 1 is there
    ROOM_MADE = "room_made"  # d: blocks for the prompt are allocated
    KV_VERIFIED = "kv_verified"  # d: the last block is verified and in the pool
    DECODE_READY = "decode_ready"  # d: the same, where token 1 was held back until then (router.first_token: decode)
    DECODE_SCHEDULED = "decode_scheduled"  # d: first step with this request begins
    DRAFTED = "drafted"  # d: in the step of token 2, a draft model is done with guesses for other requests
    TOKEN_2_SAMPLED = "token_2_sampled"  # d
    TOKEN_2_ARRIVED = "token_2_arrived"  # g
    TOKEN_2_EMITTED = "token_2_emitted"  # g
    FINISHED = "finished"  # g: the last token was written


EXTERNAL_EVENTS = frozenset({EventKind.PREFILL_ANSWERED, EventKind.DECODE_SENT, EventKind.DECODE_ANSWERED})
"""Those of requests to engines that are not pdserve's."""


class Figure(StrEnum):
    """The two latency figures: token 1 at the client, and token 2 at the client, which includes the hand-off."""

    TTFT = "ttft"
    TTFT_DECODE = "ttft_decode"


class Event(msgspec.Struct, frozen=True, array_like=True):
    """An event on ``worker`` (or `GATEWAY`), at ``time_s`` of that host's monotonic clock."""

    kind: EventKind
    worker: str
    time_s: float


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A worker's clock minus the gateway's, in seconds, ± ``error_s`` (half the shortest round trip)."""

    offset_s: float
    error_s: float


Span = tuple[EventKind, ...]
"""From the first of these events that happened to the last one of them. If that did not happen, the span is empty."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A named part of a figure: the sum of its spans. ``what`` describes it to users."""

    name: str
    spans: tuple[Span, ...]
    what: str


_K = EventKind
NETWORK, UNATTRIBUTED = "network", "unattributed"


def _stages(arrived: EventKind, emitted: EventKind, *sent: EventKind) -> tuple[Stage, ...]:
    """The stages of every figure, for the token with these events; ``sent`` is when its worker could send it: the first
    of these events that happened."""
    return (
        Stage(
            "gateway",
            ((_K.RECEIVED, _K.TOKENIZED), (arrived, emitted)),
            "tokenization before, detokenization after",
        ),
        Stage("route", ((_K.TOKENIZED, _K.PAIR_CHOSEN),), "queueing for a free prefill worker, retries"),
        Stage(
            "dispatch",
            ((_K.PREFILL_SENT, _K.PREFILL_RECEIVED), (*sent, arrived)),
            "control messages between gateway and workers",
        ),
        Stage(
            "prefix_fetch",
            ((_K.PREFIX_AWAITED, _K.PREFIX_READY),),
            "KV of the prompt's beginning, from another worker's cache",
        ),
        Stage(
            "prefill_queue",
            (
                (_K.PREFILL_RECEIVED, _K.PREFIX_AWAITED),
                (_K.PREFIX_READY, _K.PREFILL_RECEIVED, _K.PREFILL_SCHEDULED),
            ),
            "waiting for the engine",
        ),
        Stage("prefill", ((_K.PREFILL_SCHEDULED, _K.TOKEN_1_SAMPLED),), "computing the prompt"),
        Stage("prefill_leg", ((_K.PREFILL_SENT, _K.PREFILL_ANSWERED),), "all of prefill, on an external engine"),
    )


_HANDOFF = (
    Stage("kv_exposed", ((_K.TOKEN_1_SAMPLED, _K.KV_VERIFIED),), "KV transfer not hidden behind the prefill"),
    Stage(
        "decode_queue",
        ((_K.KV_VERIFIED, _K.TOKEN_1_SAMPLED, _K.DECODE_SCHEDULED),),
        "waiting for a decode step",
    ),
    Stage("leg_gap", ((_K.PREFILL_ANSWERED, _K.DECODE_SENT),), "between the two requests to external engines"),
    Stage(
        "decode_leg",
        ((_K.DECODE_SENT, _K.PREFILL_ANSWERED, _K.DECODE_ANSWERED),),
        "KV transfer, allocation, waiting and the first step, on an external engine",
    ),
    Stage("drafting", ((_K.DECODE_SCHEDULED, _K.DRAFTED),), "a draft model's guesses for other requests"),
    Stage(
        "first_decode",
        (
            (_K.DRAFTED, _K.DECODE_SCHEDULED, _K.TOKEN_2_SAMPLED),
            (_K.DECODE_ANSWERED, _K.PREFILL_ANSWERED, _K.TOKEN_2_ARRIVED),
        ),
        "the step that makes token 2",
    ),
)

STAGES: Mapping[Figure, tuple[Stage, ...]] = {
    Figure.TTFT: (
        *_stages(_K.TOKEN_1_ARRIVED, _K.TOKEN_1_EMITTED, _K.DECODE_READY, _K.TOKEN_1_SAMPLED),
        # Only of requests whose token 1 was held back.
        Stage("kv_exposed", ((_K.TOKEN_1_SAMPLED, _K.DECODE_READY),), _HANDOFF[0].what),
        Stage("decode_leg", ((_K.PREFILL_ANSWERED, _K.DECODE_READY),), _HANDOFF[3].what),
    ),
    Figure.TTFT_DECODE: (*_stages(_K.TOKEN_2_ARRIVED, _K.TOKEN_2_EMITTED, _K.TOKEN_2_SAMPLED), *_HANDOFF),
}

STAGE_NAMES: tuple[str, ...] = (NETWORK, *(s.name for s in STAGES[Figure.TTFT_DECODE]))

EMITTED: Mapping[Figure, EventKind] = {
    Figure.TTFT: EventKind.TOKEN_1_EMITTED,
    Figure.TTFT_DECODE: EventKind.TOKEN_2_EMITTED,
}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The stages of a figure in milliseconds, in order, with ``unattributed`` last. They sum up to ``total_ms``."""

    figure: Figure
    total_ms: float
    stages_ms: Mapping[str, float]
    clock_error_ms: float

    @property
    def unattributed_ms(self) -> float:
        """The client's figure minus the sum of the stages."""
        return self.stages_ms[UNATTRIBUTED]


@dataclass(slots=True)
class Timeline:
    """The events of one request (those of its last attempt), and the clock offsets of their workers."""

    events: dict[EventKind, Event] = field(default_factory=dict)
    clocks: dict[str, ClockOffset] = field(default_factory=dict)

    def record(self, kind: EventKind, worker: str, time_s: float) -> None:
        """Record an event; it replaces that of an earlier attempt."""
        self.events[kind] = Event(kind, worker, time_s)

    def extend(self, events: Iterable[Event]) -> None:
        """Record several events."""
        for event in events:
            self.events[event.kind] = event

    def forget(self, kinds: Iterable[EventKind]) -> None:
        """Drop the events of a failed attempt."""
        for kind in kinds:
            self.events.pop(kind, None)

    def has(self, kind: EventKind) -> bool:
        """Whether ``kind`` happened."""
        return kind in self.events

    def gateway_time(self, kind: EventKind) -> float:
        """When ``kind`` happened, in seconds of the gateway's clock; KeyError if it did not happen."""
        event = self.events[kind]
        offset = self.clocks.get(event.worker)
        return event.time_s - (offset.offset_s if offset else 0.0)

    def gateway_total_ms(self, figure: Figure) -> float | None:
        """Time from receiving the request to writing the figure's token, on the gateway's clock. None if the token was
        not written (a request for one token has no ``ttft_decode``)."""
        if not self.has(EMITTED[figure]) or not self.has(_K.RECEIVED):
            return None
        return (self.gateway_time(EMITTED[figure]) - self.gateway_time(_K.RECEIVED)) * 1e3

    @property
    def room_wait_ms(self) -> float:
        """The part of ``kv_exposed`` during which decode had no room for the prompt's blocks."""
        if not self.has(_K.TOKEN_1_SAMPLED) or not self.has(_K.ROOM_MADE):
            return 0.0
        return max(0.0, self.gateway_time(_K.ROOM_MADE) - self.gateway_time(_K.TOKEN_1_SAMPLED)) * 1e3

    def times_s(self) -> dict[EventKind, float]:
        """When each event happened, in seconds of the gateway's clock."""
        if any([clock.offset_s for clock in self.clocks.values()]):
            return {kind: self.gateway_time(kind) for kind in self.events}
        return {kind: event.time_s for kind, event in self.events.items()}

    def breakdown(
        self, figure: Figure, client_total_ms: float | None = None, times_s: Mapping[EventKind, float] | None = None
    ) -> Breakdown | None:
        """The stages of a figure; None if its token was not written.

        With the client's own figure, ``network`` is that minus the gateway's total. Without it, the breakdown is the
        gateway's own and has no ``network``. ``times_s`` are those of the method with this name, if they are known."""
        if times_s is None:
            times_s = self.times_s()
        if EMITTED[figure] not in times_s or _K.RECEIVED not in times_s:
            return None
        gateway_total_ms = (times_s[EMITTED[figure]] - times_s[_K.RECEIVED]) * 1e3
        stages_ms: dict[str, float] = {}
        if client_total_ms is not None:
            stages_ms[NETWORK] = client_total_ms - gateway_total_ms
        exact = not any([clock.error_s for clock in self.clocks.values()])  # as on one host
        error_s = 0.0
        for stage in STAGES[figure]:
            happened = [ends for span in stage.spans if (ends := _ends(span, times_s)) is not None]
            if happened:
                stages_ms[stage.name] = sum([times_s[end] - times_s[start] for start, end in happened]) * 1e3
                if not exact:
                    error_s = max(error_s, self._error_s(happened))
        total_ms = gateway_total_ms if client_total_ms is None else client_total_ms
        stages_ms[UNATTRIBUTED] = total_ms - sum(stages_ms.values())
        return Breakdown(figure, total_ms, stages_ms, error_s * 1e3)

    def spans(self, figure: Figure) -> list[tuple[Stage, EventKind, EventKind]]:
        """The spans of a figure's stages that happened: the stage, and the events at which the span began and
        ended."""
        return [
            (stage, *ends)
            for stage in STAGES[figure]
            for span in stage.spans
            if (ends := _ends(span, self.events)) is not None
        ]

    def _error_s(self, spans: Iterable[tuple[EventKind, EventKind]]) -> float:
        """Error bound of the sum of ``spans``. Offsets that are both added and subtracted cancel out."""
        net: dict[str, int] = {}
        for start, end in spans:
            for kind, sign in ((end, 1), (start, -1)):
                worker = self.events[kind].worker
                net[worker] = net.get(worker, 0) + sign
        return sum(abs(count) * self.clocks[worker].error_s for worker, count in net.items() if worker in self.clocks)


def _ends(span: Span, events: Container[EventKind]) -> tuple[EventKind, EventKind] | None:
    """The events at which the span began and ended, if it happened."""
    *starts, end = span
    if end in events:
        for kind in starts:
            if kind in events:
                return kind, end
    return None
