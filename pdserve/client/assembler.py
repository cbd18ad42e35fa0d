"""Builds tokens and the final generation from the messages of one stream, for both clients."""

from __future__ import annotations

from itertools import pairwise

from pdserve.client.generation import Generation, PrefixFetch, Token, TopLogprob, TransferDetails
from pdserve.core.errors import PdserveError
from pdserve.core.request import Mode
from pdserve.core.timeline import ClockOffset, Event, EventKind, Figure, Timeline
from pdserve.pb import inference_pb2 as pb

_MODES = {pb.MODE_AUTO: Mode.AUTO, pb.MODE_PD: Mode.PD, pb.MODE_COLOCATED: Mode.COLOCATED}


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
        return Generation(
            request_id=completion.request_id,
            text=completion.text,
            token_ids=tuple(completion.token_ids),
            finish_reason=completion.finish_reason,
            mode=str(_MODES.get(completion.mode, Mode.AUTO)),
            prefill_worker=completion.prefill_worker,
            decode_worker=completion.decode_worker,
            prompt_tokens=completion.prompt_tokens,
            attempts=completion.attempts,
            transport=transfer.transport,
            block_size=transfer.block_size,
            kv_bytes=transfer.kv_bytes,
            kv_bytes_expected=transfer.kv_bytes_expected,
            kv_blocks_sent=transfer.blocks_sent,
            kv_blocks_skipped=transfer.blocks_skipped,
            prefill_cached_tokens=completion.prefill_cached_tokens,
            placements=tuple(completion.placements),
            transfer=TransferDetails(
                export_ms=transfer.export_ms,
                wire_ms=transfer.wire_ms,
                import_ms=transfer.import_ms,
                span_ms=transfer.span_ms,
                exposed_ms=transfer.exposed_ms,
                room_wait_ms=transfer.room_wait_ms,
                request_to_ready_ms=transfer.request_to_ready_ms,
                gbs=transfer.gbs,
                ceiling_gbs=transfer.ceiling_gbs,
                checksum=transfer.checksum,
                messages=transfer.messages,
                kv_bytes_retried=transfer.kv_bytes_retried,
            ),
            ttft_ms=ttft_ms,
            ttft_decode_ms=ttft_decode_ms,
            breakdowns=breakdowns,
            itl_ms=tuple((later - earlier) * 1e3 for earlier, later in pairwise(arrivals)),
            total_ms=(arrived_s - self._started_s) * 1e3,
            tokens=tuple(self._tokens[: len(completion.token_ids)]),
            timeline=timeline,
            resumes=self._resumes,
            prefix_fetch=_prefix_fetch(completion),
        )


def _token(message: pb.Token, arrived_s: float) -> Token:
    return Token(
        token_id=message.token_id,
        text=message.text,
        index=message.index,
        arrived_s=arrived_s,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple(TopLogprob(top.token_id, top.text, top.logprob) for top in message.top_logprobs),
    )


def _prefix_fetch(completion: pb.Completion) -> PrefixFetch | None:
    if not completion.HasField("prefix_fetch"):
        return None
    fetch = completion.prefix_fetch
    return PrefixFetch(
        source=fetch.source,
        tokens=fetch.tokens,
        tokens_wanted=fetch.tokens_wanted,
        kv_bytes=fetch.kv_bytes,
        kv_bytes_expected=fetch.kv_bytes_expected,
        transport=fetch.transport,
        duration_ms=fetch.duration_ms,
        failure=fetch.failure,
    )


def _timeline(completion: pb.Completion) -> Timeline:
    known = set(EventKind)
    timeline = Timeline(clocks={c.worker: ClockOffset(c.offset_s, c.error_s) for c in completion.clocks})
    # Events of a newer service that this client does not know belong to no stage.
    timeline.extend(Event(EventKind(e.kind), e.worker, e.time_s) for e in completion.events if e.kind in known)
    return timeline
