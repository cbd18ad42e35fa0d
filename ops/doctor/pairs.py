"""Every prefill worker's way to every decode worker: tried all at once, then measured one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass

from ops.doctor.endpoints import Endpoints
from ops.doctor.handoff_prediction import LinkRate, hidden_tokens_per_s
from ops.doctor.meeting import Meeting, Obstacle
from ops.doctor.report import ExaminedPair, predictions
from ops.doctor.seats import Seat
from ops.doctor.site import Site
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError
from pdserve.core.kv_layout import KVLayout
from pdserve.core.worker import Role

MOST_MEASURED = 64
"""Pairs beyond these are only tried: each costs a second."""
_MEASURE_S = 0.5
_MEET_S = 60.0  # more than a probe's own bounds


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What has to be known of the model: the pools' layout, and the most tokens a prompt may have."""

    layout: KVLayout
    longest_prompt: int


class Pairs:
    """The pairs among the seats of ``sites``, by node id."""

    def __init__(
        self, config: PdserveConfig, sites: Mapping[str, Site], timeout_s: float, model: ServedModel | None
    ) -> None:
        self._config, self._sites, self._timeout_s, self._model = config, sites, timeout_s, model

    def examine(self, seats: Sequence[Seat], pool: Executor, say: Callable[[str], None]) -> Iterator[ExaminedPair]:
        """All of them, prefill worker by prefill worker."""
        prefills = [seat for seat in seats if seat.role is Role.PREFILL]
        decodes = [seat for seat in seats if seat.role is Role.DECODE]
        pairs = [(prefill, decode) for prefill in prefills for decode in decodes]
        say(f"trying {len(pairs)} pairs")
        meetings = list(pool.map(lambda pair: self._meet(pair[0], pair[1], 0.0), pairs))
        to_measure = min(MOST_MEASURED, sum(tried.figures is not None for tried in meetings))
        measured = 0
        for (prefill, decode), tried in zip(pairs, meetings, strict=True):
            if tried.figures is None or measured == to_measure:
                yield ExaminedPair(prefill, decode, tried, False, (), None)
                continue
            measured += 1
            say(f"measuring {prefill.worker_id} → {decode.worker_id} ({measured} of {to_measure})")
            yield self._examined(prefill, decode, self._meet(prefill, decode, _MEASURE_S))

    def _meet(self, prefill: Seat, decode: Seat, for_s: float) -> Meeting:
        ends = self._endpoints(decode)
        for seat, found in ((prefill, self._endpoints(prefill)), (decode, ends)):
            if found is None or not found.kv:
                return Meeting(obstacle=Obstacle.NOT_TRIED, what=f"{seat.worker_id} has no KV end")
        assert ends is not None
        probe = self._sites[prefill.node.node_id].probes[prefill.worker_id]
        arguments = {
            "worker_id": decode.worker_id,
            "endpoints": [asdict(each) for each in ends.kv],
            "for_s": for_s,
            "timeout_s": self._timeout_s,
        }
        try:
            return Meeting.from_wire(probe.call("meet", arguments, 4 * self._timeout_s + _MEET_S))
        except PdserveError as error:
            return Meeting(obstacle=Obstacle.TIMED_OUT, what=str(error))

    def _examined(self, prefill: Seat, decode: Seat, meeting: Meeting) -> ExaminedPair:
        figures, model, transfer = meeting.figures, self._model, self._config.transfer
        if figures is None or not figures.gbs or model is None:
            return ExaminedPair(prefill, decode, meeting, figures is not None, (), None)
        link = LinkRate(figures.gbs, figures.round_trip_s, transfer.max_inflight_bytes)
        found = predictions(model.layout, model.longest_prompt, link)
        return ExaminedPair(prefill, decode, meeting, True, found, hidden_tokens_per_s(model.layout, link))

    def _endpoints(self, seat: Seat) -> Endpoints | None:
        return self._sites[seat.node.node_id].endpoints.get(seat.worker_id)
