"""What is wrong with pairs, from how they met. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ops.doctor.dial import REMEDIES, Dial
from ops.doctor.finding import Finding, fail, warn
from ops.doctor.meeting import Meeting, Obstacle
from ops.doctor.report import ExaminedPair
from worker.addresses import Interface

_SLOW_SHARE = 0.25
_SLOW_WIRE_MS = 1000.0
_REMEDIES = {
    Obstacle.NO_TRANSPORT: "set transfer.transport to auto, or to one that joins the two hosts (tcp)",
    Obstacle.LAYOUT: "all hosts need the same model, dtype and block size: see the model's findings",
    Obstacle.BROKEN: "another service may answer at that address: see the versions' and interfaces' findings",
}


def check_reach(pairs: Sequence[ExaminedPair]) -> Iterator[Finding]:
    """Pairs that did not meet. Those with an end that could not listen are told of where that is."""
    for pair in pairs:
        meeting = pair.meeting
        if meeting.figures is not None or meeting.obstacle is Obstacle.NOT_TRIED:
            continue
        at = f" at {meeting.address} ({meeting.transport})" if meeting.address else ""
        yield fail(
            "reach",
            pair.name,
            f"{pair.prefill.node.ip} cannot hand KV to {pair.decode.node.ip}{at}: {meeting.obstacle}: {meeting.what}",
            remedy_of(meeting),
        )


def remedy_of(meeting: Meeting) -> str:
    """What to do about an obstacle."""
    if meeting.obstacle in _REMEDIES:
        return _REMEDIES[meeting.obstacle]
    return REMEDIES[Dial(meeting.obstacle)]


def check_speed(pairs: Sequence[ExaminedPair], interfaces: Mapping[str, Interface]) -> Iterator[Finding]:
    """Links that are slower than their likes, or slow for this model. ``interfaces`` are the workers'."""
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
            what += f", where another pair has {fastest * 8:.3g}"
        elif longest is not None and longest.wire_ms > _SLOW_WIRE_MS:
            what += f": the KV of {longest.tokens} tokens takes {longest.wire_ms / 1e3:.1f} s"
        else:
            continue
        claims = [_claim(seat.worker_id, interfaces.get(seat.worker_id)) for seat in (pair.prefill, pair.decode)]
        remedy = f"it runs over {' and '.join(claims)}; if there is a faster network, name it with transfer.interface"
        yield warn("link", pair.name, what, remedy)


def _claim(worker_id: str, interface: Interface | None) -> str:
    if interface is None or not interface.device:
        return f"an interface that cannot be told ({worker_id})"
    speed = f"claims {interface.mbits} Mbit/s" if interface.mbits else "makes no claim"
    return f"{interface.device} {interface.address} ({worker_id}; {speed})"
