"""`python -m tests.told_gateway CONFIG_JSON REGISTRY_ADDRESS [OPERATOR_SOCKET]`: a gateway that is told the service's
members as a supervisor would tell it, by the file that the environment names."""

from __future__ import annotations

import json
import os
import threading
import time
from functools import partial
from pathlib import Path

import gateway.__main__
from gateway.gateway import Gateway
from gateway.gateway_thread import GatewayThread
from pdserve.core.worker import Role

MEMBERS_VARIABLE = "PDSERVE_TEST_MEMBERS"
LOOK_EVERY_S = 0.02


class ToldGateway(GatewayThread):
    """A gateway that follows the file. ``{"version": …, "members": {worker id: role}}`` is written by a rename."""

    def start(self) -> None:
        """See `GatewayThread.start`."""
        super().start()
        threading.Thread(target=self._follow, args=(Path(os.environ[MEMBERS_VARIABLE]),), daemon=True).start()

    def _follow(self, path: Path) -> None:
        version = -1
        while True:
            if path.exists() and (told := json.loads(path.read_text()))["version"] != version:
                version = told["version"]
                members = {worker_id: Role(role) for worker_id, role in told["members"].items()}
                self.ask(partial(Gateway.expect, members=members, version=version))
            time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    setattr(gateway.__main__, "GatewayThread", ToldGateway)  # noqa: B010 - an imported name
    gateway.__main__.main()
