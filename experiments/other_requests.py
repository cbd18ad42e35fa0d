"""Requests of others: a running service may have some when a measurement is about to begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pdserve.client.status import ServiceStatus

BUSY = "busy"
"""The fact of a cell that lists what was not measured on an idle service: ``arm``, ``running`` and ``queued``."""


@dataclass(frozen=True, slots=True)
class OtherRequests:
    """How many requests ran and were queued that are not the measurement's."""

    running: int
    queued: int

    @classmethod
    def of(cls, status: ServiceStatus) -> Self | None:
        """Those of a service that should be idle; None if it is."""
        if status.idle:
            return None
        on_workers = sum(worker.running + worker.waiting for worker in status.workers)
        return cls(max(status.running, on_workers), status.queued)

    def text(self, what: str) -> str:
        """A sentence about ``what`` is measured beside them."""
        return (
            f"{what} began on a busy service: {self.running} running and {self.queued} queued requests were not the "
            "measurement's, and the figures include what they cost."
        )


def busy_texts(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fact `BUSY` in words: one sentence per arm, with the most requests of others."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        arms.setdefault(entry["arm"], []).append(entry)
    return [
        OtherRequests(*(max(entry[key] for entry in of_arm) for key in ("running", "queued"))).text(arm)
        for arm, of_arm in arms.items()
    ]
