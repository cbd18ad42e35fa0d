"""Decides whether a worker fetches the KV of a prompt's beginning from another worker's cache, or computes it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from pdserve.core.config import PrefixFetching
from router.cost_model import Costs, Estimate, link_kind
from router.view import Needs, WorkerView

ADVANTAGE = 0.2
"""A fetch has to be quicker than computing by this share, and by the margins of both predictions."""

PATIENCE = 4.0
"""A fetch may take so many times as long as predicted."""
LEAST_TIMEOUT_S = 0.25
MOST_TIMEOUT_S = 3.0
"""Limit: a prefix fetch, else four times the predicted time. Then: the prompt is computed."""

SOURCE_TIMEOUT_S = MOST_TIMEOUT_S + 2.0
"""How long the source keeps the blocks for the other worker, which may have to wait for room first."""

PAUSE_S = 10.0
"""After a failed fetch, the worker fetches nothing from this source for so long."""


class Fetch(msgspec.Struct, frozen=True):
    """The worker that computes a prompt gets the KV of its first ``num_tokens`` tokens from ``source``, within
    ``timeout_s``. ``is_usual``: the source computes no prompt that would delay it, so the time is worth learning."""

    source: str
    num_tokens: int
    timeout_s: float
    is_usual: bool


def plan_fetch(
    needs: Needs, worker: WorkerView, workers: Iterable[WorkerView], costs: Costs, when: PrefixFetching
) -> tuple[Fetch | None, str]:
    """What ``worker``, which computes the prompt, is to fetch, and why (None and nothing: there is nothing to fetch).

    The source is the worker with the longest cached prefix. With ``auto``, fetching what ``worker`` lacks of it has to
    be clearly quicker than computing it.
    """
    if when == "off" or not needs.cached:
        return None, ""
    size = worker.block_size
    most = (needs.prompt_tokens - 1) // size * size  # one token is computed
    own = needs.cached.get(worker.worker_id, 0)
    sources = [
        other
        for other in workers
        if min(most, needs.cached.get(other.worker_id, 0)) > own
        and other.ready
        and not other.late
        and other.worker_id != worker.worker_id
        and other.worker_id not in needs.avoid
        and other.worker_id not in worker.avoided_sources
        and other.block_size == size
    ]
    if not sources:
        return None, ""
    source = max(
        sources,
        key=lambda w: (
            min(most, needs.cached[w.worker_id]),
            w.node == worker.node,
            -w.prompt_tokens,
            w.worker_id,
        ),
    )
    num_tokens = min(most, needs.cached[source.worker_id]) // size * size
    gain = num_tokens - own
    fetching = _fetching(gain, source, worker, costs)
    is_usual = not source.prompt_tokens
    what = f"{gain} tokens from {source.worker_id}"
    if when == "always":
        timeout_s = MOST_TIMEOUT_S if fetching is None else _timeout_s(fetching)
        return Fetch(source.worker_id, num_tokens, timeout_s, is_usual), f"{what} are fetched (router.prefix_fetch)"
    line = costs.prefill.get(worker.kind)
    if fetching is None or line is None:
        return None, ""
    computing = line.at(0.0, gain, 0.0, 0.0)
    both = f"{fetching.seconds * 1e3:.3g} ms, computed {computing.seconds * 1e3:.3g} ms"
    spared_s = (1 - ADVANTAGE) * computing.seconds - fetching.seconds
    if spared_s <= math.hypot(fetching.margin_s, computing.margin_s):
        return None, f"{what} are not fetched: {both}"
    return Fetch(source.worker_id, num_tokens, _timeout_s(fetching), is_usual), f"{what} are fetched: {both}"


def _fetching(tokens: int, source: WorkerView, worker: WorkerView, costs: Costs) -> Estimate | None:
    """How long a fetch takes. A source that computes prompts answers between two steps, so at most the longest step
    comes before."""
    fetch = costs.fetch_s(link_kind(source.node, worker.node), tokens // worker.block_size * worker.block_bytes)
    if fetch is None or not source.prompt_tokens:
        return fetch
    if (line := costs.prefill.get(source.kind)) is None:
        return None
    step = line.at(0.0, min(source.prompt_tokens, source.step_tokens), 0.0, 0.0)
    return Estimate(fetch.seconds + step.seconds, math.hypot(fetch.margin_s, step.margin_s))


def _timeout_s(predicted: Estimate) -> float:
    return min(max(PATIENCE * (predicted.seconds + predicted.margin_s), LEAST_TIMEOUT_S), MOST_TIMEOUT_S)
