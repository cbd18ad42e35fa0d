"""The Ray that a service runs on: one that it starts and ends itself, or one that it joins."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError

from ops.launch.discovery import find_ray
from ops.launch.leftovers import RAY_FOLDER_PREFIX, RAY_FOLDERS, clear_leftovers
from ops.launch.plan import Node
from pdserve.core.address import split_address
from pdserve.core.errors import LaunchError, PdserveError

OBJECT_STORE_BYTES = 100 * 2**20
"""Small, because KV does not travel through the object store."""

_ALIVE_TIMEOUT_S = 3.0
_LISTENER_TIMEOUT_S = 10.0
_LISTENER_POLL_S = 0.25
_INIT_POLL_S = 0.05
_INIT_END_S = 15.0
"""How long a cancelled start of Ray may go on before it is ended by force."""
_INIT_ERRORS = (OSError, RayError, RuntimeError, ValueError)


class RaySession:
    """Joins or starts Ray in `start`, and undoes that in `stop`. `discovery.prepare_environment` must be called before
    this module is imported."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._gcs_address = ""
        self._raylet_address = ""
        self._connected = False
        self._left = threading.Event()
        self.folder = Path(RAY_FOLDERS, f"{RAY_FOLDER_PREFIX}{secrets.token_hex(4)}") if self.owned else None
        """The folder of a Ray of our own. Chosen before it is created, so that the state file can name it first."""

    @property
    def owned(self) -> bool:
        """Whether this session starts its own Ray."""
        return self._address == "local"

    @property
    def address(self) -> str:
        """Address of Ray's control service, once it is running."""
        return self._gcs_address

    def start(
        self,
        *,
        check: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """Start or join Ray; LaunchError if that fails. ``check`` is called repeatedly and may raise to end the wait.
        ``report`` gets the address that is joined, if the configuration leaves it open."""
        if self.folder is None:
            address = self._address
            if address == "auto":
                address = find_ray()
                report(f"joining Ray at {address}")
            self._await_listener(address, check)
            try:
                self._init(check, address=address)
            except _INIT_ERRORS as error:
                raise LaunchError(
                    f"cluster.address: cannot join Ray at {address!r}: {error}; check `ray status`, and that "
                    "both sides have the same ~/.ray/auth_token (or RAY_AUTH_MODE=disabled)"
                ) from None
        else:
            try:
                self.folder.mkdir(mode=0o700)
                self._init(
                    check,
                    address="local",
                    num_cpus=len(os.sched_getaffinity(0)),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=str(self.folder),
                )
            except PdserveError:
                raise
            except Exception as error:  # noqa: BLE001 - Ray raises a plain Exception if its processes start too slowly
                why = " ".join(str(error).split()) or type(error).__name__
                raise LaunchError(f"cannot start a Ray of our own (cluster.address: local): {why}") from None
        here = ray.get_runtime_context()
        self._gcs_address = here.gcs_address
        for node in ray.nodes():
            if node["NodeID"] == here.get_node_id():
                self._raylet_address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"

    def _init(self, check: Callable[[], None], **options: Any) -> None:
        """Run `ray.init` on a thread that lives until `stop`. On the main thread Ray would replace the signal handlers
        with one that raises anywhere, and Linux ends Ray's processes when the *thread* that started them ends."""
        failed: list[BaseException] = []
        done, left = threading.Event(), self._left

        def init() -> None:
            try:
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                failed.append(error)
            done.set()
            left.wait()

        threading.Thread(target=init, name="ray", daemon=True).start()
        while not done.wait(_INIT_POLL_S):
            try:
                check()
            except BaseException:
                self._connected = done.wait(_INIT_END_S) and not failed  # ray.init cannot be interrupted
                raise
        if failed:
            raise failed[0]
        self._connected = True

    def nodes(self) -> list[Node]:
        """The nodes that are alive, by address."""
        free = available_resources_per_node()
        nodes = [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
            for node in ray.nodes()
            if node["Alive"]
        ]
        return sorted(nodes, key=lambda node: (len(node.ip), node.ip))

    def is_alive(self) -> bool:
        """Whether Ray's control service still listens. Ray's own calls would wait a minute for it, then end the whole
        process."""
        return bool(self._gcs_address) and _listens(self._gcs_address) is None

    def trouble(self) -> str:
        """Which part of Ray is gone: its control service, or this node's raylet, without which Ray starts no workers
        here. Empty if both are running."""
        for what, address in (("control service (GCS)", self._gcs_address), ("raylet", self._raylet_address)):
            if address and (obstacle := _listens(address)) is not None:
                return f"Ray's {what} at {address} is gone ({obstacle.strerror or obstacle})"
        return ""

    def _await_listener(self, address: str, check: Callable[[], None]) -> None:
        """Wait for a listener at ``address``, because Ray itself would retry for many minutes."""
        if not re.fullmatch(r"\S+:\d+", address):
            return
        deadline_s = time.monotonic() + _LISTENER_TIMEOUT_S
        while (obstacle := _listens(address)) is not None:
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"cluster.address: cannot join Ray at {address!r}: {obstacle}; start Ray there "
                    "(`ray start --head`), or name the address that `ray status` works with"
                )
            check()
            time.sleep(_LISTENER_POLL_S)

    def stop(self) -> None:
        """Leave Ray; one of our own ends with all its processes and files. After a failure of Ray its own shutdown is
        not used, because it would end this process; this process cannot join or start a Ray again then."""
        if self._connected and not self.trouble():
            ray.shutdown()
        self._connected = False
        self._left.set()
        self._gcs_address = self._raylet_address = ""
        if self.folder is not None:
            clear_leftovers(str(self.folder))


def _listens(address: str) -> OSError | None:
    """None if ``host:port`` accepts connections, else the error."""
    try:
        with socket.create_connection(split_address(address), _ALIVE_TIMEOUT_S):
            return None
    except OSError as error:
        return error


def one_line(error: BaseException) -> str:
    """The last line of a Ray error, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
