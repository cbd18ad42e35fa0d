"""The policy ``random``."""

from __future__ import annotations

from collections.abc import Sequence

from router.needs import Needs
from router.policies.policy import Policy
from router.policies.random_draw import draw
from router.worker_view import WorkerView


class Random(Policy):
    """Any worker, all equally likely."""

    name = "random"

    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """See `Policy.choose`."""
        in_order = sorted(candidates, key=lambda worker: worker.worker_id)
        return in_order[draw(needs, self.role) % len(in_order)], f"drawn from {len(candidates)}"
