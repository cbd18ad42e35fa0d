"""Links between prefill and decode workers: all pairs are tried at once, then measured one by one and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor

from ops.doctor.finding import Finding, fail, ok, warn
from ops.doctor.handoff_prediction import LinkRate, hidden_tokens_per_s, predict_without_overlap
from ops.doctor.network import REMEDIES, Obstacle
from ops.doctor.probe_api import Endpoints, Meeting
from ops.doctor.report import ExaminedNode, ExaminedPair
from ops.doctor.seats import Seat
from ops.model_memory import ServedModel
from pdserve.core.config import TransferConfig
from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role

MOST_MEASURED = 64
"""Most pairs that are measured, at about a second each; the others are only tried."""
PROMPTS = (512, 2048)
"""Prompt lengths, in tokens, for which hand-off times are predicted."""
_MEASURE_S = 0.5
_MEET_S = 60.0  # beyond the probe's own timeouts
_SLOW_SHARE = 0.25
_SLOW_WIRE_MS = 1000.0


def examine_pairs(
    seats: Sequence[Seat],
    nodes: Mapping[str, ExaminedNode],
    transfer: TransferConfig,
    model: ServedModel | None,
    pool: Executor,
    say: Callable[[str], None],
) -> Iterator[ExaminedPair]:
    """Connect every prefill worker among ``seats`` to every decode worker, and measure the links. ``nodes`` are by node
    id; links are predicted only if the ``model`` is known."""
    prefills = [seat for seat in seats if seat.role is Role.PREFILL]
    decodes = [seat for seat in seats if seat.role is Role.DECODE]
    pairs = [(prefill, decode) for prefill in prefills for decode in decodes]

    def meet(prefill: Seat, decode: Seat, for_s: float) -> Meeting:
        ends = [nodes[seat.node.node_id].endpoints.get(seat.worker_id) for seat in (prefill, decode)]
        for seat, end in zip((prefill, decode), ends, strict=True):
            if end is None or not end.kv:
                return Meeting(obstacle=Obstacle.NOT_TRIED, what=f"{seat.worker_id} has no KV end")
        assert ends[1] is not None
        timeout_s = transfer.connect_timeout_s
        arguments = {"worker_id": decode.worker_id, "endpoints": ends[1].kv, "for_s": for_s, "timeout_s": timeout_s}
        probe = nodes[prefill.node.node_id].probes[prefill.worker_id]
        try:
            return probe.call("meet", arguments, 4 * timeout_s + _MEET_S, Meeting)
        except PdserveError as error:
            return Meeting(obstacle=Obstacle.TIMED_OUT, what=str(error))

    say(f"trying {len(pairs)} pairs")
    meetings = list(pool.map(lambda pair: meet(pair[0], pair[1], 0.0), pairs))
    to_measure = min(MOST_MEASURED, sum(tried.figures is not None for tried in meetings))
    measured = 0
    for (prefill, decode), tried in zip(pairs, meetings, strict=True):
        if tried.figures is None or measured == to_measure:
            yield ExaminedPair(prefill, decode, tried)
            continue
        measured += 1
        say(f"measuring {prefill.worker_id} → {decode.worker_id} ({measured} of {to_measure})")
        meeting = meet(prefill, decode, _MEASURE_S)
        figures = meeting.figures
        if figures is None or not figures.gbs or model is None:
            yield ExaminedPair(prefill, decode, meeting)
            continue
        link = LinkRate(figures.gbs, figures.round_trip_s, transfer.max_inflight_bytes)
        prompts = sorted({min(tokens, model.longest_prompt) for tokens in PROMPTS})
        predicted = tuple(predict_without_overlap(model.layout, tokens, link) for tokens in prompts)
        yield ExaminedPair(prefill, decode, meeting, predicted, hidden_tokens_per_s(model.layout, link))


def check_reach(pairs: Sequence[ExaminedPair]) -> Iterator[Finding]:
    """Pairs that cannot connect. An end that could not listen has a finding of its own."""
    for pair in pairs:
        meeting = pair.meeting
        if meeting.figures is not None or meeting.obstacle is Obstacle.NOT_TRIED:
            continue
        at = f" at {meeting.address} ({meeting.transport})" if meeting.address else ""
        what = f"{pair.prefill.node.ip} cannot send KV to {pair.decode.node.ip}{at}: {meeting.obstacle}: {meeting.what}"
        yield fail("reach", pair.name, what, REMEDIES[meeting.obstacle])


def check_speed(pairs: Sequence[ExaminedPair], nodes: Sequence[ExaminedNode]) -> Iterator[Finding]:
    """Links that are much slower than others of their kind, or too slow for this model."""
    endpoints = {worker_id: each for node in nodes for worker_id, each in node.endpoints.items()}
    best: dict[tuple[str, bool], float] = {}
    for pair in pairs:
        kind = (pair.meeting.transport, pair.across)
        best[kind] = max(best.get(kind, 0.0), pair.gbs)
    for pair in pairs:
        if not pair.gbs:
            continue
        fastest = best[pair.meeting.transport, pair.across]
        longest = pair.predictions[-1] if pair.predictions else None
        what = f"{pair.gbs * 8:.3g} Gbit/s by {pair.meeting.transport}"
        if pair.gbs < _SLOW_SHARE * fastest:
            what += f", while another pair reaches {fastest * 8:.3g}"
        elif longest is not None and longest.wire_ms > _SLOW_WIRE_MS:
            what += f": the KV of {longest.tokens} tokens takes {longest.wire_ms / 1e3:.1f} s"
        else:
            continue
        claims = [_claim(seat.worker_id, endpoints.get(seat.worker_id)) for seat in (pair.prefill, pair.decode)]
        remedy = f"it runs over {' and '.join(claims)}; if there is a faster network, name it with transfer.interface"
        yield warn("link", pair.name, what, remedy)


def check_measured(pairs: Sequence[ExaminedPair]) -> Iterator[Finding]:
    """Pairs beyond `MOST_MEASURED`."""
    left = sum(pair.meeting.figures is not None and not pair.gbs for pair in pairs)
    if left:
        what = f"{left} of {len(pairs)} pairs were tried but not measured: at most {MOST_MEASURED} are"
        yield ok("link", "the service", what)


def _claim(worker_id: str, ends: Endpoints | None) -> str:
    interface = ends.interface if ends is not None else None
    if interface is None or not interface.device:
        return f"an unknown interface ({worker_id})"
    speed = f"claims {interface.mbits} Mbit/s" if interface.mbits else "states no speed"
    return f"{interface.device} {interface.address} ({worker_id}; {speed})"
