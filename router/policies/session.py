"""The policy ``session``."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.needs import Needs
from router.policies.least_tokens import LeastTokens
from router.policies.policy import Policy
from router.worker_view import WorkerView


class Session(Policy):
    """The same worker for all requests of a session, by rendezvous hashing: each worker's hash with the session id is
    its rank, and the highest wins. A worker that comes or goes changes only the sessions that it gets or had."""

    name = "session"

    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """See `Policy.choose`."""
        if not needs.session:
            worker, why = LeastTokens(self.role).choose(candidates, needs, source)
            return worker, f"no session id; {why}"
        session = needs.session.encode()

        def rank(worker: WorkerView) -> tuple[int, str]:
            return xxhash.xxh3_64_intdigest(worker.worker_id.encode() + b"/" + session), worker.worker_id

        return max(candidates, key=rank), f"that of the session among {len(candidates)}"
