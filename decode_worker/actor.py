"""The Ray actor around a decode worker: Ray places it, restarts it when its process dies, and ends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from worker import messages
from worker.process import ActorBody
from worker.request_table import Handler


@ray.remote
class DecodeWorkerActor(ActorBody):
    """Everything but Ray is in `worker.process` and below. ``handlers`` serve all kinds of requests, so that the worker
    can take the other role."""

    def __init__(self, spec: dict[str, Any], secret: str, handlers: Mapping[type[messages.Work], Handler]) -> None:
        super().__init__(
            spec,
            secret,
            handlers,
            node=ray.util.get_node_ip_address(),
            restarted=ray.get_runtime_context().was_current_actor_reconstructed,
        )
