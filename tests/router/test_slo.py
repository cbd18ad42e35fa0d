"""The policy ``slo``: the greatest predicted headroom, and what it does until costs are known."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.core.config import PdserveConfig, RouterConfig
from pdserve.core.errors import ConfigError
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.needs import Needs
from router.placement import ClusterView, Placed, place
from router.policies.catalogue import Policies
from router.policies.slo import Slo
from tests.router.test_auto_mode import costs, line, worker

CONFIG = RouterConfig.model_validate({"policy": "slo", "slo": {"ttft_ms": 200, "itl_ms": 20}})
NEEDS = Needs(Mode.PD, 1000, 10)


def slo(role: Role) -> Slo:
    return Slo.of(role, CONFIG).given(costs())


def test_prefill_goes_where_the_first_token_is_predicted_earliest() -> None:
    workers = [worker("p0", prompt_tokens=500), worker("p1", prompt_tokens=100), worker("p2", prompt_tokens=2000)]
    chosen, why = slo(Role.PREFILL).choose(workers, NEEDS)
    assert chosen.worker_id == "p1"
    assert why == "TTFT of 112 ms predicted, 88 ms below its objective, the best of 3"
    late = [worker("p0", prompt_tokens=3000), worker("p1", prompt_tokens=2000)]
    assert slo(Role.PREFILL).choose(late, NEEDS)[1] == (
        "TTFT of 302 ms predicted, 102 ms above its objective, the best of 2"
    )


def test_a_slower_kind_of_worker_needs_to_have_less_to_do() -> None:
    """Fewer outstanding tokens do not help the slow one."""
    slow = {"prefill cpu": line(2e-3, 1e-4, 1e-4, 0.0), "prefill cuda": line(2e-3, 1e-5, 1e-5, 0.0)}
    policy = Slo.of(Role.PREFILL, CONFIG).given(costs(prefill=slow))
    workers = [worker("p0"), worker("p1", kind="prefill cuda", prompt_tokens=4000, outstanding_tokens=4000)]
    assert policy.choose(workers, NEEDS)[0].worker_id == "p1"


def test_decode_goes_where_tokens_are_predicted_to_come_fastest() -> None:
    source = worker("p0", linked={"d0": 1.0, "d1": 1.0})
    workers = [worker("d0", decoding=9), worker("d1", decoding=3)]
    chosen, why = slo(Role.DECODE).choose(workers, NEEDS, source)
    assert chosen.worker_id == "d1"
    assert why == "ITL of 7 ms predicted, 13 ms below its objective, the best of 2"


def test_it_is_least_tokens_until_all_candidates_are_measured() -> None:
    workers = [worker("p0", outstanding_tokens=9), worker("p1", outstanding_tokens=5, prompt_tokens=900)]
    chosen, why = Slo.of(Role.PREFILL, CONFIG).choose(workers, NEEDS)
    assert chosen.worker_id == "p1"
    assert why == "5 outstanding tokens, the fewest of 2 (slo: TTFT is not measured of all of them yet)"


def test_placement_gives_it_the_costs_of_the_view() -> None:
    workers = (
        worker("p0", prompt_tokens=500, outstanding_tokens=500, linked={"d0": 1.0}),
        worker("p1", prompt_tokens=100, outstanding_tokens=900, linked={"d0": 1.0}),
        worker("d0"),
    )
    view = ClusterView(workers, Policies.of(CONFIG), 10_000, costs=costs())
    decision = place(NEEDS, view)
    assert isinstance(decision, Placed)
    assert (decision.prefill, decision.decode) == ("p1", "d0")
    assert "prefill on p1: TTFT of 112 ms predicted" in decision.reason
    unknown = place(NEEDS, msgspec.structs.replace(view, costs=type(costs())()))
    assert isinstance(unknown, Placed)
    assert unknown.prefill == "p0"


@pytest.mark.parametrize(
    ("router", "why"),
    [
        ({"policy": "slo"}, "policy slo for prefill needs ttft_ms"),
        ({"policy": {"decode": "slo"}, "slo": {"ttft_ms": 100}}, "policy slo for decode needs itl_ms"),
        ({"slo": {"ttft_ms": 0}}, "greater than 0"),
    ],
)
def test_it_needs_its_objectives(router: object, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^router\.slo.*{why}"):
        PdserveConfig.parse({"router": router})


def test_one_role_needs_one_objective() -> None:
    config = PdserveConfig.parse({"router": {"policy": {"prefill": "slo"}, "slo": {"ttft_ms": 100}}})
    assert PdserveConfig.parse(config.model_dump(mode="json")) == config
