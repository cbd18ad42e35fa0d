"""Where probes run: on the nodes of a Ray, or as processes of this host. The two interfaces that `examine` needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ops.launch.plan import Node


class ProbeHandle(Protocol):
    """A `Probe` somewhere. Calls from several threads take turns."""

    def call(self, what: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """What the probe answers; its own errors, WorkerLost if it is gone or never came up, DeadlineExceeded if it
        does not answer in time."""
        ...

    def close(self) -> None:
        """End it, whatever it does."""
        ...


class ProbeHost(Protocol):
    """``local``: a Ray of the service's own, on this host alone. ``host`` is the address that the gateway would have,
    ``node_id`` its node's."""

    local: bool
    host: str
    node_id: str

    def nodes(self) -> Sequence[Node]:
        """The nodes that a service could use."""
        ...

    def services(self) -> Sequence[int]:
        """The ports of the services that run there already."""
        ...

    def probe(self, node: Node, name: str) -> ProbeHandle:
        """A new probe on a node."""
        ...
