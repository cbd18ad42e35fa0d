"""A routing policy for tests that have to know where a request goes."""

from __future__ import annotations

from router.policies import Choice, Chosen


def last_name(choice: Choice) -> Chosen:
    """The worker whose name is the last one in the alphabet."""
    return max(choice.workers, key=lambda worker: worker.worker_id), "the last name"
