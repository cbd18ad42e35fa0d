"""The Ray that a service runs on: one of its own (`ops.launch.ray_head`), or one that it joins."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError

from ops.launch.discovery import find_ray
from ops.launch.plan import Node
from ops.launch.ray_head import RayHead
from pdserve.core.address import split_address
from pdserve.core.errors import LaunchError

log = logging.getLogger(__name__)

_ALIVE_TIMEOUT_S = 3.0
_ANY_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_LISTENER_TIMEOUT_S = 10.0
_LISTENER_POLL_S = 0.25
_INIT_POLL_S = 0.05
_INIT_END_S = 15.0
"""How long a cancelled start of Ray may go on before it is ended by force."""
_JOIN_HINT = (
    "check `ray status`, and that both sides have the same ~/.ray/auth_token (or RAY_AUTH_MODE=disabled on both)"
)
_INIT_ERRORS = (OSError, RayError, RuntimeError, ValueError)


class RaySession:
    """Connects to the Ray at ``address``, or to that of ``head``, in `start`, and undoes that in `stop`, which also
    ends ``head``. Call `RayHead.begin` or `discovery.prepare_environment` before this module is imported."""

    def __init__(self, address: str, head: RayHead | None = None) -> None:
        self._address, self._head = address, head
        self._gcs_address = ""
        self._raylet_address = ""
        self._connected = False

    @property
    def owned(self) -> bool:
        """Whether the Ray is the service's own."""
        return self._head is not None

    @property
    def address(self) -> str:
        """Address of Ray's control service, once this process is connected."""
        return self._gcs_address

    def start(
        self,
        *,
        check: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """Connect to Ray; LaunchError if that fails. ``check`` is called repeatedly and may raise to end the wait.
        ``report`` gets the address that is joined, and the seconds that it took."""
        address, began_s = self._address, time.monotonic()
        if self._head is not None:
            address, began_s = self._head.wait_started(check), self._head.began_s
        else:
            address = find_ray() if address == "auto" else address
            report(f"joining Ray at {address}")
        self._await_listener(address, check)
        try:
            self._init(address, check)
        except _INIT_ERRORS as error:
            hint = "" if self.owned else f"; {_JOIN_HINT}"
            raise LaunchError(f"cluster.address: cannot join Ray at {address!r}: {error}{hint}") from None
        here = ray.get_runtime_context()
        self._gcs_address = here.gcs_address
        for node in ray.nodes():
            if node["NodeID"] == here.get_node_id():
                self._raylet_address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        report(f"{'started' if self.owned else 'joined'} Ray ({time.monotonic() - began_s:.1f} s)")

    def _init(self, address: str, check: Callable[[], None]) -> None:
        """Run `ray.init` on a thread of its own. On the main thread Ray would replace the signal handlers with one that
        raises anywhere."""
        failed: list[BaseException] = []
        done = threading.Event()

        def init() -> None:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                failed.append(error)
            done.set()

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

    def is_open(self) -> bool:
        """Whether Ray's control service answers calls without a token. Every host and user that reaches it can
        then run programs as the users that Ray runs as."""
        with grpc.insecure_channel(self._gcs_address, [("grpc.enable_http_proxy", 0)]) as channel:
            try:
                call: Any = channel.unary_unary(_ANY_CALL)  # its type is that of calls with messages
                call(b"", timeout=_ALIVE_TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    log.warning("cannot find out whether Ray asks for a token: %s", error.details())
                return False
        return True

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
        self._gcs_address = self._raylet_address = ""
        if self._head is not None:
            self._head.stop()


def _listens(address: str) -> OSError | None:
    """None if ``host:port`` accepts connections, else the error."""
    try:
        with socket.create_connection(split_address(address), _ALIVE_TIMEOUT_S):
            return None
    except OSError as error:
        return error
