"""Runs the controller on a service: reads the gateways' loads, and carries out what it decides."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from contract.scaling import GatewayLoad, RoleSamples, ScalingReport
from pdserve.core.config import ScalingConfig
from pdserve.core.errors import LaunchError
from pdserve.core.worker import Role
from router.forecast import Forecaster
from router.scaling_controller import Action, Observation, RoleLoad, ScalingController

log = logging.getLogger(__name__)


class ScaledService(Protocol):
    """The part of a service that the controller acts on."""

    @property
    def counts(self) -> dict[Role, int]:
        """Workers of each role, including those that wait for a node."""
        ...

    @property
    def is_changing(self) -> bool:
        """Whether it is being scaled."""
        ...

    def loads(self) -> list[GatewayLoad | None]:
        """The load at each gateway; None of those that do not answer."""
        ...

    def rescale(self, wanted: dict[Role, int], drain_s: float) -> list[str]:
        """Bring the service to ``wanted`` workers, and return what was done, in words. LaunchError if that fails."""
        ...

    def report_scaling(self, report: ScalingReport) -> None:
        """Show what the controller has done."""
        ...


class ScalingLoop:
    """The controller of ``service``, which is to `look` at it every `ScalingConfig.interval_s`. ``clock`` gives
    monotonic seconds, and ``wall`` those since 1970."""

    def __init__(
        self,
        service: ScaledService,
        config: ScalingConfig,
        clock: Callable[[], float],
        wall: Callable[[], float],
        forecaster: Forecaster | None = None,
    ) -> None:
        self._service, self._config, self._clock, self._wall = service, config, clock, wall
        self._controller = ScalingController(config, forecaster)
        self._before: list[GatewayLoad | None] = []
        self._before_s = 0.0
        self._report = ScalingReport(config.controller)

    def begin(self) -> None:
        """Show that there is a controller."""
        self._service.report_scaling(self._report)

    def look(self) -> None:
        """Read the loads once, and act."""
        now_s, loads = self._clock(), self._service.loads()
        before, self._before = self._before, loads
        before_s, self._before_s = self._before_s, now_s
        pairs = [
            (was, now)
            for was, now in zip(before, loads, strict=False)
            if was is not None and now is not None and now.looks > was.looks  # else it has started anew
        ]
        if not pairs or self._service.is_changing:
            return
        members = self._service.counts
        seen = observation(before_s, now_s, pairs, members)
        log.debug("scaling: %s", seen)
        action = self._controller.observe(seen)
        if outcome := self._controller.outcome:
            log.info("scaling: after the last action: %s", outcome)
            self._report = replace(self._report, reason=f"{self._report.reason}; {outcome}")
            self._service.report_scaling(self._report)
        if action is not None:
            self._act(action, members)
        elif (verdict := self._controller.verdict) != self._report.verdict:
            if _without_figures(verdict) != _without_figures(self._report.verdict):
                log.info("scaling: no action: %s", verdict)
            self._report = replace(self._report, verdict=verdict)
            self._service.report_scaling(self._report)

    def _act(self, action: Action, members: Mapping[Role, int]) -> None:
        """Carry out an action that was decided for these workers, unless others are wanted since then."""
        if self._service.is_changing or self._service.counts != members:  # forecasts take seconds
            log.info("scaling: the service was scaled meanwhile")
            self._controller.acted(self._clock())
            return
        words = _in_words(action)
        log.info("scaling: %s: %s", words, action.reason)
        wanted = dict(zip(Role, action.after((members[Role.PREFILL], members[Role.DECODE])), strict=True))
        try:
            words = "; ".join(self._service.rescale(wanted, self._config.drain_s)) or words
        except LaunchError as error:
            words = f"failed: {words}: {error}"
            log.warning("scaling: %s", words)
        self._controller.acted(self._clock())
        kind = f"{action.kind} {action.role}"
        self._report = self._report.after(words, kind, action.reason, self._wall())
        self._service.report_scaling(self._report)


def _in_words(action: Action) -> str:
    role, other = action.role, action.role.other
    if action.kind == "add":
        return f"a {role} worker is added"
    if action.kind == "remove":
        return f"a {role} worker is removed"
    if action.number == 1:
        return f"a {other} worker becomes a {role} worker"
    return f"{action.number} {other} workers become {role} workers"


def _without_figures(text: str) -> str:
    return re.sub(r"[\d.]+", "", text)


def observation(
    begin_s: float, end_s: float, pairs: Sequence[tuple[GatewayLoad, GatewayLoad]], members: dict[Role, int]
) -> Observation:
    """What the gateways saw between two readings. ``members`` are the workers that there should be."""

    def total(name: str) -> int:
        return sum(getattr(now, name) - getattr(was, name) for was, now in pairs)

    def counts(name: str) -> tuple[int, ...]:
        each = [[b - a for a, b in zip(getattr(was, name), getattr(now, name), strict=True)] for was, now in pairs]
        return tuple(sum(column) for column in zip(*each, strict=True))

    was, now = pairs[0]  # each gateway sees all workers
    steps = [
        (after.role, after.steps - before.steps, after.busy_s - before.busy_s)
        for worker_id, after in now.steps.items()
        if (before := was.steps.get(worker_id)) is not None and (before.role, before.epoch) == (after.role, after.epoch)
    ]

    def role_load(role: Role) -> RoleLoad:
        looks = sum(now.looks - was.looks for was, now in pairs)

        def mean(name: str) -> float:
            none = RoleSamples()
            each = [(was.samples.get(role, none), now.samples.get(role, none)) for was, now in pairs]
            return float(sum(getattr(now, name) - getattr(was, name) for was, now in each)) / looks

        ready = round(mean("ready"))  # one that pauses for a moment is still there
        # Gateways still see a worker that an operator has just flipped. It must not be flipped a second time.
        workers = min(ready, members[role])
        mine = [each for each in steps if each[0] is role]
        return RoleLoad(
            workers,
            max(0, members[role] - ready),
            mean("load"),
            mean("running"),
            mean("short"),
            sum(number for _, number, _ in mine),
            sum(busy_s for *_, busy_s in mine),
        )

    return Observation(
        begin_s,
        end_s,
        role_load(Role.PREFILL),
        role_load(Role.DECODE),
        counts("ttft"),
        counts("itl"),
        overdue=sum(now.overdue for _, now in pairs),
        requests=max(0, total("first_tokens") + total("waiting")),
        first_tokens=total("first_tokens"),
        prompt_tokens=total("prompt_tokens"),
        prompts=counts("prompts"),
        output_tokens=total("first_tokens") + total("gaps"),
        in_flight=float(sum(now.waiting + now.decoding for _, now in pairs)),
    )
