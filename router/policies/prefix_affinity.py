"""The policy ``prefix_affinity``."""

from __future__ import annotations

from collections.abc import Sequence

from router.needs import Needs
from router.policies.policy import Policy, least
from router.worker_view import WorkerView

SKEW_TOKENS = 1024
SKEW_FACTOR = 2.0
"""The load is skewed if the worker with the prefix has more than `SKEW_FACTOR` times the outstanding tokens of the
least loaded one, plus `SKEW_TOKENS`. The factor alone would find any load skewed while another worker is idle; the
tokens alone would find a high load skewed that differs by a single request."""


class PrefixAffinity(Policy):
    """The worker that has the longest beginning of the prompt cached; if none has any, or that one has far more to do
    than others, the one with the fewest outstanding tokens."""

    name = "prefix_affinity"
    uses_prefixes = True

    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """See `Policy.choose`."""
        cached = needs.cached
        longest = max([cached.get(worker.worker_id, 0) for worker in candidates]) if cached else 0
        fewest, link = least(candidates, [worker.outstanding_tokens for worker in candidates], source)
        why = f"{fewest.outstanding_tokens} outstanding tokens, the fewest of {len(candidates)}{link}"
        if not longest:
            return fewest, f"no prefix cached; {why}"
        holders = [worker for worker in candidates if cached.get(worker.worker_id, 0) == longest]
        worker, link = least(holders, [worker.outstanding_tokens for worker in holders], source)
        if worker.outstanding_tokens > SKEW_FACTOR * fewest.outstanding_tokens + SKEW_TOKENS:
            return fewest, (
                f"the load is skewed: {worker.worker_id} has {longest} tokens cached, but {worker.outstanding_tokens} "
                f"outstanding; {why}"
            )
        return worker, f"{longest} of {needs.prompt_tokens} prompt tokens cached, the most of {len(candidates)}{link}"
