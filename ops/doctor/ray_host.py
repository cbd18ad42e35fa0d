"""Probes as actors on the nodes of a running Ray. `ops.launch.discovery.prepare_environment` must be called before this
module is imported."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ops.doctor.probe import WorkerProbe
from ops.doctor.probes import ProbeHandle, Site
from ops.launch.node_tasks import on_node, one_line
from ops.launch.plan import Node
from ops.launch.ray_session import RaySession
from pdserve.core.errors import DeadlineExceeded, LaunchError, WorkerLost

_SERVICE = re.compile(r"pdserve-(\d+)-")


@contextlib.contextmanager
def ray_site(address: str, timeout_s: float) -> Iterator[Site]:
    """The nodes of the Ray at ``address``, which is left as it was. LaunchError if it cannot be joined in time."""
    session, deadline_s = RaySession(address), time.monotonic() + timeout_s

    def check() -> None:
        if time.monotonic() > deadline_s:
            raise LaunchError(f"cluster.address: Ray at {address} did not accept this process in {timeout_s:.0f} s")

    session.start(check=check)
    try:
        names = [str(actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True)]
        running = sorted({int(found[1]) for name in names if (found := _SERVICE.match(name))})
        here, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        yield Site(session.nodes(), running, _RayProbe, False, here, node_id)
    finally:
        session.stop()


class _RayProbe(ProbeHandle):
    def __init__(self, node: Node, name: str) -> None:
        super().__init__(f"{name} on {node.ip}")
        # Without resources, so that it fits beside anything that runs on the node.
        actor: Any = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0)(WorkerProbe)
        self._actor = actor.options(scheduling_strategy=on_node(node.node_id)).remote(hidden_gpus=True)

    def close(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)

    def _ask(self, what: str, arguments: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        try:
            answer: Mapping[str, Any] = ray.get(self._actor.call.remote(what, arguments), timeout=timeout_s)
        except GetTimeoutError:
            raise DeadlineExceeded(f"{self._name} did not answer {what} within {timeout_s:.0f} s") from None
        except RayError as error:
            raise WorkerLost(f"{self._name} failed: {one_line(error)}") from None
        return answer
