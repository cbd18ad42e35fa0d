"""Single faults in the world, which the service has to survive, and which must bite."""

from __future__ import annotations

import pytest

from simulator.plan import MEASURED_S, Fault, Plan
from simulator.simulation import simulate
from tests.simulator.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("seed", [29, 46, 66])
def test_offsets_are_measured_anew_when_a_clock_has_jumped(seed: int) -> None:
    """A shorter round trip before the jump counted for a minute."""
    plan = Plan.draw(seed)
    jumps = tuple(Fault(1.0, "step", f"host-{worker}", MEASURED_S, "0.1") for worker in plan.roles)
    assert simulate(plan.with_faults(jumps)).violations == []


def test_a_stream_goes_on_at_another_gateway() -> None:
    """With the tokens that it would have had."""
    plan = next(plan for plan in map(Plan.draw, range(100)) if plan.gateways == 2)
    lost = tuple(Fault(at_s, "kill_gateway", f"gateway-{number}") for number, at_s in enumerate((0.5, 3.0)))
    result = simulate(plan.with_faults(lost))
    assert result.violations == []
    assert any(outcome.resumes for outcome in result.outcomes)


def test_the_planted_faults_have_their_places() -> None:
    """They are run by hand (`python -m tests.simulator.mutants`)."""
    lost = [each.name for each in MUTANTS if (ROOT / each.file).read_text(encoding="utf-8").count(each.old) != 1]
    assert lost == []
