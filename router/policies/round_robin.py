"""The policy ``round_robin``."""

from __future__ import annotations

from collections.abc import Sequence

from router.needs import Needs
from router.policies.policy import Policy, least
from router.worker_view import WorkerView


class RoundRobin(Policy):
    """The worker that was chosen longest ago."""

    name = "round_robin"

    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """See `Policy.choose`."""
        worker, link = least(candidates, [worker.last_used for worker in candidates], source)
        return worker, f"its turn among {len(candidates)}{link}"
