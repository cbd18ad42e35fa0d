"""The Ray actor around a prefill worker: Ray places it, restarts it when its process dies, and ends it."""

from __future__ import annotations

import ray

from worker.process import ActorBody


@ray.remote
class PrefillWorkerActor(ActorBody):
    """Everything but Ray is in `worker.process` and below."""

    ray = ray
