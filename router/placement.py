"""Chooses the workers for a request, and explains the choice.

`place` is a pure function of plain values: it has no clock, no state and no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from pdserve.core.errors import CapacityExceeded, LayoutMismatch, NotReady, PdserveError
from pdserve.core.request import Mode
from pdserve.core.worker import Role

WaitMode = Literal[Mode.PD, Mode.COLOCATED, Mode.AUTO]
"""Mode of a request. ``auto`` is ``pd`` if prefill and decode workers are ready, else ``colocated``."""


class Needs(msgspec.Struct, frozen=True):
    """What a request needs from its workers.

    ``prompt_tokens``: tokens to compute first.
    ``output_tokens``: the most tokens to sample after them.
    ``avoid``: workers that failed the request.
    ``prefer``: prefill worker of the last attempt, whose prefix cache holds the prompt (empty: none).
    """

    mode: WaitMode
    prompt_tokens: int
    output_tokens: int
    avoid: frozenset[str] = frozenset()
    prefer: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of prompt and outputs."""
        return self.prompt_tokens + self.output_tokens


class WorkerView(msgspec.Struct, frozen=True):
    """One worker, as `place` sees it.

    ``block_size``, ``num_blocks``, ``max_tokens``: tokens per block, blocks in the pool, tokens of one request.
    ``running``, ``waiting``, ``free_blocks``: requests and blocks by its last heartbeat.
    ``blocks_placed``: blocks that the router has placed there since that heartbeat (negative: given back).
    ``outstanding_tokens``, ``outstanding_requests``: what it has to compute, by the router's count.
    ``prompt_tokens``: outstanding tokens of prompts without a first token.
    ``live``: not lost. ``ready``: takes requests. ``late``: its heartbeat is overdue.
    ``linked``: the decode workers that a prefill worker has links to; ``link_errors``: why it has none to others.
    ``last_used``: grows with every choice; 0 if it was never chosen.
    """

    worker_id: str
    role: Role
    block_size: int
    num_blocks: int
    max_tokens: int
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    blocks_placed: int = 0
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    prompt_tokens: int = 0
    live: bool = True
    ready: bool = True
    late: bool = False
    linked: frozenset[str] = frozenset()
    link_errors: tuple[PdserveError, ...] = ()
    last_used: int = 0

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for the KV of ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    @property
    def room(self) -> int:
        """Number of free blocks, less those placed since the last heartbeat."""
        return min(self.free_blocks - self.blocks_placed, self.num_blocks)

    def has_room(self, tokens: int) -> bool:
        """Whether it can allocate blocks for ``tokens`` tokens now. A worker without requests always can."""
        return not self.outstanding_requests or self.blocks_for(tokens) <= self.room


class ClusterView(msgspec.Struct, frozen=True):
    """All registered workers, including recently lost ones, and settings of the router.

    ``policy`` is ``router.policy``. A worker with ``prefill_backlog_tokens`` prompt tokens gets no further prompt.
    """

    workers: tuple[WorkerView, ...]
    policy: str
    prefill_backlog_tokens: int

    def ready(self, role: Role | None = None) -> list[WorkerView]:
        """Ready workers of one role, or of all."""
        return [worker for worker in self.workers if worker.ready and (role is None or worker.role is role)]

    def is_free(self, worker: WorkerView) -> bool:
        """Whether the worker may get another prompt: none waits there, or fewer tokens than the backlog allows."""
        return worker.prompt_tokens == 0 or worker.prompt_tokens < self.prefill_backlog_tokens


class Placed(msgspec.Struct, frozen=True):
    """The request goes to these workers. ``decode`` is None if one worker does both."""

    prefill: str
    decode: str | None
    reason: str


class Wait(msgspec.Struct, frozen=True):
    """No worker can take the request now. ``error`` is set if none could even if all were idle."""

    reason: str
    error: NotReady | LayoutMismatch | None = None


class Never(msgspec.Struct, frozen=True):
    """No registered worker can ever hold the request."""

    error: CapacityExceeded


Decision = Placed | Wait | Never


def place(needs: Needs, view: ClusterView) -> Decision:
    """Choose a worker or a pair of workers for a request, or explain why it has to wait."""
    if (too_large := _capacity_error(needs, needs.mode, view)) is not None:
        return Never(too_large)
    if needs.mode is Mode.COLOCATED:
        return _place_one(needs, view, "mode colocated")
    decision = _place_pair(needs, view)
    if needs.mode is Mode.AUTO and isinstance(decision, Wait):
        apart = decision.error or _capacity_error(needs, Mode.PD, view)
        # Workers with different models or layouts would give different answers.
        if apart is not None and not isinstance(apart, LayoutMismatch):
            return _place_one(needs, view, f"mode auto: {_first_clause(apart)}")
    return decision


def unavailable(mode: Mode, view: ClusterView) -> NotReady | LayoutMismatch | None:
    """Why no request of ``mode`` can run even if all workers were free, or None. Mode ``auto`` needs any ready worker,
    but fails if prefill and decode workers have different layouts."""
    any_ready = any(worker.ready for worker in view.workers)
    if mode is not Mode.PD and not any_ready:
        return NotReady(f"no worker is ready ({_census(view)}); try again")
    if mode is Mode.COLOCATED:
        return None
    error = _no_pair(view, any_ready)
    return error if mode is Mode.PD or isinstance(error, LayoutMismatch) else None


def _no_pair(view: ClusterView, any_ready: bool) -> NotReady | LayoutMismatch | None:
    for role in Role:
        if not view.ready(role):
            hint = "; modes auto and colocated need none" if any_ready else ""
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
    able = [worker for worker in view.workers if worker.ready and needs.tokens <= worker.max_tokens]
    free = [worker for worker in able if view.is_free(worker)]
    if not free:
        error = unavailable(Mode.COLOCATED, view)
        return Wait(f"{because}; {_first_clause(error) if error else _backlog(able, view)}", error)
    # Regardless of the policy, so that colocated requests use the spare time of workers of either role.
    worker, why = _choose(free, needs, "least_outstanding_tokens")
    return Placed(worker.worker_id, None, f"{because}; both on {worker.worker_id}: {why}")


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
        and worker.has_room(needs.prompt_tokens)
    }
    free = [worker for worker in view.ready(Role.PREFILL) if view.is_free(worker) and _fits_prefill(needs, worker)]
    able = [worker for worker in free if not worker.linked.isdisjoint(roomy)]
    if not able:
        return _wait_for_pair(needs, view, free, roomy)
    # For a retry, take a prefill worker with a peer that has not failed the request.
    good = {worker_id for worker_id, worker in roomy.items() if not _is_to_avoid(worker, needs)}
    useful = [worker for worker in able if not worker.linked.isdisjoint(good)] or able
    prefill, why_prefill = _choose(useful, needs, view.policy, needs.prefer)
    peers = [roomy[worker_id] for worker_id in prefill.linked if worker_id in roomy]
    decode, why_decode = _choose(peers, needs, view.policy)
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
        return Wait(_backlog(able, view, "prefill "))
    able = [worker for worker in view.ready(Role.DECODE) if needs.tokens <= worker.max_tokens]
    if not able:
        return Wait(f"no ready decode worker can hold {needs.tokens} tokens")
    if not roomy:
        most = max(able, key=lambda worker: (worker.room - worker.blocks_for(needs.prompt_tokens), worker.worker_id))
        wanted = most.blocks_for(needs.prompt_tokens)
        return Wait(
            f"no decode worker has room: the prompt takes {wanted} blocks, {most.worker_id} has {most.room} free, "
            f"the most of {len(able)}"
        )
    return Wait("no free prefill worker is linked to a decode worker with room")


# --- helpers -----------------------------------------------------------------------------------------------------


def _round_robin(worker: WorkerView) -> tuple[Any, ...]:
    """The worker that was chosen longest ago; unused workers by name."""
    return worker.last_used, worker.worker_id


def _least_outstanding_tokens(worker: WorkerView) -> tuple[Any, ...]:
    """The worker with the fewest outstanding tokens; among equals the one that was chosen longest ago."""
    return worker.outstanding_tokens, worker.last_used, worker.worker_id


_POLICIES: dict[str, Callable[[WorkerView], tuple[Any, ...]]] = {
    "round_robin": _round_robin,
    "least_outstanding_tokens": _least_outstanding_tokens,
}
"""A policy chooses the worker with the smallest key."""


def _choose(able: Sequence[WorkerView], needs: Needs, policy: str, prefer: str = "") -> tuple[WorkerView, str]:
    """Choose one of ``able``, which is not empty, and give the reason."""
    good = [worker for worker in able if not _is_to_avoid(worker, needs)]
    candidates = good or able
    for worker in candidates:
        if worker.worker_id == prefer:
            return worker, "the last attempt ran there, and its prefix cache holds the prompt"
    worker = min(candidates, key=_POLICIES[policy])
    if len(candidates) == 1:
        why = "the only one free"
    elif policy == "round_robin":
        why = f"its turn among {len(candidates)}"
    else:
        why = f"{worker.outstanding_tokens} outstanding tokens, the fewest of {len(candidates)}"
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
    least = min(able, key=lambda worker: (worker.prompt_tokens, worker.worker_id))
    return (
        f"no {kind}worker is free: {least.worker_id} has {least.prompt_tokens} prompt tokens to compute, the fewest of "
        f"{len(able)} (router.prefill_backlog_tokens: {view.prefill_backlog_tokens})"
    )


def _census(view: ClusterView) -> str:
    if not view.workers:
        return "none has registered"
    return ", ".join(f"{sum(w.role is role for w in view.workers)} {role} registered" for role in Role)


def _first_clause(error: PdserveError) -> str:
    """The problem, without the advice that follows the first semicolon of our messages."""
    return str(error).partition(";")[0]
