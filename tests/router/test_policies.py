from __future__ import annotations

from dataclasses import dataclass

import pytest

from pdserve.core.errors import ConfigError
from router.policies import LeastOutstandingTokens, RoundRobin, create_policy


@dataclass
class View:
    worker_id: str
    outstanding_tokens: int = 0
    last_used: int = 0


def test_round_robin_goes_round_by_name_and_survives_a_shrinking_set() -> None:
    policy = RoundRobin()
    a, b, c = View("a"), View("b"), View("c")
    assert [policy.choose([c, a, b]).worker_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.choose([a, c]) is c
    assert policy.choose([b]) is b


def test_least_outstanding_prefers_light_then_long_unused_then_name() -> None:
    policy = LeastOutstandingTokens()
    assert policy.choose([View("a", 5), View("b", 4)]).worker_id == "b"
    assert policy.choose([View("a", 5, last_used=2), View("b", 5, last_used=1)]).worker_id == "b"
    assert policy.choose([View("b"), View("a")]).worker_id == "a"


def test_create_policy_makes_fresh_ones_and_names_the_key() -> None:
    assert isinstance(create_policy("round_robin"), RoundRobin)
    assert create_policy("round_robin") is not create_policy("round_robin")
    assert isinstance(create_policy("least_outstanding_tokens"), LeastOutstandingTokens)
    with pytest.raises(ConfigError, match=r"router\.policy: 'luck'"):
        create_policy("luck")
