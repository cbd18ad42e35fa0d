"""Each policy by itself: views in, the chosen worker and the reason out."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest

from pdserve.core.config import RouterConfig, RoutingPolicy, SloConfig
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.needs import Needs
from router.policies.catalogue import POLICIES, Policies
from router.policies.kv_aware import KVAware
from router.policies.least_tokens import LeastTokens
from router.policies.nearest_link import NearestLink
from router.policies.policy import Policy
from router.policies.power_of_two import PowerOfTwo
from router.policies.prefix_affinity import PrefixAffinity
from router.policies.random import Random
from router.policies.round_robin import RoundRobin
from router.policies.session import Session
from router.worker_view import WorkerView


def worker(worker_id: str, tokens: int = 0, **changes: Any) -> WorkerView:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    values = {"block_size": 4, "num_blocks": 32, "max_tokens": 128, "free_blocks": 32, "node": "a"}
    return WorkerView(worker_id, role, **{**values, "outstanding_tokens": tokens, **changes})


def needs(**changes: Any) -> Needs:
    return Needs(Mode.PD, 20, 10, **changes)


def test_every_name_of_the_configuration_has_a_policy_and_no_other_exists() -> None:
    assert set(POLICIES) == set(get_args(RoutingPolicy))
    assert all(name == policy.name for name, policy in POLICIES.items())


def test_policies_are_chosen_per_role() -> None:
    both = Policies.of(RouterConfig(policy="random"))
    assert (both.prefill.name, both.decode.name) == ("random", "random")
    assert (both.prefill.role, both.decode.role) == (Role.PREFILL, Role.DECODE)
    each = Policies.of(RouterConfig.model_validate({"policy": {"prefill": "round_robin", "decode": "power_of_two"}}))
    assert (each.prefill.name, each.decode.name) == ("round_robin", "power_of_two")


def test_round_robin_takes_the_one_chosen_longest_ago_whatever_its_load() -> None:
    choice = RoundRobin(Role.PREFILL).choose(
        [worker("p0", last_used=3), worker("p1", 99, last_used=1), worker("p2", last_used=2)], needs()
    )
    assert (choice[0].worker_id, choice[1]) == ("p1", "its turn among 3")


def test_least_tokens_takes_the_one_with_the_fewest_and_among_equals_the_one_chosen_longest_ago() -> None:
    policy = LeastTokens(Role.PREFILL)
    choice = policy.choose([worker("p0", 9), worker("p1", 7), worker("p2", 8)], needs())
    assert (choice[0].worker_id, choice[1]) == ("p1", "7 outstanding tokens, the fewest of 3")
    assert policy.choose([worker("p0", last_used=2), worker("p1", last_used=1)], needs())[0].worker_id == "p1"


def test_random_draws_evenly_and_the_same_for_the_same_request() -> None:
    policy, workers = Random(Role.PREFILL), [worker(f"p{number}") for number in range(4)]
    assert policy.choose(workers, needs(ticket=7)) == policy.choose(workers[::-1], needs(ticket=7))
    assert policy.choose(workers, needs())[1] == "drawn from 4"
    counts = Counter(policy.choose(workers, needs(ticket=ticket))[0].worker_id for ticket in range(4000))
    assert all(850 < counts[each.worker_id] < 1150 for each in workers), counts
    other = Random(Role.DECODE)
    same = sum(
        policy.choose(workers, needs(ticket=t))[0] is other.choose(workers, needs(ticket=t))[0] for t in range(4000)
    )
    assert 850 < same < 1150, "the two roles are drawn independently"


def test_power_of_two_never_takes_the_most_loaded_and_draws_all_pairs_evenly() -> None:
    policy, workers = PowerOfTwo(Role.PREFILL), [worker(f"p{number}", number) for number in range(4)]
    counts = Counter(policy.choose(workers, needs(ticket=ticket))[0].worker_id for ticket in range(6000))
    # Of the six pairs, p0 is the lesser in three, p1 in two, and p2 in one.
    for name, share in (("p0", 3), ("p1", 2), ("p2", 1)):
        assert share * 1000 * 0.85 < counts[name] < share * 1000 * 1.15, counts
    assert counts["p3"] == 0
    chosen, why = policy.choose(workers[:2], needs())
    assert (chosen.worker_id, why) == ("p0", "0 outstanding tokens, p1 has 1; drawn from 2")


def cached_on(**tokens: int) -> Needs:
    """A request of 20 prompt tokens, of which these workers have that many in their caches."""
    return needs(cached=tokens)


AFFINITY: dict[str, tuple[list[WorkerView], Needs, str, str]] = {
    "nothing cached anywhere": (
        [worker("p0", 9), worker("p1", 7)],
        needs(),
        "p1",
        "no prefix cached; 7 outstanding tokens, the fewest of 2",
    ),
    "the longest prefix, though others have less to do": (
        [worker("p0", 1000), worker("p1", 900), worker("p2")],
        cached_on(p0=16, p1=8),
        "p0",
        "16 of 20 prompt tokens cached, the most of 3",
    ),
    "of equal prefixes the least loaded": (
        [worker("p0", 9), worker("p1", 7), worker("p2")],
        cached_on(p0=16, p1=16),
        "p1",
        "16 of 20 prompt tokens cached, the most of 3",
    ),
    "not yet skewed": (
        [worker("p0", 2 * 50 + 1024), worker("p1", 50)],
        cached_on(p0=16),
        "p0",
        "16 of 20 prompt tokens cached, the most of 2",
    ),
    "skewed": (
        [worker("p0", 2 * 50 + 1025), worker("p1", 50)],
        cached_on(p0=16),
        "p1",
        "the load is skewed: p0 has 16 tokens cached, but 1125 outstanding; 50 outstanding tokens, the fewest of 2",
    ),
}


@pytest.mark.parametrize(("workers", "wanted", "chosen", "why"), AFFINITY.values(), ids=AFFINITY)
def test_prefix_affinity_goes_to_the_longest_prefix_unless_the_load_is_skewed(
    workers: list[WorkerView], wanted: Needs, chosen: str, why: str
) -> None:
    worker, reason = PrefixAffinity(Role.PREFILL).choose(workers, wanted)
    assert (worker.worker_id, reason) == (chosen, why)


COSTS: dict[str, tuple[Role, list[WorkerView], Needs, str, str]] = {
    "all else equal, where most is cached": (
        Role.PREFILL,
        [worker("p0"), worker("p1")],
        cached_on(p1=16),
        "p1",
        "cost 4, the least of 2: 1 of 5 blocks not cached, 0 waiting, 0 active",
    ),
    "a longer wait than what is saved": (
        Role.PREFILL,
        [worker("p0"), worker("p1", prompt_tokens=17, free_blocks=27)],
        cached_on(p1=16),
        "p0",
        "cost 20, the least of 2: 5 of 5 blocks not cached, 0 waiting, 0 active",
    ),
    "a shorter wait than what is saved": (
        Role.PREFILL,
        [worker("p0"), worker("p1", prompt_tokens=12, free_blocks=29)],
        cached_on(p1=16),
        "p1",
        "cost 16, the least of 2: 1 of 5 blocks not cached, 3 waiting, 0 active",
    ),
    "everything cached: a token has to be computed nevertheless": (
        Role.PREFILL,
        [worker("p0"), worker("p1")],
        cached_on(p0=20),
        "p0",
        "cost 4, the least of 2: 1 of 5 blocks not cached, 0 waiting, 0 active",
    ),
    "fewer blocks in use on decode": (
        Role.DECODE,
        [worker("d0", free_blocks=20), worker("d1", free_blocks=26)],
        cached_on(d0=16),
        "d1",
        "cost 11, the least of 2: 5 of 5 blocks not cached, 0 waiting, 6 active",
    ),
    "more of them cached on decode": (
        Role.DECODE,
        [worker("d0", free_blocks=24), worker("d1", free_blocks=26)],
        cached_on(d0=16),
        "d0",
        "cost 9, the least of 2: 1 of 5 blocks not cached, 0 waiting, 8 active",
    ),
    "blocks placed since the heartbeat count": (
        Role.DECODE,
        [worker("d0", blocks_placed=3), worker("d1", blocks_placed=2)],
        needs(),
        "d1",
        "cost 7, the least of 2: 5 of 5 blocks not cached, 0 waiting, 2 active",
    ),
    "equal costs in turns": (
        Role.PREFILL,
        [worker("p0", last_used=2), worker("p1", last_used=1)],
        needs(),
        "p1",
        "cost 20, the least of 2: 5 of 5 blocks not cached, 0 waiting, 0 active",
    ),
}


@pytest.mark.parametrize(("role", "workers", "wanted", "chosen", "why"), COSTS.values(), ids=COSTS)
def test_kv_aware_weighs_missing_blocks_against_active_ones(
    role: Role, workers: list[WorkerView], wanted: Needs, chosen: str, why: str
) -> None:
    worker, reason = KVAware(role).choose(workers, wanted)
    assert (worker.worker_id, reason) == (chosen, why)


def test_a_session_stays_on_its_worker_whatever_the_load_and_moves_only_if_that_is_gone() -> None:
    policy, workers = Session(Role.PREFILL), [worker(f"p{number}") for number in range(5)]
    homes = {f"s{n}": policy.choose(workers, needs(session=f"s{n}"))[0].worker_id for n in range(1000)}
    assert all(140 < count < 260 for count in Counter(homes.values()).values()), "sessions are spread"
    loaded = [worker(f"p{number}", 99 * number, last_used=number) for number in range(4)]
    for session, home in homes.items():
        now = policy.choose(loaded, needs(session=session))[0].worker_id
        assert now == home or home == "p4"
    assert policy.choose(workers, needs(session="s1"))[1] == "that of the session among 5"


def test_without_a_session_the_least_loaded_gets_the_request_and_the_reason_says_so() -> None:
    choice = Session(Role.DECODE).choose([worker("d0", 9), worker("d1", 7)], needs())
    assert (choice[0].worker_id, choice[1]) == ("d1", "no session id; 7 outstanding tokens, the fewest of 2")


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
    "the host before a faster link": (
        [worker("d0", last_used=2), worker("d1", last_used=1), worker("d2", node="b")],
        "d1",
        "0 outstanding tokens, the fewest of 3, on the host of p0",
    ),
    "links of about the same rate in turns": (
        [worker("d0", last_used=1), worker("d1", last_used=2)],
        "d0",
        "0 outstanding tokens, the fewest of 2",
    ),
    "a link without a measured rate, so that it gets one": (
        [worker("d2", last_used=2), worker("d3", last_used=1), worker("d0")],
        "d3",
        "0 outstanding tokens, the fewest of 3, over the fastest link",
    ),
    "the least loaded before the nearest": (
        [worker("d0", 1), worker("d1", node="b")],
        "d1",
        "0 outstanding tokens, the fewest of 2",
    ),
}


@pytest.mark.parametrize(("workers", "chosen", "why"), LINKS.values(), ids=LINKS)
def test_equal_decode_workers_are_chosen_by_their_link(workers: list[WorkerView], chosen: str, why: str) -> None:
    worker, reason = LeastTokens(Role.DECODE).choose(workers, needs(), P0)
    assert (worker.worker_id, reason) == (chosen, why)


NEAREST: dict[str, tuple[list[WorkerView], WorkerView | None, str, str]] = {
    "the host before the load": (
        [worker("d0", 90), worker("d1", 80), worker("d2", node="b")],
        P0,
        "d1",
        "80 outstanding tokens, the fewest of 2, on the host of p0",
    ),
    "the faster link before the load": (
        [worker("d0", node="b"), worker("d2", 50, node="c")],
        P0,
        "d2",
        "the only one over the fastest link",
    ),
    "turns among equally near ones": (
        [worker("d0", last_used=2), worker("d1", last_used=1)],
        P0,
        "d1",
        "0 outstanding tokens, the fewest of 2",
    ),
    "the load if there is no source": (
        [worker("d0", 9), worker("d1", 7, node="b")],
        None,
        "d1",
        "7 outstanding tokens, the fewest of 2",
    ),
}


@pytest.mark.parametrize(("workers", "source", "chosen", "why"), NEAREST.values(), ids=NEAREST)
def test_nearest_link_goes_by_load_only_among_near_workers(
    workers: list[WorkerView], source: WorkerView | None, chosen: str, why: str
) -> None:
    worker, reason = NearestLink(Role.DECODE).choose(workers, needs(), source)
    assert (worker.worker_id, reason) == (chosen, why)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_choice_does_not_depend_on_the_order_of_the_candidates(policy: type[Policy]) -> None:
    chooser = policy.of(Role.DECODE, RouterConfig(slo=SloConfig(itl_ms=20)))
    workers = [worker(f"d{number}", number % 2, last_used=number % 3) for number in range(4)]
    for ticket in range(20):
        wanted = needs(ticket=ticket, session=str(ticket % 3 or ""), cached={f"d{ticket % 4}": 4 * (ticket % 3)})
        assert chooser.choose(workers, wanted, P0) == chooser.choose(workers[::-1], wanted, P0)
