"""Results of a request: tokens as they arrive, and finally the whole generation with its breakdowns; and how both
clients make them of the messages of a stream."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.client.request import MODES
from pdserve.core.errors import PdserveError
from pdserve.core.request import FailedAttempt, Mode
from pdserve.core.timeline import Breakdown, ClockOffset, Event, EventKind, Figure, Timeline
from pdserve.pb import inference_pb2 as pb

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")


def from_message(kind: type[T], message: Any, **values: Any) -> T:
    """A dataclass with the fields of a protobuf message that have its names, repeated ones as tuples and maps as
    dictionaries. ``values`` are its other fields."""
    names = [each.name for each in fields(kind) if each.name not in values]  # type: ignore[arg-type]
    return kind(**{name: _plain(getattr(message, name)) for name in names}, **values)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, MutableSequence) else dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """An alternative token: its id, its text, and the natural logarithm of its probability under the model's own
    distribution (before bias, penalties, temperature, and filters)."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One token. ``text`` is what it adds to the output (may be empty while a character is incomplete). ``index`` 0 is
    the first token after the prompt. ``arrived_s`` is the client's monotonic clock when the message was read.
    ``logprob`` and ``top_logprobs`` (likeliest first) are set if ``logprobs`` were requested."""

    token_id: int
    text: str
    index: int
    arrived_s: float
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferDetails:
    """How the KV blocks were transferred; all zero without a transfer.

    Three times that are easily confused: ``wire_ms`` is the time in which bytes were on their way, ``exposed_ms`` the
    part that was not hidden behind the prefill (of it ``room_wait_ms`` because decode had no room yet), and
    ``request_to_ready_ms`` the time from decode's allocation to the last verified block. ``export_ms`` is the sender's
    reading and hashing, ``import_ms`` the receiver's hashing, ``span_ms`` first message to last verified block. The KV
    took ``wire_bytes`` on the link, fewer than it has if it was coded. ``gbs`` is their rate (10^9 bytes per second of
    wire and import), ``ceiling_gbs`` the link's best rate so far (0: not measured)."""

    export_ms: float
    wire_ms: float
    import_ms: float
    span_ms: float
    exposed_ms: float
    room_wait_ms: float
    request_to_ready_ms: float
    gbs: float
    ceiling_gbs: float
    checksum: str
    messages: int
    kv_bytes_retried: int
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class PrefixFetch:
    """The KV of a prompt's beginning, which the worker that computed the prompt got from worker ``source``'s cache.

    ``tokens`` of ``tokens_wanted`` came, in ``duration_ms``. If the fetch failed, ``failure`` says why, and the prompt
    was computed."""

    source: str
    tokens: int
    tokens_wanted: int
    kv_bytes: int
    kv_bytes_expected: int
    transport: str
    duration_ms: float
    failure: str


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request.

    Times are the client's own: ``ttft_ms`` to token 1 (to the end of the stream if there was no token),
    ``ttft_decode_ms`` to token 2 (None if there was none), ``itl_ms`` the gaps between tokens. ``breakdowns`` has a
    figure only if its token was written. Bytes are whole blocks. Prefix caches saved the computation of
    ``prefill_cached_tokens`` of the prompt and the transfer of ``kv_blocks_skipped``. ``prefix_fetch`` tells what of
    the former came from another worker's cache (None: nothing was fetched). Of ``draft_tokens``, guesses that steps
    verified, ``accepted_draft_tokens`` were right (`docs/engine.md`).

    ``tokens`` correspond to ``token_ids``: all streamed tokens, except those that a stop string trimmed.

    ``placements`` has a sentence for each attempt: its workers, and why the router chose them. ``failures`` tells why
    attempts failed that were followed by another.

    ``timeline`` is the raw data of ``breakdowns``: `events` in order, each on the clock of its own host, and `clocks`,
    the offset of each worker's clock to the gateway's. ``resumes`` counts how often another gateway went on with the
    request; then there are no breakdowns, and ``attempts`` are those of the last gateway."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    mode: str
    prefill_worker: str
    decode_worker: str
    prompt_tokens: int
    attempts: int
    transport: str
    block_size: int
    kv_bytes: int
    kv_bytes_expected: int
    kv_blocks_sent: int
    kv_blocks_skipped: int
    prefill_cached_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    transfer: TransferDetails
    ttft_ms: float
    ttft_decode_ms: float | None
    breakdowns: Mapping[Figure, Breakdown]
    itl_ms: tuple[float, ...]
    total_ms: float
    tokens: tuple[Token, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)
    placements: tuple[str, ...] = ()
    resumes: int = 0
    prefix_fetch: PrefixFetch | None = None
    failures: tuple[FailedAttempt, ...] = ()

    @property
    def events(self) -> tuple[Event, ...]:
        """All known events of the request, in order of the gateway's clock."""
        return tuple(sorted(self.timeline.events.values(), key=lambda event: self.timeline.gateway_time(event.kind)))

    @property
    def clocks(self) -> Mapping[str, ClockOffset]:
        """Offset of each worker's clock: its host's clock minus the gateway's."""
        return self.timeline.clocks

    @property
    def clock_error_ms(self) -> float:
        """Error bound of a stage that spans two hosts; the larger one of both breakdowns."""
        return max((breakdown.clock_error_ms for breakdown in self.breakdowns.values()), default=0.0)

    @property
    def tpot_ms(self) -> float | None:
        """Mean gap between tokens; None with fewer than two."""
        return sum(self.itl_ms) / len(self.itl_ms) if self.itl_ms else None

    def figure_ms(self, figure: Figure) -> float | None:
        """The client's own ``ttft`` or ``ttft_decode``."""
        return self.ttft_ms if figure is Figure.TTFT else self.ttft_decode_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the output of ``pdserve generate --json``. ``logprobs`` (one entry per token of ``token_ids``)
        are included only if they were requested."""
        plain = {
            "request_id": self.request_id,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "mode": self.mode,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "transport": self.transport,
            "block_size": self.block_size,
            "kv_bytes": self.kv_bytes,
            "kv_bytes_expected": self.kv_bytes_expected,
            "kv_blocks_sent": self.kv_blocks_sent,
            "kv_blocks_skipped": self.kv_blocks_skipped,
            "prefill_cached_tokens": self.prefill_cached_tokens,
            "draft_tokens": self.draft_tokens,
            "accepted_draft_tokens": self.accepted_draft_tokens,
            "prefix_fetch": None if self.prefix_fetch is None else asdict(self.prefix_fetch),
            "ttft_ms": self.ttft_ms,
            "ttft_decode_ms": self.ttft_decode_ms,
            "breakdown_ms": {
                figure.value: dict(self.breakdowns[figure].stages_ms) if figure in self.breakdowns else None
                for figure in Figure
            },
            "clock_error_ms": self.clock_error_ms,
            "itl_ms": list(self.itl_ms),
            "transfer": asdict(self.transfer),
            "prompt_tokens": self.prompt_tokens,
            "attempts": self.attempts,
            "placements": list(self.placements),
            "failures": [failed._asdict() for failed in self.failures],
            "resumes": self.resumes,
            "tpot_ms": self.tpot_ms,
            "total_ms": self.total_ms,
            "tokens": [{"token_id": t.token_id, "text": t.text, "arrived_s": t.arrived_s} for t in self.tokens],
            "events": [
                {"kind": event.kind.value, "worker": event.worker, "time_s": event.time_s} for event in self.events
            ],
            "clocks": {worker: asdict(offset) for worker, offset in self.clocks.items()},
        }
        if any(token.logprob is not None for token in self.tokens):
            plain["logprobs"] = [
                {
                    "token_id": token.token_id,
                    "logprob": token.logprob,
                    "top": [asdict(candidate) for candidate in token.top_logprobs],
                }
                for token in self.tokens
            ]
        return plain

    def to_dataframe(self) -> pandas.DataFrame:
        """The timeline as a pandas DataFrame with one row per event.

        Columns: ``request_id``, ``event``, ``worker``, ``time_s`` (clock of the worker's host), ``gateway_ms`` (since
        the first event, on the gateway's clock) and ``clock_error_ms`` (error bound of ``gateway_ms``). ImportError
        without pandas."""
        import pandas  # optional dependency

        events, clocks, at_s = self.events, self.clocks, self.timeline.gateway_time
        return pandas.DataFrame(
            {
                "request_id": [self.request_id for _ in events],
                "event": [event.kind.value for event in events],
                "worker": [event.worker for event in events],
                "time_s": [event.time_s for event in events],
                "gateway_ms": [(at_s(event.kind) - at_s(events[0].kind)) * 1e3 for event in events],
                "clock_error_ms": [clocks[e.worker].error_s * 1e3 if e.worker in clocks else 0.0 for e in events],
            }
        )


_MODES = {number: mode for mode, number in MODES.items()}


class Assembler:
    """Collects the messages of one request. Times are the client's monotonic seconds; ``started_s`` is the time just
    before the call."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._tokens: list[Token] = []
        self._generation: Generation | None = None
        self._resumes = 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens that have arrived."""
        return [token.token_id for token in self._tokens]

    def resumed(self) -> None:
        """Note that another gateway goes on with the request."""
        self._resumes += 1

    @property
    def has_begun(self) -> bool:
        """Whether any message has arrived."""
        return bool(self._tokens) or self._generation is not None

    def add(self, message: pb.GenerateResponse, arrived_s: float) -> Token | None:
        """Add a message; returns its token, or None for the completion."""
        if message.HasField("completion"):
            self._generation = self._assemble(message.completion, arrived_s)
            return None
        token = _token(message.token, arrived_s)
        self._tokens.append(token)
        return token

    def result(self) -> Generation:
        """The generation, once the stream has ended; `PdserveError` if it ended without its completion."""
        if self._generation is None:
            raise PdserveError("the stream ended without its completion")
        return self._generation

    def _assemble(self, completion: pb.Completion, arrived_s: float) -> Generation:
        arrivals = [token.arrived_s for token in self._tokens] or [arrived_s]
        since_start_ms = [(arrival - self._started_s) * 1e3 for arrival in arrivals]
        ttft_ms = since_start_ms[0]
        ttft_decode_ms = since_start_ms[1] if len(since_start_ms) > 1 else None
        timeline = _timeline(completion)
        figures = {Figure.TTFT: ttft_ms, Figure.TTFT_DECODE: ttft_decode_ms}
        breakdowns = {
            figure: breakdown
            for figure, total_ms in figures.items()
            if total_ms is not None and (breakdown := timeline.breakdown(figure, total_ms)) is not None
        }
        transfer = completion.transfer
        return from_message(
            Generation,
            completion,
            mode=str(_MODES.get(completion.mode, Mode.AUTO)),
            transport=transfer.transport,
            block_size=transfer.block_size,
            kv_bytes=transfer.kv_bytes,
            kv_bytes_expected=transfer.kv_bytes_expected,
            kv_blocks_sent=transfer.blocks_sent,
            kv_blocks_skipped=transfer.blocks_skipped,
            failures=tuple([FailedAttempt(each.worker, each.error, each.text) for each in completion.failures]),
            transfer=from_message(TransferDetails, transfer),
            ttft_ms=ttft_ms,
            ttft_decode_ms=ttft_decode_ms,
            breakdowns=breakdowns,
            itl_ms=tuple((later - earlier) * 1e3 for earlier, later in pairwise(arrivals)),
            total_ms=(arrived_s - self._started_s) * 1e3,
            tokens=tuple(self._tokens[: len(completion.token_ids)]),
            timeline=timeline,
            resumes=self._resumes,
            prefix_fetch=from_message(PrefixFetch, completion.prefix_fetch)
            if completion.HasField("prefix_fetch")
            else None,
        )


def _token(message: pb.Token, arrived_s: float) -> Token:
    logprob = message.logprob if message.HasField("logprob") else None
    top = tuple([TopLogprob(each.token_id, each.text, each.logprob) for each in message.top_logprobs])
    return Token(message.token_id, message.text, message.index, arrived_s, logprob, top)


def _timeline(completion: pb.Completion) -> Timeline:
    known = set(EventKind)
    timeline = Timeline(clocks={c.worker: ClockOffset(c.offset_s, c.error_s) for c in completion.clocks})
    # Events of a newer service that this client does not know belong to no stage.
    timeline.extend(Event(EventKind(e.kind), e.worker, e.time_s) for e in completion.events if e.kind in known)
    return timeline
