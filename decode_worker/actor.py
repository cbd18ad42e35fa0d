"""The Ray actor around a decode worker: Ray places it, restarts it when its process dies, and ends it."""

from __future__ import annotations

import ray

from worker.process import ActorBody


@ray.remote
class DecodeWorkerActor(ActorBody):
    """Everything but Ray is in `worker.process` and below."""

    ray = ray
