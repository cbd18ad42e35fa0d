"""xPyD: how many workers of a service prefill and how many decode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Split:
    """``prefill`` and ``decode`` workers, written ``2P1D``."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """The split that is written like ``2P1D``; InvalidRequest, which names ``option``, otherwise."""
        found = re.fullmatch(r"([1-9]\d{0,3})P([1-9]\d{0,3})D", text, re.IGNORECASE)
        if found is None:
            raise InvalidRequest(f"{option}: {text!r} is not a number of prefill and of decode workers, such as 2P1D")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def of(cls, status: ServiceStatus) -> Self:
        """The workers of a running service. InvalidRequest if it lacks one of the roles."""
        roles = [worker.role for worker in status.workers if worker.state != "lost"]
        split = cls(roles.count("prefill"), roles.count("decode"))
        if not split.prefill or not split.decode:
            raise InvalidRequest(f"target: the service is {split.name}; both roles are needed")
        return split

    @classmethod
    def all(cls, devices: int) -> list[Self]:
        """Every split of so many devices, the most balanced ones first."""
        splits = [cls(prefill, devices - prefill) for prefill in range(1, devices)]
        return sorted(splits, key=lambda split: (abs(split.prefill - split.decode), -split.prefill))

    @property
    def name(self) -> str:
        """``2P1D``."""
        return f"{self.prefill}P{self.decode}D"

    @property
    def devices(self) -> int:
        """Workers, and so devices, in all."""
        return self.prefill + self.decode

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of a service that has it."""
        return {"cluster.prefill": self.prefill, "cluster.decode": self.decode}
