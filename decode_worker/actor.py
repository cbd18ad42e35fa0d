"""The Ray actor around a decode worker: Ray places it, restarts it when its process dies, and ends it."""

from __future__ import annotations

from typing import Any

import ray

from decode_worker.receive import ROLES
from worker.process import ActorBody


@ray.remote
class DecodeWorkerActor(ActorBody):
    """Everything but Ray is in `worker.process` and below."""

    def __init__(self, spec: dict[str, Any], secret: str) -> None:
        super().__init__(
            spec,
            secret,
            ROLES,
            node=ray.util.get_node_ip_address(),
            restarted=ray.get_runtime_context().was_current_actor_reconstructed,
        )
