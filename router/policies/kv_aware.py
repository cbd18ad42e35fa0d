"""The policy ``kv_aware``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.core.worker import Role
from router.needs import Needs
from router.policies.policy import Policy, least
from router.worker_view import WorkerView

PREFILL_WEIGHT: Mapping[Role, int] = {Role.PREFILL: 4, Role.DECODE: 1}
"""How many blocks of running requests weigh as much as one block that is missing. On a prefill worker a missing block
is computed, which costs more than a step's attention to a block that is there. On a decode worker it is received: the
cost is then the number of blocks in use once the request is there."""


class KVAware(Policy):
    """The worker with the least cost: the blocks of prompts that it has to compute (those that wait there, and of this
    request those that are not cached), times `PREFILL_WEIGHT`, plus the blocks of its running requests."""

    name = "kv_aware"
    uses_prefixes = True

    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """See `Policy.choose`."""
        weight, wanted = PREFILL_WEIGHT[self.role], needs.prompt_tokens
        whole = candidates[0].blocks_for(wanted)  # linked workers have equal blocks
        costs = [weight * (whole + worker.waiting_blocks) + worker.active_blocks for worker in candidates]
        if cached := needs.cached:
            for index, worker in enumerate(candidates):
                if worker.worker_id in cached:
                    costs[index] -= weight * (whole - worker.blocks_for(needs.uncached(worker.worker_id)))
        worker, link = least(candidates, costs, source)
        return worker, (
            f"cost {min(costs)}, the least of {len(candidates)}: "
            f"{worker.blocks_for(needs.uncached(worker.worker_id))} of {worker.blocks_for(wanted)} blocks not cached, "
            f"{worker.waiting_blocks} waiting, {worker.active_blocks} active{link}"
        )
