"""The doctor's interface to its probes: how a probe is called, and what it answers.

A probe runs on the node of a worker and answers in plain values: `WorkerProbe.call` makes them from the types below,
and `ProbeHandle.call` turns them back.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from kv_transfer.handshake import LinkFigures
from ops.doctor.finding import Finding
from ops.doctor.network import Obstacle
from ops.launch.plan import Node
from pdserve.core.errors import WorkerLost, from_wire
from pdserve.core.handoff import KVEndpoint
from worker.addresses import Interface

T = TypeVar("T")


class ProbeHandle(ABC):
    """A `WorkerProbe` in another process. Concurrent calls are serialized."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calling = threading.Lock()

    def call(self, what: str, arguments: Mapping[str, Any], timeout_s: float, answer_type: type[T]) -> T:
        """Call the probe and return its answer. Raises the probe's own errors, WorkerLost if its process is gone or its
        answer is unreadable, and DeadlineExceeded after ``timeout_s``."""
        with self._calling:
            answer = self._ask(what, msgspec.to_builtins(arguments), timeout_s)
        if "error" in answer:
            raise from_wire(*answer["error"])
        try:
            return msgspec.convert(answer["value"], answer_type)
        except msgspec.ValidationError as error:
            raise WorkerLost(f"{self._name} gave an unreadable answer ({error}); its pdserve differs") from None

    @abstractmethod
    def _ask(self, what: str, arguments: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """The answer of `WorkerProbe.call`."""

    @abstractmethod
    def close(self) -> None:
        """End the probe, even in the middle of a call."""


class ProbeHost(Protocol):
    """The nodes that are examined. ``local`` means this host alone, for a service that starts its own Ray. ``host`` and
    ``node_id`` are the gateway's address and node."""

    local: bool
    host: str
    node_id: str

    def nodes(self) -> Sequence[Node]:
        """The nodes that a service could use."""
        ...

    def services(self) -> Sequence[int]:
        """The public ports of the services that already run there."""
        ...

    def probe(self, node: Node, name: str) -> ProbeHandle:
        """Start a probe on a node."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a probe listens in place of a worker. ``control`` is the ``host:port`` of its ping server (empty if it has
    none), ``interface`` the resolved ``transfer.interface``, ``kv`` the transports' endpoints (empty if they could not
    be opened). ``findings`` say why it could not listen as the worker would."""

    worker_id: str
    control: str
    interface: Interface | None
    kv: tuple[KVEndpoint, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Result of connecting a prefill worker's probe to a decode worker's, which listens at ``address`` with
    ``transport``. ``figures`` is None if they could not connect, ``what`` then says why."""

    transport: str = ""
    address: str = ""
    reason: str = ""
    figures: LinkFigures | None = None
    obstacle: Obstacle = Obstacle.NONE
    what: str = ""
