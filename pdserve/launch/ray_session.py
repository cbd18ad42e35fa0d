"""The Ray a service runs on: one it starts for itself and takes down again, or one that is there already."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError

from core.errors import LaunchError
from pdserve.launch.leftovers import RAY_FOLDER_PREFIX, RAY_FOLDERS
from pdserve.launch.plan import Node

OBJECT_STORE_BYTES = 100 * 2**20
"""KV never travels through the object store; it holds next to nothing."""

_ALIVE_TIMEOUT_S = 3.0
_LISTENER_TIMEOUT_S = 10.0
_LISTENER_POLL_S = 0.25
_INIT_ERRORS = (OSError, RayError, RuntimeError, ValueError)


class RaySession:
    """Connects on `start`, undoes on `stop` exactly what `start` did. See `ray_environment` for what must come before
    this module is imported."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._temp_dir: Path | None = None
        self._gcs_address = ""

    @property
    def owned(self) -> bool:
        """Whether this session started the Ray it runs on."""
        return self._address == "local"

    @property
    def temp_dir(self) -> Path | None:
        """Where the Ray of our own keeps its files, while it runs."""
        return self._temp_dir

    def start(self, *, num_cpus: int | None = None, num_gpus: int | None = None) -> None:
        """Start or join Ray; LaunchError if it cannot be reached. ``num_cpus`` and ``num_gpus`` are for a Ray of our
        own (default: what the host has)."""
        if not self.owned:
            self._await_listener()
            try:
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
            except _INIT_ERRORS as error:
                raise LaunchError(
                    f"cluster.address: cannot join Ray at {self._address!r}: {error}; check `ray status`, and that "
                    "both sides have the same ~/.ray/auth_token (or RAY_AUTH_MODE=disabled)"
                ) from None
            self._gcs_address = ray.get_runtime_context().gcs_address
            return
        try:
            self._temp_dir = Path(tempfile.mkdtemp(prefix=RAY_FOLDER_PREFIX, dir=RAY_FOLDERS))
            ray.init(
                address="local",
                num_cpus=len(os.sched_getaffinity(0)) if num_cpus is None else num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self._temp_dir),
            )
        except _INIT_ERRORS as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise LaunchError(f"cannot start a Ray of our own (cluster.address: local): {why}") from None
        self._gcs_address = ray.get_runtime_context().gcs_address

    def nodes(self) -> list[Node]:
        """The hosts that are alive now, by address."""
        free = available_resources_per_node()
        nodes = [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
            for node in ray.nodes()
            if node["Alive"]
        ]
        return sorted(nodes, key=lambda node: (len(node.ip), node.ip))

    def is_alive(self) -> bool:
        """Whether its control service still listens. (Ray's own calls would wait a minute for it, then end the whole
        process.)"""
        return bool(self._gcs_address) and _listens(self._gcs_address) is None

    def _await_listener(self) -> None:
        """Ray would try for many minutes to reach an address that nobody listens at."""
        if not re.fullmatch(r"\S+:\d+", self._address):
            return
        deadline_s = time.monotonic() + _LISTENER_TIMEOUT_S
        while (obstacle := _listens(self._address)) is not None:
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"cluster.address: cannot join Ray at {self._address!r}: {obstacle}; start Ray there "
                    "(`ray start --head`), or name the address that `ray status` works with"
                )
            time.sleep(_LISTENER_POLL_S)

    def stop(self) -> None:
        """Leave; a Ray of our own ends, its files too."""
        if self.owned or self.is_alive():
            ray.shutdown()  # which ends the whole process if the other side is gone
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None


def _listens(address: str) -> OSError | None:
    """Whether something takes connections at ``host:port``: None, or what was in the way."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ALIVE_TIMEOUT_S):
            return None
    except OSError as error:
        return error


def one_line(error: BaseException) -> str:
    """The last line of what Ray says, which is the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
