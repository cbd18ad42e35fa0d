"""One line of ``requests.jsonl``: what is known about one request of a run.

The schema is stable: fields may be added, and never change their meaning. ``pandas.read_json(path, lines=True)`` reads
the file; see docs/experiments.md for examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from pdserve.client.generation import Generation
from pdserve.core.errors import PdserveError
from pdserve.core.request import counted_requests
from pdserve.core.timeline import Figure

LAG = "lag"
"""The stage of `RequestRow.since_due` in which a request waits in the load generator."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a run.

    ``cell`` names the combination of parameters it belongs to, ``arm`` the side of the comparison, ``repeat`` and
    ``index`` its place there: rows of two arms with the same cell, kind, repeat, index and turn had the same prompt.
    ``kind`` is the part that the request plays in its arm, where requests of one arm play different parts.
    ``scheduled_s`` and ``sent_s`` count from the start of the cell; a difference means that the load generator was
    late. Latencies are the client's own, in milliseconds; ``stages_ms`` has the breakdown of each figure.
    ``others_cpu_s`` are the CPU seconds that processes which are not the measurement's used on this host meanwhile.
    ``token_hash`` identifies the generated tokens. A failed request has ``error`` (class and message) and neither
    latencies nor tokens."""

    cell: str
    arm: str
    repeat: int
    index: int
    turn: int = 0
    kind: str = ""
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    error: str | None = None
    request_id: str = ""
    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_hash: str = ""
    finish_reason: str = ""
    ttft_ms: float | None = None
    ttft_decode_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    itl_ms: tuple[float, ...] = ()
    stages_ms: Mapping[str, Mapping[str, float]] = {}
    clock_error_ms: float = 0.0
    transport: str = ""
    block_size: int = 0
    kv_bytes: int = 0
    kv_bytes_expected: int = 0
    kv_blocks_sent: int = 0
    kv_blocks_skipped: int = 0
    prefill_cached_tokens: int = 0
    transfer: Mapping[str, Any] = {}
    others_cpu_s: float | None = None

    @classmethod
    def of(cls, generation: Generation | None, error: PdserveError | None, **place: Any) -> RequestRow:
        """The row of a request that ended with ``generation`` or with ``error``; ``place`` has cell, arm, repeat, index
        and what else is known about it."""
        if generation is None:
            return cls(**place, error="" if error is None else f"{type(error).__name__}: {error}")
        g = generation
        return cls(
            **place,
            request_id=g.request_id,
            mode=g.mode,
            prefill_worker=g.prefill_worker,
            decode_worker=g.decode_worker,
            attempts=g.attempts,
            prompt_tokens=g.prompt_tokens,
            output_tokens=len(g.token_ids),
            token_hash=token_hash(g.token_ids),
            finish_reason=g.finish_reason,
            ttft_ms=g.ttft_ms,
            ttft_decode_ms=g.ttft_decode_ms,
            tpot_ms=g.tpot_ms,
            e2e_ms=g.total_ms,
            itl_ms=g.itl_ms,
            stages_ms={figure.value: dict(breakdown.stages_ms) for figure, breakdown in g.breakdowns.items()},
            clock_error_ms=g.clock_error_ms,
            transport=g.transport,
            block_size=g.block_size,
            kv_bytes=g.kv_bytes,
            kv_bytes_expected=g.kv_bytes_expected,
            kv_blocks_sent=g.kv_blocks_sent,
            kv_blocks_skipped=g.kv_blocks_skipped,
            prefill_cached_tokens=g.prefill_cached_tokens,
            transfer=asdict(g.transfer),
        )

    def figure_ms(self, figure: Figure) -> float | None:
        """The client's ``ttft`` or ``ttft_decode``."""
        return self.ttft_ms if figure is Figure.TTFT else self.ttft_decode_ms

    def since_due(self) -> RequestRow:
        """The row with latencies that count from when the request was due, for loads whose arrivals do not depend on
        the service (open loop). What the load generator was late is part of them, and the stage `LAG` of their
        breakdowns: otherwise a generator that falls behind would hide queueing (coordinated omission)."""
        lag_ms = (self.sent_s - self.scheduled_s) * 1e3
        later = {
            name: value + lag_ms
            for name in ("ttft_ms", "ttft_decode_ms", "e2e_ms")
            if (value := getattr(self, name)) is not None
        }
        stages_ms = {figure: {LAG: lag_ms, **stages} for figure, stages in self.stages_ms.items()}
        return msgspec.structs.replace(self, sent_s=self.scheduled_s, stages_ms=stages_ms, **later)


def token_hash(token_ids: tuple[int, ...]) -> str:
    """A short digest of the generated tokens: equal exactly if the tokens are."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]


def unexpected_bytes(rows: Iterable[RequestRow]) -> str | None:
    """What is wrong if a request moved other bytes than it had to, and the first that did; None if none did. Requests
    are compared one by one, because in a sum one that moved too much may hide one that moved too little."""
    wrong = [row for row in rows if row.kv_bytes != row.kv_bytes_expected]
    if not wrong:
        return None
    first = wrong[0]
    return (
        f"bytes moved differ from bytes expected in {counted_requests(len(wrong))}, first in {first.request_id}: "
        f"{first.kv_bytes} instead of {first.kv_bytes_expected}"
    )


def failures(where: str, rows: Iterable[RequestRow]) -> list[str]:
    """``where: 2 requests failed, first with WorkerLost: gone``; empty if none of ``rows`` failed."""
    errors = [row.error for row in rows if row.error is not None]
    if not errors:
        return []
    return [f"{where}: {counted_requests(len(errors))} failed, first with {errors[0]}"]
