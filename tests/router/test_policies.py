"""Each policy by itself: views in, the chosen worker and the reason out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pdserve.core.config import ROUTING_POLICIES, RouterConfig, SloConfig
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.cost_model import NOTHING_KNOWN, Costs
from router.placement import Placed, place
from router.policies import POLICIES, Choice
from router.view import ClusterView, Needs, WorkerView
from tests.router.test_auto_mode import costs, line
from tests.router.test_auto_mode import worker as measured
from tests.router.test_placement import busy, needs, worker


def choose(
    policy: str,
    workers: list[WorkerView],
    wanted: Needs | None = None,
    role: Role = Role.PREFILL,
    source: WorkerView | None = None,
    **changes: Any,
) -> tuple[str, str]:
    """The worker that a policy chooses, and why."""
    chosen, why = POLICIES[policy](Choice(workers, wanted or needs(), role, source, **changes))
    return chosen.worker_id, why


def test_every_name_of_the_configuration_has_a_policy_and_no_other_exists() -> None:
    assert set(POLICIES) == set(ROUTING_POLICIES)


def test_random_draws_evenly_and_each_role_by_itself() -> None:
    workers = [worker(f"p{number}") for number in range(4)]
    assert choose("random", workers)[1] == "drawn from 4"
    drawn = [[choose("random", workers, needs(ticket=t), role)[0] for t in range(4000)] for role in Role]
    assert all(850 < count < 1150 for count in Counter(drawn[0]).values())
    assert 850 < sum(a == b for a, b in zip(*drawn, strict=True)) < 1150, "the two roles are drawn independently"


def test_power_of_two_never_takes_the_most_loaded_and_draws_all_pairs_evenly() -> None:
    workers = [busy(f"p{number}", number) for number in range(4)]
    counts = Counter(choose("power_of_two", workers, needs(ticket=ticket))[0] for ticket in range(6000))
    # Of the six pairs, p0 is the lesser in three, p1 in two, and p2 in one.
    for name, share in (("p0", 3), ("p1", 2), ("p2", 1)):
        assert share * 1000 * 0.85 < counts[name] < share * 1000 * 1.15, counts
    assert counts["p3"] == 0
    assert choose("power_of_two", workers[:2]) == ("p0", "0 outstanding tokens, p1 has 1; drawn from 2")


def cached_on(**tokens: int) -> Needs:
    """A request of 20 prompt tokens, of which these workers have that many in their caches."""
    return needs(cached=tokens)


AFFINITY: dict[str, tuple[list[WorkerView], Needs, str, str]] = {
    "nothing cached anywhere": (
        [busy("p0", 9), busy("p1", 7)],
        needs(),
        "p1",
        "no prefix cached; 7 outstanding tokens, the fewest of 2",
    ),
    "the longest prefix, though others have less to do": (
        [busy("p0", 1000), busy("p1", 900), worker("p2")],
        cached_on(p0=16, p1=8),
        "p0",
        "16 of 20 prompt tokens cached, the most of 3",
    ),
    "not yet skewed": (
        [busy("p0", 2 * 50 + 1024), busy("p1", 50)],
        cached_on(p0=16),
        "p0",
        "16 of 20 prompt tokens cached, the most of 2",
    ),
    "skewed": (
        [busy("p0", 2 * 50 + 1025), busy("p1", 50)],
        cached_on(p0=16),
        "p1",
        "the load is skewed: p0 has 16 tokens cached, but 1125 outstanding; 50 outstanding tokens, the fewest of 2",
    ),
}


@pytest.mark.parametrize(("workers", "wanted", "chosen", "why"), AFFINITY.values(), ids=AFFINITY)
def test_prefix_affinity_goes_to_the_longest_prefix_unless_the_load_is_skewed(
    workers: list[WorkerView], wanted: Needs, chosen: str, why: str
) -> None:
    assert choose("prefix_affinity", workers, wanted) == (chosen, why)


COSTS: dict[str, tuple[Role, list[WorkerView], Needs, str, str]] = {
    "all else equal, where most is cached": (
        Role.PREFILL,
        [worker("p0"), worker("p1")],
        cached_on(p1=16),
        "p1",
        "cost 4, the least of 2: 1 of 5 blocks not cached, 0 waiting, 0 active",
    ),
    "a shorter wait than what is saved": (
        Role.PREFILL,
        [worker("p0"), worker("p1", prompt_tokens=12, free_blocks=29)],
        cached_on(p1=16),
        "p1",
        "cost 16, the least of 2: 1 of 5 blocks not cached, 3 waiting, 0 active",
    ),
    "fewer blocks in use on decode": (
        Role.DECODE,
        [worker("d0", free_blocks=20), worker("d1", free_blocks=26)],
        cached_on(d0=16),
        "d1",
        "cost 11, the least of 2: 5 of 5 blocks not cached, 0 waiting, 6 active",
    ),
    "blocks placed since the heartbeat count": (
        Role.DECODE,
        [worker("d0", blocks_placed=3), worker("d1", blocks_placed=2)],
        needs(),
        "d1",
        "cost 7, the least of 2: 5 of 5 blocks not cached, 0 waiting, 2 active",
    ),
}


@pytest.mark.parametrize(("role", "workers", "wanted", "chosen", "why"), COSTS.values(), ids=COSTS)
def test_kv_aware_weighs_missing_blocks_against_active_ones(
    role: Role, workers: list[WorkerView], wanted: Needs, chosen: str, why: str
) -> None:
    assert choose("kv_aware", workers, wanted, role) == (chosen, why)


def test_a_session_stays_on_its_worker_whatever_the_load_and_moves_only_if_that_is_gone() -> None:
    workers = [worker(f"p{number}") for number in range(5)]
    homes = {f"s{n}": choose("session", workers, needs(session=f"s{n}"))[0] for n in range(1000)}
    assert all(140 < count < 260 for count in Counter(homes.values()).values()), "sessions are spread"
    loaded = [busy(f"p{number}", 99 * number, last_used=number) for number in range(4)]
    for session, home in homes.items():
        assert choose("session", loaded, needs(session=session))[0] == home or home == "p4"
    assert choose("session", workers, needs(session="s1"))[1] == "that of the session among 5"
    without = choose("session", [busy("d0", 9), busy("d1", 7)], role=Role.DECODE)
    assert without == ("d1", "no session id; 7 outstanding tokens, the fewest of 2")


P0 = worker("p0", linked={"d0": 1.0, "d1": 1.5, "d2": 6.0, "d3": 0.0})
LINKS: dict[str, tuple[list[WorkerView], str, str]] = {
    "the host of the prefill worker": (
        [worker("d0", node="b", last_used=1), worker("d1", last_used=2)],
        "d1",
        "0 outstanding tokens, the fewest of 2, on the host of p0",
    ),
    "the faster link, if all are elsewhere": (
        [worker("d0", node="b"), worker("d2", node="b", last_used=1)],
        "d2",
        "0 outstanding tokens, the fewest of 2, over the fastest link",
    ),
    "a link without a measured rate, so that it gets one": (
        [worker("d2", last_used=2), worker("d3", last_used=1), worker("d0")],
        "d3",
        "0 outstanding tokens, the fewest of 3, over the fastest link",
    ),
}


@pytest.mark.parametrize(("workers", "chosen", "why"), LINKS.values(), ids=LINKS)
def test_equal_decode_workers_are_chosen_by_their_link(workers: list[WorkerView], chosen: str, why: str) -> None:
    assert choose("least_tokens", workers, role=Role.DECODE, source=P0) == (chosen, why)


NEAREST: dict[str, tuple[list[WorkerView], WorkerView | None, str, str]] = {
    "the host before the load": (
        [busy("d0", 90), busy("d1", 80), worker("d2", node="b")],
        P0,
        "d1",
        "80 outstanding tokens, the fewest of 2, on the host of p0",
    ),
    "the faster link before the load": (
        [worker("d0", node="b"), busy("d2", 50, node="c")],
        P0,
        "d2",
        "the only one over the fastest link",
    ),
}


@pytest.mark.parametrize(("workers", "source", "chosen", "why"), NEAREST.values(), ids=NEAREST)
def test_nearest_link_goes_by_load_only_among_near_workers(
    workers: list[WorkerView], source: WorkerView | None, chosen: str, why: str
) -> None:
    assert choose("nearest_link", workers, role=Role.DECODE, source=source) == (chosen, why)


SLO = SloConfig(ttft_ms=200, itl_ms=20)
SLOW_CPU = {"prefill cpu": line(2e-3, 1e-4, 1e-4, 0.0), "prefill cuda": line(2e-3, 1e-5, 1e-5, 0.0)}
HEADROOM: dict[str, tuple[Role, list[WorkerView], Costs, str, str]] = {
    "the earliest first token": (
        Role.PREFILL,
        [measured("p0", prompt_tokens=500), measured("p1", prompt_tokens=100), measured("p2", prompt_tokens=2000)],
        costs(),
        "p1",
        "TTFT of 112 ms predicted, 88 ms below its objective, the best of 3",
    ),
    "late everywhere": (
        Role.PREFILL,
        [measured("p0", prompt_tokens=3000), measured("p1", prompt_tokens=2000)],
        costs(),
        "p1",
        "TTFT of 302 ms predicted, 102 ms above its objective, the best of 2",
    ),
    "a slower kind has to have less to do": (
        Role.PREFILL,
        [measured("p0"), measured("p1", kind="prefill cuda", prompt_tokens=4000, outstanding_tokens=4000)],
        costs(prefill=SLOW_CPU),
        "p1",
        "TTFT of 52 ms predicted, 148 ms below its objective, the best of 2",
    ),
    "the fastest tokens": (
        Role.DECODE,
        [measured("d0", decoding=9), measured("d1", decoding=3)],
        costs(),
        "d1",
        "ITL of 7 ms predicted, 13 ms below its objective, the best of 2",
    ),
    "least_tokens until all are measured": (
        Role.PREFILL,
        [measured("p0", outstanding_tokens=9), measured("p1", outstanding_tokens=5, prompt_tokens=900)],
        NOTHING_KNOWN,
        "p1",
        "5 outstanding tokens, the fewest of 2 (slo: TTFT is not measured of all of them yet)",
    ),
}


@pytest.mark.parametrize(("role", "workers", "known", "chosen", "why"), HEADROOM.values(), ids=HEADROOM)
def test_slo_takes_the_greatest_predicted_headroom(
    role: Role, workers: list[WorkerView], known: Costs, chosen: str, why: str
) -> None:
    source = measured("p0", linked={"d0": 1.0, "d1": 1.0}) if role is Role.DECODE else None
    wanted = Needs(Mode.PD, 1000, 10)
    assert choose("slo", workers, wanted, role, source, costs=known, slo=SLO) == (chosen, why)


def test_placement_follows_the_policy_of_each_role_and_gives_it_the_costs_of_the_view() -> None:
    workers = (
        measured("p0", prompt_tokens=500, outstanding_tokens=500, linked={"d0": 1.0, "d1": 1.0}),
        measured("p1", prompt_tokens=100, outstanding_tokens=900, linked={"d0": 1.0, "d1": 1.0}),
        measured("d0", last_used=2),
        measured("d1", last_used=1, outstanding_tokens=9),
    )
    config = RouterConfig.model_validate({"policy": {"prefill": "slo", "decode": "round_robin"}, "slo": SLO})
    view = ClusterView(workers, config.model_copy(update={"prefill_backlog_tokens": 10_000}), costs=costs())
    decision = place(Needs(Mode.PD, 1000, 10), view)
    assert isinstance(decision, Placed)
    assert decision.reason.startswith("prefill on p1: TTFT of 112 ms predicted")
    assert "decode on d1: its turn among 2" in decision.reason
