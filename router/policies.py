"""The routing policies: each chooses one of several workers that can take a request.

A policy is a function without state: equal arguments give equal choices. It gets a `Choice` and returns the worker,
with the reason in a few words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import xxhash

from pdserve.core import plugins
from pdserve.core.config import SloConfig
from pdserve.core.worker import Role
from router.cost_model import NOTHING_KNOWN, Costs
from router.view import Needs, WorkerView

LINK_FACTOR = 2.0
"""A link counts as faster than another one if the rate measured on it is at least this many times as high. Rates of
equal links differ by less."""

PREFILL_WEIGHT: Mapping[Role, int] = {Role.PREFILL: 4, Role.DECODE: 1}
"""How many blocks of running requests weigh as much as one block that is missing. On a prefill worker a missing block
is computed, which costs more than a step's attention to a block that is there. On a decode worker it is received: the
cost is then the number of blocks in use once the request is there."""

SKEW_TOKENS = 1024
SKEW_FACTOR = 2.0
"""The load is skewed if the worker with the prefix has more than `SKEW_FACTOR` times the outstanding tokens of the
least loaded one, plus `SKEW_TOKENS`. The factor alone would find any load skewed while another worker is idle; the
tokens alone would find a high load skewed that differs by a single request."""


class Choice(NamedTuple):
    """What a policy chooses from."""

    workers: Sequence[WorkerView]
    """At least one."""
    needs: Needs
    role: Role
    """What the worker is for."""
    source: WorkerView | None = None
    """The prefill worker of a decode worker that is chosen. It has links to all ``workers``."""
    costs: Costs = NOTHING_KNOWN
    slo: SloConfig = SloConfig()


Chosen = tuple[WorkerView, str]
Policy = Callable[[Choice], Chosen]


def round_robin(choice: Choice) -> Chosen:
    """The worker that was chosen longest ago."""
    worker, link = least(choice, [worker.last_used for worker in choice.workers])
    return worker, f"its turn among {len(choice.workers)}{link}"


def random(choice: Choice) -> Chosen:
    """Any worker, all equally likely."""
    in_order = sorted(choice.workers, key=_name)
    return in_order[_draw(choice) % len(in_order)], f"drawn from {len(in_order)}"


def least_tokens(choice: Choice) -> Chosen:
    """The worker with the fewest outstanding tokens."""
    worker, link = least(choice, [worker.outstanding_tokens for worker in choice.workers])
    return worker, f"{worker.outstanding_tokens} outstanding tokens, the fewest of {len(choice.workers)}{link}"


def power_of_two(choice: Choice) -> Chosen:
    """Of two workers that are drawn, the one with fewer outstanding tokens. Where several gateways see the same load
    reports, this keeps them from choosing the same worker."""
    in_order = sorted(choice.workers, key=_name)
    number, count = _draw(choice), len(in_order)
    first = number % count
    pair = [in_order[first], in_order[(first + 1 + (number >> 32) % (count - 1)) % count]]
    worker, link = least(choice._replace(workers=pair), [each.outstanding_tokens for each in pair])
    other = pair[1] if worker is pair[0] else pair[0]
    return worker, (
        f"{worker.outstanding_tokens} outstanding tokens, {other.worker_id} has {other.outstanding_tokens}; "
        f"drawn from {count}{link}"
    )


def prefix_affinity(choice: Choice) -> Chosen:
    """The worker that has the longest beginning of the prompt cached; if none has any, or that one has far more to do
    than others, the one with the fewest outstanding tokens."""
    cached = choice.needs.cached
    longest = max([cached.get(worker.worker_id, 0) for worker in choice.workers]) if cached else 0
    fewest, why = least_tokens(choice)
    if not longest:
        return fewest, f"no prefix cached; {why}"
    holders = [worker for worker in choice.workers if cached.get(worker.worker_id, 0) == longest]
    worker, link = least(choice._replace(workers=holders), [worker.outstanding_tokens for worker in holders])
    if worker.outstanding_tokens > SKEW_FACTOR * fewest.outstanding_tokens + SKEW_TOKENS:
        return fewest, (
            f"the load is skewed: {worker.worker_id} has {longest} tokens cached, but {worker.outstanding_tokens} "
            f"outstanding; {why}"
        )
    why = f"{longest} of {choice.needs.prompt_tokens} prompt tokens cached, the most of {len(choice.workers)}"
    return worker, why + link


def kv_aware(choice: Choice) -> Chosen:
    """The worker with the least cost: the blocks of prompts that it has to compute (those that wait there, and of this
    request those that are not cached), times `PREFILL_WEIGHT`, plus the blocks of its running requests."""
    workers, needs, weight = choice.workers, choice.needs, PREFILL_WEIGHT[choice.role]
    whole = workers[0].blocks_for(needs.prompt_tokens)  # linked workers have equal blocks
    costs = [weight * (whole + worker.waiting_blocks) + worker.active_blocks for worker in workers]
    if cached := needs.cached:
        for index, worker in enumerate(workers):
            if worker.worker_id in cached:
                costs[index] -= weight * (whole - worker.blocks_for(needs.uncached(worker.worker_id)))
    worker, link = least(choice, costs)
    return worker, (
        f"cost {min(costs)}, the least of {len(workers)}: "
        f"{worker.blocks_for(needs.uncached(worker.worker_id))} of {whole} blocks not cached, "
        f"{worker.waiting_blocks} waiting, {worker.active_blocks} active{link}"
    )


def session(choice: Choice) -> Chosen:
    """The same worker for all requests of a session, by rendezvous hashing: each worker's hash with the session id is
    its rank, and the highest wins. A worker that comes or goes changes only the sessions that it gets or had."""
    if not choice.needs.session:
        worker, why = least_tokens(choice)
        return worker, f"no session id; {why}"
    suffix = b"/" + choice.needs.session.encode()

    def rank(worker: WorkerView) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(worker.worker_id.encode() + suffix), worker.worker_id

    return max(choice.workers, key=rank), f"that of the session among {len(choice.workers)}"


def slo(choice: Choice) -> Chosen:
    """The worker with the greatest predicted headroom below the objective: of TTFT for prefill, of ITL for decode.
    `least_tokens` until the cost model predicts all candidates."""
    is_prefill = choice.role is Role.PREFILL
    figure, objective_ms = ("TTFT", choice.slo.ttft_ms) if is_prefill else ("ITL", choice.slo.itl_ms)
    assert objective_ms is not None, "the configuration was checked"
    lines = choice.costs.prefill if is_prefill else choice.costs.decode
    if any(worker.kind not in lines for worker in choice.workers):
        worker, why = least_tokens(choice)
        return worker, f"{why} (slo: {figure} is not measured of all of them yet)"

    def predicted_ms(worker: WorkerView) -> float:
        line = lines[worker.kind]
        if not is_prefill:
            return line.seconds(1, worker.batch + 1) * 1e3
        uncached = choice.needs.uncached(worker.worker_id)
        return line.seconds(1, uncached, worker.prompt_tokens, worker.decoding) * 1e3

    worker, link = least(choice, [predicted_ms(worker) for worker in choice.workers])
    headroom_ms = objective_ms - predicted_ms(worker)
    return worker, (
        f"{figure} of {predicted_ms(worker):.3g} ms predicted, {abs(headroom_ms):.3g} ms "
        f"{'below' if headroom_ms >= 0 else 'above'} its objective, the best of {len(choice.workers)}{link}"
    )


def nearest_link(choice: Choice) -> Chosen:
    """Of the decode workers on the prefill worker's host, or of all if none is there, those with the fastest links; of
    these the one with the fewest outstanding tokens. Others are chosen when the near ones have no room. Without a
    source it chooses as `least_tokens` does."""
    close, link = _nearest(choice.workers, choice.source)
    if link and len(close) == 1:
        return close[0], f"the only one{link.removeprefix(',')}"
    worker, why = least_tokens(choice._replace(workers=close, source=None))
    return worker, why + link


POLICIES: Mapping[str, Policy] = {
    "round_robin": round_robin,
    "random": random,
    "least_tokens": least_tokens,
    "power_of_two": power_of_two,
    "prefix_affinity": prefix_affinity,
    "kv_aware": kv_aware,
    "session": session,
    "slo": slo,
    "nearest_link": nearest_link,
}

_IGNORE_PREFIXES = frozenset({"round_robin", "random", "least_tokens", "power_of_two", "session", "nearest_link"})
"""Prefixes are looked up for all others, plug-ins among them."""


_COMPARE_SOME = frozenset({"random", "least_tokens", "power_of_two", "prefix_affinity", "kv_aware", "slo"})
"""All others must see every worker, plug-ins among them."""


def policy(name: str) -> Policy:
    """The policy of a name, which may be that of a plug-in. ConfigError if that cannot be loaded."""
    found: Policy = POLICIES.get(name) or plugins.load(plugins.POLICIES, name, Callable)
    return found


def uses_prefixes(name: str) -> bool:
    """Whether the policy may read `Needs.cached`."""
    return name not in _IGNORE_PREFIXES


def compares_all(name: str) -> bool:
    """Whether the policy must see every worker that can take a request: a part of them, drawn anew for each request,
    would not do."""
    return name not in _COMPARE_SOME


def least(choice: Choice, costs: Sequence[float]) -> Chosen:
    """The worker of the least of ``costs``, which has one for each, and words about its link if that decided. Among
    equals, the source prefers its own host, then a faster link; then it is the turn of the one that was chosen longest
    ago, or of unused workers by name."""
    lowest = min(costs)
    equals = [worker for worker, cost in zip(choice.workers, costs, strict=True) if cost == lowest]
    if len(equals) == 1:
        return equals[0], ""
    best, why = _nearest(equals, choice.source)
    return min(best, key=lambda worker: (worker.last_used, worker.worker_id)), why


def _nearest(workers: Sequence[WorkerView], source: WorkerView | None) -> tuple[Sequence[WorkerView], str]:
    """The workers on the host of ``source``, or all if there are none; of these the ones whose links are within
    `LINK_FACTOR` of the fastest one. A link without a measured rate is among them, so that it is measured. The second
    value says in words what excluded others."""
    if source is None:
        return workers, ""
    why = ""
    near = [worker for worker in workers if worker.node == source.node]
    if near and len(near) < len(workers):
        workers, why = near, f", on the host of {source.worker_id}"
    bound = max([source.linked[worker.worker_id] for worker in workers]) / LINK_FACTOR
    fastest = [w for w in workers if (rate := source.linked[w.worker_id]) == 0.0 or rate > bound]
    return (fastest, f"{why}, over the fastest link") if len(fastest) < len(workers) else (workers, why)


def _name(worker: WorkerView) -> str:
    return worker.worker_id


def _draw(choice: Choice) -> int:
    """A number of 64 bits for a request and a role, evenly distributed and independent of other requests and roles."""
    return xxhash.xxh3_64_intdigest(f"{choice.role}/{choice.needs.ticket}".encode())
