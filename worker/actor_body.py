"""What both Ray actors are made of; Ray itself is known to the two `actor.py` files alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.core.errors import PdserveError, to_wire
from worker import messages
from worker.cores import claim_cores, leave_engine_cores, sharing_notes
from worker.request_table import Role
from worker.spec import WorkerSpec
from worker.worker_thread import WorkerThread

log = logging.getLogger(__name__)


class ActorBody:
    """A `WorkerThread`, and the answers to what the launcher asks of an actor. ``node`` is the address that Ray knows
    this host by. ``restarted``: Ray has started it again after a death, perhaps on another host, and nobody asks."""

    def __init__(
        self, spec: dict[str, Any], roles: Mapping[type[messages.Work], Role], *, node: str, restarted: bool
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        parsed, self._claim = claim_cores(WorkerSpec.from_wire(spec))
        parsed = replace(parsed, host=parsed.host or node, node=node)
        self._notes = sharing_notes(parsed, self._claim.others)
        for note in self._notes:
            log.warning("%s", note)
        leave_engine_cores(parsed)
        self._start_timeout_s = parsed.config.cluster.start_timeout_s
        self._worker = WorkerThread(parsed, roles, on_end=lambda: os._exit(1), restarted=restarted)

    def wait_ready(self) -> dict[str, Any]:
        """``{"notes": [what its user has to know]}`` once the engine is ready, or ``{"error": (kind, message)}``."""
        try:
            self._worker.wait_ready(self._start_timeout_s)
        except PdserveError as error:
            return {"error": to_wire(error)}
        return {"notes": self._notes}

    def stop(self) -> None:
        """End worker and engine, in order."""
        self._worker.stop()
