"""Where a request goes: a function of what it needs and of what is known of the workers, with the reason in words.

Everything here is a plain value. `place` has no clock, no state and no side effects: the same arguments give the same
decision, so a test, a simulation or a person who reads a log can repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from pdserve.core.errors import CapacityExceeded, LayoutMismatch, NotReady, PdserveError
from pdserve.core.request import Mode
from pdserve.core.worker import Role

WaitMode = Literal[Mode.PD, Mode.COLOCATED, Mode.AUTO]
"""How a request is to run; ``auto``: apart where prefill and decode workers are ready, else on any ready worker."""


class Needs(msgspec.Struct, frozen=True):
    """What a request asks of its workers. ``prompt_tokens`` are to be computed first, ``output_tokens`` at most after
    them. ``avoid`` are workers that failed it; ``prefer`` is the prefill worker of the attempt before, whose cache
    holds what that has computed (empty: there is none)."""

    mode: WaitMode
    prompt_tokens: int
    output_tokens: int
    avoid: frozenset[str] = frozenset()
    prefer: str = ""

    @property
    def tokens(self) -> int:
        """Prompt and outputs."""
        return self.prompt_tokens + self.output_tokens


class WorkerView(msgspec.Struct, frozen=True):
    """What a decision may depend on of one worker.

    Capacity: ``block_size`` tokens in each of ``num_blocks`` blocks, ``max_tokens`` in one request. Its last heartbeat:
    ``running`` and ``waiting`` requests, ``free_blocks``. The router's own accounts: ``blocks_placed`` more blocks have
    been placed there since that heartbeat (negative: given back), ``outstanding_tokens`` are to be computed for
    ``outstanding_requests``, ``prompt_tokens`` of them prompts without a first token. ``live``: not lost; ``ready``:
    requests may go there; ``late``: its heartbeat is overdue. ``linked`` names the decode workers that a prefill worker
    can send KV to, ``link_errors`` say why it cannot to others. ``last_used`` grows with every choice; 0: never chosen.
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
        """Blocks that the KV of so many tokens fills."""
        return -(-tokens // self.block_size)

    @property
    def room(self) -> int:
        """Blocks that are free now."""
        return min(self.free_blocks - self.blocks_placed, self.num_blocks)

    def has_room(self, tokens: int) -> bool:
        """Whether it can allocate the blocks of so many tokens now. A worker without requests always can."""
        return not self.outstanding_requests or self.blocks_for(tokens) <= self.room


class ClusterView(msgspec.Struct, frozen=True):
    """All registered workers, those lost lately too, and the router's settings: ``policy`` is ``router.policy``,
    ``prefill_backlog_tokens`` the prompt tokens at which a worker gets no further prompt."""

    workers: tuple[WorkerView, ...]
    policy: str
    prefill_backlog_tokens: int

    def ready(self, role: Role | None = None) -> list[WorkerView]:
        """Ready workers, of one role or all."""
        return [worker for worker in self.workers if worker.ready and (role is None or worker.role is role)]

    def is_free(self, worker: WorkerView) -> bool:
        """Whether another prompt may be sent there: none waits, or fewer tokens than the backlog allows."""
        return worker.prompt_tokens == 0 or worker.prompt_tokens < self.prefill_backlog_tokens


class Placed(msgspec.Struct, frozen=True):
    """It goes there. ``decode`` is None when one worker does both."""

    prefill: str
    decode: str | None
    reason: str


class Wait(msgspec.Struct, frozen=True):
    """No worker can take it now. ``error`` is set when none could even if all were idle: what keeps them from it."""

    reason: str
    error: NotReady | LayoutMismatch | None = None


class Never(msgspec.Struct, frozen=True):
    """No worker that is there could ever hold it."""

    error: CapacityExceeded


Decision = Placed | Wait | Never


def place(needs: Needs, view: ClusterView) -> Decision:
    """Choose the worker or the pair of workers for a request, or say what it has to wait for."""
    if (too_large := _capacity_error(needs, needs.mode, view)) is not None:
        return Never(too_large)
    if needs.mode is Mode.COLOCATED:
        return _place_one(needs, view, "mode colocated")
    decision = _place_pair(needs, view)
    if needs.mode is Mode.AUTO and isinstance(decision, Wait):
        apart = decision.error or _capacity_error(needs, Mode.PD, view)
        # Workers that differ in model or layout would answer differently.
        if apart is not None and not isinstance(apart, LayoutMismatch):
            return _place_one(needs, view, f"mode auto: {_first_clause(apart)}")
    return decision


def unavailable(mode: Mode, view: ClusterView) -> NotReady | LayoutMismatch | None:
    """Why no request of ``mode`` can run now, however long it waits for a free worker; None: one can. For mode ``auto``
    any ready worker is enough, unless prefill and decode workers differ."""
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
    """Why no worker that is there could ever hold the request in this mode; None: one could (or none is there)."""
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
        f"prompt and max_tokens: {needs.prompt_tokens} + {needs.output_tokens} tokens exceed what any worker's KV pool "
        f"holds ({most} tokens at most); ask for less, or raise engine.kv_memory_mb"
    )


# --- one worker for both ---------------------------------------------------------------------------------------------


def _place_one(needs: Needs, view: ClusterView, because: str) -> Placed | Wait:
    able = [worker for worker in view.workers if worker.ready and needs.tokens <= worker.max_tokens]
    free = [worker for worker in able if view.is_free(worker)]
    if not free:
        error = unavailable(Mode.COLOCATED, view)
        return Wait(f"{because}; {_first_clause(error) if error else _backlog(able, view)}", error)
    # Whatever the policy: a worker of either role is taken only as far as its own work leaves it time.
    worker, why = _choose(free, needs, "least_outstanding_tokens")
    return Placed(worker.worker_id, None, f"{because}; both on {worker.worker_id}: {why}")


# --- a pair ----------------------------------------------------------------------------------------------------------


def _place_pair(needs: Needs, view: ClusterView) -> Placed | Wait:
    """A prefill worker and a decode worker that are linked. The decode worker must have room for the prompt's KV now:
    else the prefill worker would hold it meanwhile."""
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
    # A prefill worker is of use to a retry only if it has a peer that has not failed the request.
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


# --- small parts -----------------------------------------------------------------------------------------------------


def _round_robin(worker: WorkerView) -> tuple[Any, ...]:
    """The one whose turn was longest ago; those without one by name."""
    return worker.last_used, worker.worker_id


def _least_outstanding_tokens(worker: WorkerView) -> tuple[Any, ...]:
    """The one with the fewest outstanding tokens; among equals the one whose turn was longest ago."""
    return worker.outstanding_tokens, worker.last_used, worker.worker_id


_POLICIES: dict[str, Callable[[WorkerView], tuple[Any, ...]]] = {
    "round_robin": _round_robin,
    "least_outstanding_tokens": _least_outstanding_tokens,
}
"""Of the workers that could take a request, the one with the least key does."""


def _choose(able: Sequence[WorkerView], needs: Needs, policy: str, prefer: str = "") -> tuple[WorkerView, str]:
    """One of ``able`` (at least one), and why."""
    good = [worker for worker in able if not _is_to_avoid(worker, needs)]
    candidates = good or able
    for worker in candidates:
        if worker.worker_id == prefer:
            return worker, "the attempt before ran there, and its cache holds the prompt"
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
    """Whether a prefill worker can hold the request: the prompt and token 1."""
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
    """What is wrong; our messages tell what to do about it after the first semicolon."""
    return str(error).partition(";")[0]
