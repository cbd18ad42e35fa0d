"""A worker's place in its service: the role that the gateways give it, and whether it has to end."""

from __future__ import annotations

import asyncio
import logging

from contract.control import BeatAnswer
from pdserve.core.errors import WorkerLost
from pdserve.core.worker import Role

log = logging.getLogger(__name__)


class Membership:
    """Of a worker that starts with ``role``. Of several gateways, the one that knows the latest version of the
    service's members gives the role."""

    def __init__(self, worker_id: str, role: Role) -> None:
        self.role = role
        self.superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has `WorkerLost` once the worker has to end: another worker has taken its name, it was retired, or it belongs
        to another service."""
        self._worker_id = worker_id
        self._version = 0

    def hear(self, answer: BeatAnswer) -> bool:
        """Take a gateway's answer to a heartbeat. Returns whether the worker has another role now."""
        if answer.superseded and not self.superseded.done():
            self.superseded.set_exception(WorkerLost(f"worker {self._worker_id} was replaced or retired, and ends"))
        if answer.role is None or answer.version <= self._version:
            return False
        self._version = answer.version
        if answer.role is self.role:
            return False
        log.info("%s: %s worker from now on, instead of %s", self._worker_id, answer.role, self.role)
        self.role = answer.role
        return True
