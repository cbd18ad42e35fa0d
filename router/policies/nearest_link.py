"""The policy ``nearest_link``."""

from __future__ import annotations

from collections.abc import Sequence

from router.needs import Needs
from router.policies.policy import Policy, least, nearest
from router.worker_view import WorkerView


class NearestLink(Policy):
    """Of the decode workers on the prefill worker's host, or of all if none is there, those with the fastest links; of
    these the one with the fewest outstanding tokens. Others are chosen when the near ones have no room. Without a
    source it chooses as ``least_tokens`` does."""

    name = "nearest_link"

    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """See `Policy.choose`."""
        close, link = (candidates, "") if source is None else nearest(candidates, source)
        if link and len(close) == 1:
            return close[0], f"the only one{link.removeprefix(',')}"
        worker, _ = least(close, [worker.outstanding_tokens for worker in close])
        return worker, f"{worker.outstanding_tokens} outstanding tokens, the fewest of {len(close)}{link}"
