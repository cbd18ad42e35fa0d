"""Chooses the workers for a request, and explains the choice.

`place` is a pure function of plain values: it has no clock, no state and no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.core.errors import CapacityExceeded, LayoutMismatch, NotReady, PdserveError
from pdserve.core.request import Mode, counted
from pdserve.core.worker import Role
from router.auto_mode import Pair, judge
from router.policies import Choice, policy
from router.prefix_fetch import Fetch, plan_fetch
from router.view import ClusterView, Needs, WorkerView


class Placed(msgspec.Struct, frozen=True):
    """The request goes to these workers. ``decode`` is None if one worker does both. ``explores``: it goes there so
    that this is measured. ``fetch``: the worker that computes the prompt gets KV of its beginning from another one.
    ``unpaired``: it goes to one worker only because none of these pairs could ever take it."""

    prefill: str
    decode: str | None
    reason: str
    explores: bool = False
    fetch: Fetch | None = None
    unpaired: bool = False


class Wait(msgspec.Struct, frozen=True):
    """No worker can take the request now. ``error`` is set if none could even if all were idle. ``short_of`` is the
    role whose workers it waits for."""

    reason: str
    error: NotReady | LayoutMismatch | None = None
    short_of: Role | None = None


class Never(msgspec.Struct, frozen=True):
    """No registered worker can ever hold the request."""

    error: CapacityExceeded


Decision = Placed | Wait | Never


def place(needs: Needs, view: ClusterView) -> Decision:
    """Choose a worker or a pair of workers for a request, or explain why it has to wait. Then decide whether KV of the
    prompt's beginning comes from another worker."""
    decision = _place(needs, view)
    if not isinstance(decision, Placed) or not needs.cached:
        return decision
    worker = next(worker for worker in view.workers if worker.worker_id == decision.prefill)
    fetch, why = plan_fetch(needs, worker, view.workers, view.costs, view.config.prefix_fetch)
    if not why:
        return decision
    return msgspec.structs.replace(decision, fetch=fetch, reason=f"{decision.reason}; {why}")


def _place(needs: Needs, view: ClusterView) -> Decision:
    if (too_large := _capacity_error(needs, needs.mode, view)) is not None:
        return Never(too_large)
    if needs.mode is Mode.COLOCATED:
        return _place_one(needs, view, "mode colocated")
    decision = _place_pair(needs, view)
    if needs.mode is Mode.PD:
        return decision
    if isinstance(decision, Wait):
        apart = decision.error or _capacity_error(needs, Mode.PD, view)
        # Workers with different models or layouts would give different answers.
        if apart is not None and not isinstance(apart, LayoutMismatch):
            alone = _place_one(needs, view, f"mode auto: {_first_clause(apart)}")
            return msgspec.structs.replace(alone, unpaired=True) if isinstance(alone, Placed) else alone
    return _place_by_costs(needs, view, decision)


def unavailable(mode: Mode, view: ClusterView) -> NotReady | LayoutMismatch | None:
    """Why no request of ``mode`` can run even if all workers were free, or None. Mode ``auto`` needs any ready worker,
    but fails if prefill and decode workers have different layouts."""
    any_ready = any(worker.ready for worker in view.workers)
    any_alone = any(worker.ready and worker.serves_alone for worker in view.workers)
    if mode is not Mode.PD and not any_ready:
        return NotReady(f"no worker is ready ({_census(view)}); try again")
    if mode is Mode.COLOCATED:
        return None if any_alone else NotReady("the engines of all ready workers serve requests in pairs; use mode pd")
    error = _no_pair(view, any_alone)
    return error if mode is Mode.PD or not any_alone or isinstance(error, LayoutMismatch) else None


def _no_pair(view: ClusterView, any_alone: bool) -> NotReady | LayoutMismatch | None:
    for role in Role:
        if not view.ready(role):
            hint = "; modes auto and colocated need none" if any_alone else ""
            if any_alone and not any(worker.role is role for worker in view.workers):
                hint += f"; if the service was started without one, add one by `pdserve scale --{role} 1`"
            return NotReady(f"no {role} worker is ready ({_census(view)}){hint}; try again")
    decode = {worker.worker_id for worker in view.ready(Role.DECODE)}
    if any(not decode.isdisjoint(prefill.linked) for prefill in view.ready(Role.PREFILL)):
        return None
    errors = [error for prefill in view.ready(Role.PREFILL) for error in prefill.link_errors]
    mismatch = next((error for error in errors if isinstance(error, LayoutMismatch)), None)
    why = f": {mismatch or errors[0]}" if errors else ""
    message = f"workers are ready, but no prefill worker is connected to a decode worker{why}"
    return LayoutMismatch(message) if mismatch else NotReady(f"{message}; try again")


def _capacity_error(needs: Needs, mode: Mode, view: ClusterView) -> CapacityExceeded | None:
    """Why no live worker can ever hold the request in this mode. None if one can, or there is no worker."""
    live = [worker for worker in view.workers if worker.live]
    if not live or (mode is not Mode.PD and any(needs.tokens <= worker.max_tokens for worker in live)):
        return None
    if mode is not Mode.COLOCATED:
        prefill = [worker for worker in live if worker.role is Role.PREFILL]
        decode = [worker for worker in live if worker.role is Role.DECODE]
        if not (prefill and decode):
            return None
        if any(_fits_prefill(needs, worker) for worker in prefill) and any(
            needs.tokens <= worker.max_tokens for worker in decode
        ):
            return None
    most = max(worker.max_tokens for worker in live)
    return CapacityExceeded(
        f"prompt and max_tokens: {needs.prompt_tokens} + {needs.output_tokens} tokens exceed the KV pool of every "
        f"worker ({most} tokens at most); reduce them, or raise engine.kv_memory_mb"
    )


# --- one worker for both ---------------------------------------------------------------------------------------------


def _place_one(needs: Needs, view: ClusterView, because: str) -> Placed | Wait:
    able = [
        worker for worker in view.workers if worker.ready and worker.serves_alone and needs.tokens <= worker.max_tokens
    ]
    free = [
        worker
        for worker in able
        if view.is_free(worker, ahead=needs.ahead) and not worker.is_full_for(ahead=needs.ahead)
    ]
    if not free:
        error = unavailable(Mode.COLOCATED, view)
        return Wait(f"{because}; {_first_clause(error) if error else _backlog(able, view)}", error)
    worker, why = _choose(free, needs, view, Role.PREFILL)
    return Placed(worker.worker_id, None, f"{because}; both on {worker.worker_id}: {why}")


# --- mode auto -------------------------------------------------------------------------------------------------------


def _place_by_costs(needs: Needs, view: ClusterView, on_pair: Placed | Wait) -> Placed | Wait:
    """Place the request on one worker if that is cheaper than a pair (`router.auto_mode`)."""
    if isinstance(on_pair, Wait) and on_pair.error is not None:
        return on_pair
    if needs.avoid or needs.prefer:
        return _because("mode auto: a retry is for a pair", on_pair)
    if not view.costs.handoff:
        return _because("mode auto: too few hand-offs are measured to compare", on_pair)
    if isinstance(on_pair, Placed):
        workers = {worker.worker_id: worker for worker in view.workers}
        pair: Pair | None = Pair(workers[on_pair.prefill], workers[on_pair.decode or on_pair.prefill])
    else:
        pair = _expected_pair(needs, view)
    if pair is None:
        return on_pair
    worker, why, explores = judge(needs, pair, _alone(needs, view), view.costs)
    if worker is not None:
        return Placed(worker.worker_id, None, f"mode auto: {why}; both on {worker.worker_id}", explores)
    if explores and isinstance(on_pair, Placed):
        on_pair = msgspec.structs.replace(on_pair, explores=True)
    return _because(f"mode auto: {why}", on_pair)


def _because(why: str, decision: Placed | Wait) -> Placed | Wait:
    return msgspec.structs.replace(decision, reason=f"{why}; {decision.reason}")


def _alone(needs: Needs, view: ClusterView) -> list[WorkerView]:
    """The decode worker with the least to do that can take the whole request now; none if there is none. Requests that
    decode on a prefill worker wait for every prompt that comes after them, which no prediction tells in advance."""
    able = [
        worker
        for worker in view.workers
        if worker.ready
        and worker.role is Role.DECODE
        and worker.serves_alone
        and not worker.late
        and needs.tokens <= worker.max_tokens
        and view.is_free(worker, ahead=needs.ahead)
        and worker.has_room(needs.prompt_tokens, ahead=needs.ahead)
    ]
    least = min(
        able,
        key=lambda w: (w.prompt_tokens, w.outstanding_tokens, w.last_used, w.worker_id),
        default=None,
    )
    return [] if least is None else [least]


def _expected_pair(needs: Needs, view: ClusterView) -> Pair | None:
    """The pair that a request waits for, as no prefill worker is free: the one with the fewest tokens to compute."""
    decode = {w.worker_id: w for w in view.ready(Role.DECODE) if needs.tokens <= w.max_tokens}
    pairs = [
        Pair(prefill, decode[worker_id])
        for prefill in view.ready(Role.PREFILL)
        if _fits_prefill(needs, prefill)
        for worker_id in prefill.linked.keys() & decode.keys()
    ]
    return min(
        pairs,
        key=lambda p: (p.prefill.prompt_tokens, p.decode.outstanding_tokens, p.prefill.worker_id, p.decode.worker_id),
        default=None,
    )


# --- a pair ----------------------------------------------------------------------------------------------------------


def _place_pair(needs: Needs, view: ClusterView) -> Placed | Wait:
    """Choose a prefill and a decode worker with a link. The decode worker must have room for the prompt's KV now, so
    that the prefill worker does not have to hold it."""
    roomy = {
        worker.worker_id: worker
        for worker in view.workers
        if worker.ready
        and worker.role is Role.DECODE
        and needs.tokens <= worker.max_tokens
        and worker.has_room(needs.prompt_tokens, ahead=needs.ahead)
    }
    able = [worker for worker in view.ready(Role.PREFILL) if _fits_prefill(needs, worker)]
    free = [worker for worker in able if view.is_free(worker, ahead=needs.ahead)]
    able = [worker for worker in free if not worker.linked.keys().isdisjoint(roomy)]
    if not able:
        return _wait_for_pair(needs, view, free, roomy)
    # For a retry, take a prefill worker with a peer that has not failed the request.
    good = {worker_id for worker_id, worker in roomy.items() if not _is_to_avoid(worker, needs)}
    useful = [worker for worker in able if not worker.linked.keys().isdisjoint(good)] or able
    prefill, why_prefill = _choose(useful, needs, view, Role.PREFILL, prefer=needs.prefer)
    peers = [worker for worker_id, worker in roomy.items() if worker_id in prefill.linked]
    decode, why_decode = _choose(peers, needs, view, Role.DECODE, source=prefill)
    return Placed(
        prefill.worker_id,
        decode.worker_id,
        f"prefill on {prefill.worker_id}: {why_prefill}; decode on {decode.worker_id}: {why_decode}, {decode.running} "
        f"running, {decode.waiting} waiting, {decode.room} blocks free for {decode.blocks_for(needs.prompt_tokens)}",
    )


def _wait_for_pair(needs: Needs, view: ClusterView, free: Sequence[WorkerView], roomy: dict[str, WorkerView]) -> Wait:
    error = unavailable(Mode.PD, view)
    if error is not None:
        return Wait(_first_clause(error), error)
    if not free:
        able = [worker for worker in view.ready(Role.PREFILL) if _fits_prefill(needs, worker)]
        return Wait(_backlog(able, view, "prefill "), short_of=Role.PREFILL)
    able = [worker for worker in view.ready(Role.DECODE) if needs.tokens <= worker.max_tokens]
    if not able:
        return Wait(f"no ready decode worker can hold {needs.tokens} tokens")
    if not roomy and all(worker.is_full for worker in able):
        return Wait(f"no decode worker has room: {_running(able)}", short_of=Role.DECODE)
    if not roomy:
        most = max(able, key=lambda worker: (worker.room - worker.blocks_for(needs.prompt_tokens), worker.worker_id))
        wanted = most.blocks_for(needs.prompt_tokens)
        return Wait(
            f"no decode worker has room: the prompt takes {wanted} blocks, {most.worker_id} has {most.room} free, "
            f"the most of {len(able)}",
            short_of=Role.DECODE,
        )
    return Wait("no free prefill worker is linked to a decode worker with room")


# --- helpers -----------------------------------------------------------------------------------------------------


def _choose(
    able: Sequence[WorkerView],
    needs: Needs,
    view: ClusterView,
    role: Role,
    *,
    prefer: str = "",
    source: WorkerView | None = None,
) -> tuple[WorkerView, str]:
    """Choose one of ``able``, which is not empty, for a role, and give the reason."""
    good = [worker for worker in able if not _is_to_avoid(worker, needs)]
    candidates = good or able
    for worker in candidates:
        if worker.worker_id == prefer:
            return worker, "the last attempt ran there, and its prefix cache holds the prompt"
    if len(candidates) == 1:
        worker, why = candidates[0], "the only one free"
    else:
        choose = policy(view.config.policy_of(role))
        worker, why = choose(Choice(candidates, needs, role, source, view.costs, view.config.slo))
    if not good:
        return worker, f"{why}, though its heartbeat is late" if worker.late else f"{why}, though it failed the request"
    avoided = len(able) - len(good)
    return worker, f"{why}, {avoided} avoided" if avoided else why


def _is_to_avoid(worker: WorkerView, needs: Needs) -> bool:
    return worker.late or worker.worker_id in needs.avoid


def _fits_prefill(needs: Needs, worker: WorkerView) -> bool:
    """Whether a prefill worker can hold the prompt and token 1."""
    return needs.prompt_tokens + 1 <= worker.max_tokens


def _backlog(able: Sequence[WorkerView], view: ClusterView, kind: str = "") -> str:
    if not able:
        return f"no ready {kind}worker can hold the request"
    if all(worker.is_full for worker in able):
        return f"no {kind}worker is free: {_running(able)}"
    least = min(able, key=lambda worker: (worker.prompt_tokens, worker.worker_id))
    return (
        f"no {kind}worker is free: {least.worker_id} has {least.prompt_tokens} prompt tokens to compute, the fewest of "
        f"{len(able)} (router.prefill_backlog_tokens: {view.config.prefill_backlog_tokens})"
    )


def _running(full: Sequence[WorkerView]) -> str:
    least = min(full, key=lambda worker: (worker.outstanding_requests, worker.worker_id))
    return (
        f"{least.worker_id} has {counted(least.outstanding_requests, 'request')}, the fewest of {len(full)} "
        f"(engine.max_num_seqs: {least.max_num_seqs})"
    )


def _census(view: ClusterView) -> str:
    if not view.workers:
        return "none has registered"
    return ", ".join(f"{sum(w.role is role for w in view.workers)} {role} registered" for role in Role)


def _first_clause(error: PdserveError) -> str:
    """The problem, without the advice that follows the first semicolon of our messages."""
    return str(error).partition(";")[0]
