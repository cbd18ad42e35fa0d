"""The policy ``least_tokens``."""

from __future__ import annotations

from collections.abc import Sequence

from router.needs import Needs
from router.policies.policy import Policy, least
from router.worker_view import WorkerView


class LeastTokens(Policy):
    """The worker with the fewest outstanding tokens."""

    name = "least_tokens"

    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """See `Policy.choose`."""
        worker, link = least(candidates, [worker.outstanding_tokens for worker in candidates], source)
        return worker, f"{worker.outstanding_tokens} outstanding tokens, the fewest of {len(candidates)}{link}"
