"""The controller's loop: what it makes of the gateways' counts, and what it does to the service."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from contract.scaling import SHARES, GatewayLoad, RoleSamples, ScalingReport, WorkerSteps
from pdserve.core.config import ScalingConfig
from pdserve.core.errors import LaunchError
from pdserve.core.worker import Role
from router.forecast import Counts, Demand, Forecast
from router.scaling_controller import Action
from router.scaling_loop import ScalingLoop, observation

P, D = Role.PREFILL, Role.DECODE
CONFIG = ScalingConfig(controller="roles", ttft_ms=500, itl_ms=50, interval_s=1, hold_s=4)


def counts(good: int, missed: int) -> list[int]:
    return [good, *[0] * (len(SHARES) - 1), missed]


def load(second: int, **changes: Any) -> GatewayLoad:
    """The load of a gateway whose prefill workers are saturated, so many seconds after its start."""
    values: dict[str, Any] = {
        "ttft": counts(0, 10 * second),
        "itl": counts(100 * second, 0),
        "first_tokens": 10 * second,
        "prompt_tokens": 5000 * second,
        "prompts": [0, 10 * second, 0],
        "gaps": 100 * second,
        "looks": 10 * second,
        "samples": {
            P: RoleSamples(10.0 * second, 0.0, 9 * second, 10 * second),
            D: RoleSamples(1.0 * second, 5.0 * second, 0, 20 * second),
        },
        "waiting": 20,
        "overdue": 15,
        "decoding": 2,
    }
    return GatewayLoad(**{**values, **changes})


class ScriptedService:
    """Two gateways with the same load, and members that obey."""

    is_changing = False

    def __init__(self) -> None:
        self.second = 0
        self.counts = {P: 1, D: 2}
        self.reports: list[ScalingReport] = []
        self.asked: list[dict[Role, int]] = []
        self.silent: set[int] = set()
        self.error: LaunchError | None = None
        self.ready_prefill, self.decode_workers = 1, 2

    def loads(self) -> list[GatewayLoad | None]:
        self.second += 1
        loads = [None if number in self.silent else load(self.second) for number in range(2)]
        for each in loads:
            if each is not None:
                each.samples[P].ready = self.ready_prefill * each.looks
                each.samples[D].ready = self.decode_workers * each.looks
        return loads

    def rescale(self, wanted: dict[Role, int], drain_s: float) -> list[str]:
        self.asked.append(wanted)
        if self.error is not None:
            raise self.error
        self.counts = {**self.counts, **wanted}
        return ["decode-1 becomes a prefill worker"]

    def report_scaling(self, report: ScalingReport) -> None:
        self.reports.append(report)


def looks(service: ScriptedService, count: int) -> None:
    loop = ScalingLoop(service, CONFIG, lambda: float(service.second), lambda: 1e9 + service.second)
    for _ in range(count):
        loop.look()


def test_counts_of_all_gateways_are_one_observation() -> None:
    seen = observation(3.0, 5.0, [(load(3), load(5)), (load(3), load(5, waiting=26))], {P: 1, D: 4})
    assert (seen.begin_s, seen.end_s, seen.counts) == (3.0, 5.0, (1, 2))
    assert (seen.prefill.load, seen.prefill.short, seen.decode.load, seen.decode.running) == (1.0, 0.9, 0.1, 0.5)
    assert (seen.prefill.coming, seen.decode.coming) == (0, 2)
    assert (seen.ttft[-1], seen.itl[0], seen.overdue) == (40, 400, 30)
    assert (seen.first_tokens, seen.requests, seen.prompt_tokens, seen.output_tokens) == (40, 46, 20_000, 440)
    assert seen.in_flight == 20 + 26 + 2 + 2


def test_steps_are_those_of_workers_that_were_there_all_the_time() -> None:
    def steps(**workers: tuple[Role, int, float]) -> dict[str, Any]:
        return {"steps": {name: WorkerSteps(role, "a", count, s) for name, (role, count, s) in workers.items()}}

    before = load(3, **steps(p0=(P, 10, 1.0), p1=(P, 5, 0.5), d0=(D, 100, 1.0), d1=(D, 90, 3.0), d2=(D, 50, 0.5)))
    after = load(5, **steps(p0=(P, 14, 1.8), d0=(D, 150, 1.5), d1=(P, 99, 3.1), d2=(D, 60, 0.1), d3=(D, 7, 0.1)))
    after.steps["d2"].epoch = "b"
    seen = observation(3.0, 5.0, [(before, after), (load(3), load(5))], {P: 1, D: 2})
    assert seen.prefill.steps == 4, "d1 has changed its role"
    assert seen.prefill.busy_s == pytest.approx(0.8)
    assert (seen.decode.steps, seen.decode.busy_s) == (50, 0.5), "d2 has started anew"


def test_several_workers_are_moved_and_the_outcome_is_shown() -> None:
    class Forecasts:
        def calibrate(self, counts: Counts, demand: Demand, step_s: Mapping[Role, float]) -> None:
            """Nothing to change."""

        def forecast(self, counts: Counts, demand: Demand) -> Forecast:
            return Forecast(counts[0] / 3, 1.0)

    service = ScriptedService()
    service.counts, service.decode_workers = {P: 1, D: 5}, 5
    loop = ScalingLoop(service, CONFIG, lambda: float(service.second), lambda: 1e9 + service.second, Forecasts())
    for _ in range(5):
        loop.look()
    assert service.asked == [{P: 3, D: 3}]
    reason = service.reports[-1].reason
    assert reason.endswith("expected of 1P5D is TTFT 33%, ITL 100%, of 3P3D TTFT 100%, ITL 100%")
    service.ready_prefill, service.decode_workers = 3, 3
    for _ in range(25):
        loop.look()
    measured = "measured since then: TTFT 0%, ITL 100%, so there are no more forecasts under this load"
    assert f"{reason}; {measured}" in [report.reason for report in service.reports]


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Action("flip", P, ""), "a decode worker becomes a prefill worker"),
        (Action("flip", D, "", 3), "3 prefill workers become decode workers"),
        (Action("add", P, ""), "a prefill worker is added"),
        (Action("remove", D, ""), "a decode worker is removed"),
    ],
)
def test_a_failed_action_is_named(action: Action, words: str) -> None:
    service = ScriptedService()
    service.error = LaunchError("no")
    loop = ScalingLoop(service, CONFIG, lambda: 0.0, lambda: 1e9)
    loop._act(action, service.counts)
    assert service.reports[-1].last == f"failed: {words}: no"


def test_an_action_is_carried_out_and_shown_with_its_reason() -> None:
    service = ScriptedService()
    looks(service, 5)
    assert service.asked == [{P: 2, D: 1}]
    report = service.reports[-1]
    assert (report.controller, report.last) == ("roles", "decode-1 becomes a prefill worker")
    assert report.reason.startswith("0% of first tokens met the objective of TTFT")
    assert report.actions == {"flip prefill": 1}
    assert report.last_s == 1e9 + 5


def test_a_worker_that_is_not_ready_for_a_moment_is_still_counted() -> None:
    """Figures would be collected anew each time that a heartbeat is late."""
    after = load(5)
    after.samples[D] = RoleSamples(5.0, 25.0, 0, 60 + 34)  # 20 looks at two workers, and 6 times one was late
    seen = observation(3.0, 5.0, [(load(3), after)], {P: 1, D: 2})
    assert seen.counts == (1, 2)


def test_a_worker_that_is_to_leave_its_role_is_not_given_away_again() -> None:
    """An operator has flipped one of two decode workers, and the gateways still see both."""
    seen = observation(3.0, 5.0, [(load(3), load(5))], {P: 2, D: 1})
    assert seen.counts == (1, 1)


def test_what_it_sees_and_why_it_does_nothing_is_shown_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    service = ScriptedService()
    service.counts = {P: 1, D: 1}
    service.decode_workers = 1
    looks(service, 12)
    assert service.asked == []
    verdicts = [report.verdict for report in service.reports]
    assert verdicts[:3] == [f"figures of these workers are collected: {second} of 4 s" for second in (1, 2, 3)]
    assert verdicts[-1] == (
        "0% of first tokens met the objective of TTFT, and prefill workers are busy for 100% of the time; "
        "there have to be 1 decode workers or more"
    )
    assert service.reports[-1].verdict == verdicts[-1]
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2, "once each, not with every figure"
    assert logged[1] == f"scaling: no action: {verdicts[-1]}"


def test_an_action_that_fails_is_shown_and_not_repeated() -> None:
    service = ScriptedService()
    service.error = LaunchError("no free slot for prefill-1")
    looks(service, 60)
    assert len(service.asked) == 1
    assert service.reports[-1].last == "failed: a decode worker becomes a prefill worker: no free slot for prefill-1"


def test_an_action_for_workers_that_have_changed_meanwhile_is_dropped() -> None:
    service = ScriptedService()
    loop = ScalingLoop(service, CONFIG, lambda: 0.0, lambda: 1e9)
    loop._act(Action("flip", P, "", 3), {P: 1, D: 7})
    assert service.asked == []


@pytest.mark.parametrize("silent", [{0}, {0, 1}])
def test_gateways_that_do_not_answer_are_left_out(silent: set[int]) -> None:
    service = ScriptedService()
    service.silent = silent
    looks(service, 10)
    assert len(service.asked) == (1 if len(silent) == 1 else 0)


def test_a_gateway_that_starts_anew_is_counted_from_then_on() -> None:
    service = ScriptedService()
    loop = ScalingLoop(service, CONFIG, lambda: float(service.second), lambda: 1e9 + service.second)
    for second in (7, 8, 0, 1):
        service.second = second
        loop.look()
    assert service.asked == [], "no observation spans its start"


def test_nothing_is_done_while_the_service_is_scaled_by_hand() -> None:
    service = ScriptedService()
    service.is_changing = True
    looks(service, 60)
    assert service.asked == []
