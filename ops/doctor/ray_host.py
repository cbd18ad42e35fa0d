"""The nodes of a Ray that is there already: probes are actors. See `ops.launch.ray_environment` for what must come
before this module is imported."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ops.doctor.probe_actor import ProbeActor
from ops.doctor.probe_host import ProbeHandle
from ops.launch.plan import Node
from ops.launch.ray_session import RaySession, one_line
from pdserve.core.errors import DeadlineExceeded, LaunchError, PdserveError, WorkerLost, from_wire

_SERVICE = re.compile(r"pdserve-(\d+)-")


class RayHost:
    """Joins the Ray at ``address``: `LaunchError` if it refuses, or does not answer within ``timeout_s``."""

    local = False

    def __init__(self, address: str, timeout_s: float) -> None:
        self._session = RaySession(address)
        _bounded(self._session.start, timeout_s, f"Ray at {address} did not let this process in")
        self.host: str = ray.util.get_node_ip_address()
        self.node_id: str = ray.get_runtime_context().get_node_id()

    def nodes(self) -> Sequence[Node]:
        """The nodes that are alive."""
        return self._session.nodes()

    def services(self) -> Sequence[int]:
        """Those whose workers have their names there."""
        names = [str(actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True)]
        return sorted({int(found[1]) for name in names if (found := _SERVICE.match(name))})

    def probe(self, node: Node, name: str) -> ProbeHandle:
        """A new actor, which is not placed elsewhere if that node has no room."""
        return _RayProbe(node, name)

    def close(self) -> None:
        """Leave Ray as it was."""
        self._session.stop()


class _RayProbe:
    def __init__(self, node: Node, name: str) -> None:
        actor: Any = ProbeActor
        on_node = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        self._name, self._turn = f"{name} on {node.ip}", threading.Lock()
        self._actor = actor.options(num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy=on_node).remote()

    def call(self, what: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Ray's own word for what went wrong is the end of a long text."""
        with self._turn:
            try:
                answer: Mapping[str, Any] = ray.get(self._actor.call.remote(what, arguments), timeout=timeout_s)
            except GetTimeoutError:
                raise DeadlineExceeded(f"{self._name} did not answer {what} within {timeout_s:.0f} s") from None
            except RayError as error:
                raise WorkerLost(f"{self._name} failed: {one_line(error)}") from None
        if "error" in answer:
            raise from_wire(*answer["error"])
        return answer["value"]

    def close(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)


def _bounded(start: Any, timeout_s: float, what: str) -> None:
    """Call ``start``, but no longer than that: Ray has waits that nobody bounds."""
    failed: list[PdserveError] = []

    def run() -> None:
        try:
            start()
        except PdserveError as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="doctor-join", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise LaunchError(f"cluster.address: {what} within {timeout_s:.0f} s")
    if failed:
        raise failed[0]
