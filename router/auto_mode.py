"""Mode ``auto``: whether a request runs on a pair of workers or on one, by what both cost on this deployment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pdserve.core.worker import Role
from router.cost_model import MIN_SAMPLES, Costs, Line, link_kind
from router.view import Needs, WorkerView

ADVANTAGE = 0.03
"""One worker has to be cheaper than a pair by this share, and by the margins of both predictions."""

EXPLORED_TOKENS = 256
"""Longest prompt that may run elsewhere than where it is predicted to be cheapest, so that this is measured."""

IDLE_EVERY, BUSY_EVERY, KNOWN_EVERY = 4, 32, 128
"""At most one of so many requests explores: where nothing else runs, where it delays others, and what was measured
before."""


class Pair(NamedTuple):
    """A prefill and a decode worker."""

    prefill: WorkerView
    decode: WorkerView


class Verdict(NamedTuple):
    """The request runs on ``worker`` alone; None: on a pair. ``explores``: it is not predicted to be cheaper, but this
    is to be measured."""

    worker: WorkerView | None
    why: str
    explores: bool = False


def judge(needs: Needs, pair: Pair, alone: Sequence[WorkerView], costs: Costs) -> Verdict:
    """Compare a pair with each of the workers that could serve the request ``alone``.

    What counts is the time that the request takes and the time by which it delays those that run already. If the
    prefill worker of ``pair`` is not free, the pair is what the request would wait for.
    """
    on_pair = _cost(needs, pair, pair.decode, costs)
    if on_pair is None:
        return Verdict(None, "too little is measured to compare a pair with one worker")
    verdict = Verdict(None, f"{on_pair} on a pair, not known on one worker")
    known = [(cost, worker) for worker in alone if (cost := _cost(needs, Pair(worker, worker), pair.decode, costs))]
    if known:
        cost, worker = min(known, key=lambda entry: (entry[0].seconds, entry[1].worker_id))
        why = f"{cost} on {worker.worker_id} alone, {on_pair} on a pair"
        verdict = Verdict(worker if cost.is_below(on_pair) else None, why)
    return _explore(needs, alone, costs, verdict) or verdict


def break_even_tokens(pair: Pair, costs: Costs, decoding: float) -> float | None:
    """Longest prompt (uncached tokens) that is cheaper on the pair's decode worker alone, while nothing waits and so
    many requests decode there; infinite if all are. None as long as it is unknown."""
    alone, handoff = costs.prefill.get(pair.decode.kind), costs.handoff.get(_link(pair))
    prefill = costs.prefill.get(pair.prefill.kind)
    if alone is None or handoff is None or prefill is None:
        return None
    # What a pair costs more is linear in the prompt's tokens.
    fixed = prefill.seconds(1, 0, 0, 0) + handoff.seconds(1, 0) - alone.seconds(1, 0, 0, decoding)
    kv_bytes = pair.decode.block_bytes / pair.decode.block_size
    each = prefill.seconds(0, 1, 0, 0) + handoff.seconds(0, kv_bytes) - (1 + decoding) * alone.seconds(0, 1, 0, 0)
    if each >= 0:
        return float("inf") if fixed > 0 else None
    return max(0.0, fixed / -each)


def describe_break_even(workers: Sequence[WorkerView], costs: Costs) -> tuple[float | None, str]:
    """`break_even_tokens` of the first pair of workers, with as many requests beside as requests have met, and the same
    in words. None and nothing if it is unknown."""
    by_id = {worker.worker_id: worker for worker in workers}
    pairs = [Pair(w, by_id[peer]) for w in workers for peer in sorted(w.linked.keys() & by_id.keys())]
    decoding = max(0.0, costs.decoding - 1)
    if not pairs or (tokens := break_even_tokens(pairs[0], costs, decoding)) is None:
        return None, ""
    length = "of any length" if tokens == float("inf") else f"up to {tokens:.0f} uncached tokens"
    return tokens, f"break-even: beside {decoding:.1f} others, prompts {length} are cheaper where they decode"


class _Cost:
    """A sum of predictions, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._terms: list[tuple[float, Line, tuple[float, ...]]] = []

    def add(self, times: float, line: Line, *features: float) -> None:
        """Add a prediction several times."""
        self.seconds += times * line.seconds(*features)
        self._terms.append((times, line, features))

    def is_below(self, other: _Cost) -> bool:
        """Whether it is less by `ADVANTAGE` and by the margins of both."""
        least = (1 - ADVANTAGE) * other.seconds - self.seconds
        return least > 0 and least > math.hypot(self.margin_s, other.margin_s)

    @property
    def margin_s(self) -> float:
        """Its margin. Those of different lines add in squares."""
        return math.hypot(*[times * line.at(*features).margin_s for times, line, features in self._terms])

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.3g} ms"


def _cost(needs: Needs, pair: Pair, usual: WorkerView, costs: Costs) -> _Cost | None:
    """What the request takes on these two workers, which may be one, and by how much it delays others. Decode counts as
    far as it differs from decode on the worker ``usual``. None if too little is measured."""
    prefill, decode = pair
    tokens = needs.uncached(prefill.worker_id)
    cost = _Cost()
    if (line := costs.prefill.get(prefill.kind)) is None:
        return None
    cost.add(1, line, 1, tokens, prefill.prompt_tokens, prefill.decoding)
    # Requests that decode on the worker wait while it computes the prompt: those of now, or that come meanwhile.
    delayed = float(prefill.decoding)
    if prefill.role is Role.DECODE:
        delayed = max(delayed, costs.decoding - 1)
    if delayed > 0:
        cost.add(delayed, line, 0, tokens, 0, 0)
    if prefill.worker_id != decode.worker_id:
        if (line := costs.handoff.get(_link(pair))) is None:
            return None
        cost.add(1, line, 1, decode.blocks_for(needs.prompt_tokens) * decode.block_bytes)
    if decode.worker_id != usual.worker_id:
        outputs = max(0.0, needs.output_tokens * costs.outputs_share - 1)
        for sign, worker in ((1, decode), (-1, usual)):
            if (line := costs.decode.get(worker.kind)) is None:
                return None
            others = _others(worker)
            cost.add(sign * outputs, line, 1, others + 1)
            if others:
                cost.add(sign * outputs * others, line, 0, 1)  # it slows them down
    return cost


def _others(worker: WorkerView) -> int:
    """Requests that will decode on the worker. Those on a prefill worker leave it after token 1 unless they decode
    there."""
    return worker.decoding if worker.role is Role.PREFILL else worker.batch


def _explore(needs: Needs, alone: Sequence[WorkerView], costs: Costs, verdict: Verdict) -> Verdict | None:
    """Another choice than the cheapest one, if it is due, so that what is not chosen is measured, too."""
    if needs.prompt_tokens > EXPLORED_TOKENS or costs.since_explored < IDLE_EVERY:
        return None
    rare = [worker for worker in alone if _measured(worker, costs) < MIN_SAMPLES]
    if rare:
        worker = min(rare, key=lambda w: (_measured(w, costs), w.outstanding_requests, w.worker_id))
        every = BUSY_EVERY if worker.outstanding_requests else IDLE_EVERY
        if costs.since_explored < every:
            return None
        return Verdict(worker, f"an exploration: little is measured of {worker.kind} workers alone", True)
    if costs.since_explored < KNOWN_EVERY:
        return None
    others = [choice for choice in (None, *alone) if choice is not verdict.worker]
    if not others:
        return None
    return Verdict(others[needs.ticket % len(others)], f"an exploration, though {verdict.why}", True)


def _measured(worker: WorkerView, costs: Costs) -> int:
    """Measurements that a request on this worker alone would add to: both lines are needed to predict it."""
    lines = costs.prefill.get(worker.kind), costs.decode.get(worker.kind)
    return min(0 if line is None else line.samples for line in lines)


def _link(pair: Pair) -> str:
    return link_kind(pair.prefill.node, pair.decode.node)
