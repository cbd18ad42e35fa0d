"""What an attempt measures for the cost model. It observes the attempt, and decides nothing."""

from __future__ import annotations

from pdserve.core.timeline import EventKind, Timeline
from router.cost_model import Served, link_kind, worker_kind
from router.registered_worker import RegisteredWorker
from router.registry import Assignment, WorkerRegistry
from router.session import Session

MIN_ITL_TOKENS = 4
"""With fewer, the time per token is not taken as measured."""


class Measure:
    """The measurements of one attempt on the workers of ``assignment``."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        # As they were placed: a worker may take another role meanwhile.
        both = (assignment.prefill, assignment.decode or assignment.prefill)
        self._prefill_on, self._decode_on = [worker_kind(s.worker.role, s.worker.info.device) for s in both]
        self._ahead = self._beside = self._decoding = 0
        self._last_s = 0.0

    def sent(self) -> None:
        """The request is sent to its workers."""
        share = self._assignment.prefill
        self._ahead = max(0, share.worker.prompt_tokens - share.prompt_tokens)
        self._beside = share.worker.decoding

    def token(self, index: int, worker: RegisteredWorker, time_s: float) -> None:
        """Token number ``index`` of the request has come from ``worker``."""
        if index <= 1:
            self._decoding = worker.decoding_here
        self._last_s = time_s

    def served(self, session: Session, num_tokens: int, registry: WorkerRegistry) -> Served | None:
        """What the attempt, of ``num_tokens`` prompt tokens, has shown after its last token; None if it gave none."""
        timeline, result, count = session.timeline, session.result, len(session.output_token_ids)
        if not timeline.has(EventKind.TOKEN_1_SAMPLED):
            return None
        prefill = self._assignment.prefill.worker
        decode = prefill if self._assignment.decode is None else self._assignment.decode.worker
        handoff_s = _span_s(timeline, EventKind.TOKEN_1_SAMPLED, EventKind.DECODE_SCHEDULED)
        if handoff_s >= 0:
            handoff_s = max(0.0, handoff_s - timeline.room_wait_ms / 1e3)
        prefill_s = _span_s(timeline, EventKind.PREFILL_RECEIVED, EventKind.TOKEN_1_SAMPLED)
        fetch, planned, proof = result.prefix_fetch, self._assignment.fetch, result.proof
        fetch_link = ""
        if fetch is not None:
            prefill_s = max(0.0, prefill_s - fetch.duration_ms / 1e3)
            source = registry.get(fetch.source)
            if fetch.proof is not None and fetch.tokens and source is not None and planned and planned.is_usual:
                fetch_link = link_kind(prefill.info.node, source.info.node)
        itl_s = -1.0
        if count >= MIN_ITL_TOKENS and timeline.has(EventKind.TOKEN_2_ARRIVED):
            itl_s = (self._last_s - timeline.gateway_time(EventKind.TOKEN_2_ARRIVED)) / (count - 2)
        return Served(
            prefill_on=self._prefill_on,
            uncached_tokens=num_tokens - result.prefill_cached_tokens,
            tokens_ahead=self._ahead,
            decoding_beside=self._beside,
            prefill_s=prefill_s,
            decode_on=self._decode_on,
            link=link_kind(prefill.info.node, decode.info.node) if proof is not None else "",
            kv_bytes=proof.kv_bytes if proof is not None else 0,
            handoff_s=handoff_s,
            # The mean of the second and the last token.
            decoding=(self._decoding + decode.decoding_here + 1) / 2,
            itl_s=itl_s,
            outputs_share=count / session.request.sampling.max_tokens,
            prompt_tokens=num_tokens,
            fetch_link=fetch_link,
            fetch_bytes=fetch.proof.kv_bytes if fetch is not None and fetch.proof is not None else 0,
            fetch_s=fetch.duration_ms / 1e3 if fetch is not None else -1.0,
        )


def _span_s(timeline: Timeline, start: EventKind, end: EventKind) -> float:
    """Seconds from one event to the other; negative if one is missing."""
    both = timeline.has(start) and timeline.has(end)
    return max(0.0, timeline.gateway_time(end) - timeline.gateway_time(start)) if both else -1.0
