"""The Ray actor around a decode worker: it holds a `WorkerHost` and nothing else."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from core.errors import PdserveError, to_wire
from decode_worker.flow import FLOWS
from worker.host import WorkerHost
from worker.spec import WorkerSpec


@ray.remote
class DecodeWorkerActor:
    """Ray places it, restarts it when its process dies, and ends it; everything else is the worker's own business."""

    def __init__(self, spec: dict[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        parsed = WorkerSpec.from_wire(spec)
        self._start_timeout_s = parsed.config.cluster.start_timeout_s
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._host = WorkerHost(parsed, FLOWS, on_end=lambda: os._exit(1), restarted=restarted)

    def wait_ready(self) -> dict[str, Any]:
        """``{"pid": …, "engine_pid": …}`` once the engine is ready, or ``{"error": (kind, message)}``."""
        try:
            info = self._host.wait_ready(self._start_timeout_s)
        except PdserveError as error:
            return {"error": to_wire(error)}
        return {"pid": info.pid, "engine_pid": info.engine_pid, "device": info.device, "cores": info.cores}

    def stop(self) -> None:
        """End worker and engine, in order."""
        self._host.stop()
