"""The policy ``power_of_two``."""

from __future__ import annotations

from collections.abc import Sequence

from router.needs import Needs
from router.policies.policy import Policy, least
from router.policies.random_draw import draw
from router.worker_view import WorkerView


class PowerOfTwo(Policy):
    """Of two workers that are drawn, the one with fewer outstanding tokens. Where several gateways see the same load
    reports, this keeps them from choosing the same worker."""

    name = "power_of_two"

    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """See `Policy.choose`."""
        in_order = sorted(candidates, key=lambda worker: worker.worker_id)
        number, count = draw(needs, self.role), len(in_order)
        first = number % count
        second = (first + 1 + (number >> 32) % (count - 1)) % count
        pair = in_order[first], in_order[second]
        worker, link = least(pair, [each.outstanding_tokens for each in pair], source)
        other = pair[1] if worker is pair[0] else pair[0]
        return worker, (
            f"{worker.outstanding_tokens} outstanding tokens, {other.worker_id} has {other.outstanding_tokens}; "
            f"drawn from {count}{link}"
        )
