"""The earliest time at which a request can end, by the cost model: what a deadline is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.cost_model import Line
from router.view import ClusterView, Needs

CAUTION = 0.5
"""A prediction, less its margin, counts by this share: only requests that are sure to be late are refused."""


def earliest_finish_s(needs: Needs, view: ClusterView, tokens_before: int = 0) -> float:
    """Seconds within which the request cannot end: the prompts before it on all workers together, its own prompt, and
    the outputs that it generates for sure, each on the fastest worker. 0 where too little is measured to tell.

    ``tokens_before`` are prompt tokens of waiting requests that are served before it. What the workers have begun is
    not counted: it may be almost done.
    """
    costs = view.costs
    lines = _lines(costs.prefill, [w.kind for w in view.workers if w.ready and _computes(needs, w.role, Role.PREFILL)])
    if not lines:
        return 0.0
    # A cached prompt is not computed. How much of this one is cached is not known: as much as of any request lately.
    own_s = min([_least_s(line, 1, costs.least_uncached * needs.prompt_tokens, 0, 0) for line in lines])
    each_s = [_least_s(line, 0, 1, 0, 0) for line in lines]
    queued_s = 0.0
    if tokens_before and min(each_s) > 0:
        queued_s = costs.uncached * tokens_before / sum([1 / seconds for seconds in each_s])
    return own_s + queued_s + _decode_s(needs, view)


def _decode_s(needs: Needs, view: ClusterView) -> float:
    """Seconds of the outputs that are sure, on a worker that does nothing else."""
    if needs.min_output_tokens <= 1:
        return 0.0
    kinds = [w.kind for w in view.workers if w.ready and _computes(needs, w.role, Role.DECODE)]
    each_s = [_least_s(line, 1, 1) for line in _lines(view.costs.decode, kinds)]
    return (needs.min_output_tokens - 1) * min(each_s, default=0.0)


def _computes(needs: Needs, role: Role, wanted: Role) -> bool:
    """Whether workers of ``role`` may do what ``wanted`` is for."""
    return needs.mode is not Mode.PD or role is wanted


def _lines(known: Mapping[str, Line], kinds: Sequence[str]) -> list[Line]:
    """The line of each worker; none if one is missing."""
    lines = [known[kind] for kind in kinds if kind in known]
    return lines if len(lines) == len(kinds) else []


def _least_s(line: Line, *features: float) -> float:
    seconds, margin_s = line.at(*features)
    return max(0.0, CAUTION * (seconds - margin_s))
