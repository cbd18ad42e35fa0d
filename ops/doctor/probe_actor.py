"""The Ray actor around a `Probe`. Ray sends this class itself to the node, and everything it uses is imported there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray

from ops.doctor.probe import Probe


@ray.remote
class ProbeActor:
    """Holds no resources: it runs beside what is there."""

    def __init__(self) -> None:
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            del os.environ["CUDA_VISIBLE_DEVICES"]  # set by older Rays where nothing was asked for, as here
        self._probe = Probe()

    def call(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See `Probe.call`."""
        return self._probe.call(what, arguments)
