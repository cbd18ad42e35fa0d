"""Builds tokens and the final generation from the messages of one stream, for both clients."""

from __future__ import annotations

from itertools import pairwise

from pdserve.client.generation import Generation, PrefixFetch, Token, TopLogprob, TransferDetails, from_message
from pdserve.client.request import MODES
from pdserve.core.errors import PdserveError
from pdserve.core.request import FailedAttempt, Mode
from pdserve.core.timeline import ClockOffset, Event, EventKind, Figure, Timeline
from pdserve.pb import inference_pb2 as pb

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
