"""The real controller of roles, on a service of the world."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Protocol

from contract.scaling import GatewayLoad, ScalingReport
from pdserve.core.config import ScalingConfig
from pdserve.core.worker import Role
from router.forecast import Counts, Demand, Forecast, Forecaster
from router.scaling_loop import ScalingLoop
from simulator.loop import World
from simulator.service import WorldGateway

EPSILON_S = 1e-6
"""Of times that are computed."""


class DrawnForecasts:
    """Implements `router.forecast.Forecaster` by draws: whatever a model of the service says, the controller keeps its
    rules, and no request is lost."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def calibrate(self, counts: Counts, demand: Demand, step_s: Mapping[Role, float]) -> None:
        """See `Forecaster`."""

    def forecast(self, counts: Counts, demand: Demand) -> Forecast:
        """See `Forecaster`."""
        return Forecast(self._chance.random(), self._chance.random())


class Supervisor(Protocol):
    """What changes the members of a world's service."""

    roles: dict[str, Role]
    gateways: dict[str, WorldGateway]

    @property
    def is_changing(self) -> bool:
        """Whether a worker is leaving."""
        ...

    def flip(self, worker_id: str, role: Role) -> None:
        """Have a worker take a role."""
        ...

    def add(self, role: Role) -> None:
        """Have a worker join."""
        ...

    def remove(self, worker_id: str) -> None:
        """Have a worker leave."""
        ...


class WorldScaling:
    """Implements `router.scaling_loop.ScaledService`, and tells ``violate`` of actions that must not be."""

    def __init__(
        self,
        supervisor: Supervisor,
        world: World,
        config: ScalingConfig,
        violate: Callable[[str], None],
        forecaster: Forecaster | None,
    ) -> None:
        self._supervisor, self._world, self._config, self._violate = supervisor, world, config, violate
        self._loop = ScalingLoop(self, config, world.now, world.now, forecaster)
        self._acted_s = float("-inf")

    def look(self) -> None:
        """Have the controller look, and act."""
        self._loop.look()

    # --- ScaledService -----------------------------------------------------------------------------------------------

    @property
    def counts(self) -> dict[Role, int]:
        """See `ScaledService`."""
        roles = list(self._supervisor.roles.values())
        return {role: roles.count(role) for role in Role}

    @property
    def is_changing(self) -> bool:
        """See `ScaledService`."""
        return self._supervisor.is_changing

    def loads(self) -> list[GatewayLoad | None]:
        """See `ScaledService`."""
        return [
            each.meter.load(each.registry.ready()) if each.ready and each.process.alive else None
            for each in self._supervisor.gateways.values()
        ]

    def rescale(self, wanted: dict[Role, int], drain_s: float) -> list[str]:
        """See `ScaledService`."""
        counts = self.counts
        self._check(counts, {**counts, **wanted})
        more = [role for role, count in wanted.items() if count > counts[role]]
        fewer = [role for role, count in wanted.items() if count < counts[role]]
        for role in fewer:
            for worker_id in [each for each, has in self._supervisor.roles.items() if has is role][wanted[role] :]:
                if more:
                    self._supervisor.flip(worker_id, more[0])
                else:
                    self._supervisor.remove(worker_id)
        for role in () if fewer else more:
            self._supervisor.add(role)
        return []

    def report_scaling(self, report: ScalingReport) -> None:
        """See `ScaledService`."""

    def _check(self, before: dict[Role, int], wanted: dict[Role, int]) -> None:
        config, said = self._config, f"the controller wants {wanted} instead of {before}"
        after_s, self._acted_s = self._world.now_s - self._acted_s, self._world.now_s
        if after_s < 2 * config.hold_s - EPSILON_S:  # its effect is awaited, and figures are collected anew
            self._violate(f"{said}, only {after_s:.3f} s after its last action")
        if wanted[Role.PREFILL] < config.min_prefill or wanted[Role.DECODE] < config.min_decode:
            self._violate(f"{said}, fewer than there have to be")
        bounds = config.min_workers, config.max_workers or sum(before.values())
        if not bounds[0] <= sum(wanted.values()) <= bounds[1]:
            self._violate(f"{said}, and has the bounds {bounds}")
