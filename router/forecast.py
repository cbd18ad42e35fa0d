"""What the controller of roles asks of a model of the service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from pdserve.core.worker import Role

Counts = tuple[int, int]
"""Prefill and decode workers."""


class Demand(NamedTuple):
    """What the clients of a service ask: requests per second, prompts by the tokens that have to be computed (counts as
    `contract.scaling.GatewayLoad.prompts` has them), and tokens of an output on average."""

    rate: float
    prompts: tuple[int, ...]
    output_tokens: float


class Forecast(NamedTuple):
    """The shares of first tokens, and of gaps between tokens, that are expected to meet their objective; 1 where there
    is none."""

    ttft: float
    itl: float

    @property
    def worse(self) -> float:
        """The share of the objective that is met less often."""
        return min(self)

    def __str__(self) -> str:
        return f"TTFT {self.ttft:.0%}, ITL {self.itl:.0%}"


class Forecaster(Protocol):
    """A model of the service."""

    def calibrate(self, counts: Counts, demand: Demand, step_s: Mapping[Role, float]) -> None:
        """Have steps take as long as those of the service do: of these workers under this demand, ``step_s`` seconds on
        average. A role without steps is left as it is."""
        ...

    def forecast(self, counts: Counts, demand: Demand) -> Forecast:
        """How these workers would do."""
        ...
