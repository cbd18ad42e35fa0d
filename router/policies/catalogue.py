"""The policies by name, and those that a service uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pdserve.core.config import RouterConfig
from pdserve.core.worker import Role
from router.policies.kv_aware import KVAware
from router.policies.least_tokens import LeastTokens
from router.policies.nearest_link import NearestLink
from router.policies.policy import Policy
from router.policies.power_of_two import PowerOfTwo
from router.policies.prefix_affinity import PrefixAffinity
from router.policies.random import Random
from router.policies.round_robin import RoundRobin
from router.policies.session import Session
from router.policies.slo import Slo

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (RoundRobin, Random, LeastTokens, PowerOfTwo, PrefixAffinity, KVAware, Session, Slo, NearestLink)
}


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a service: ``prefill`` chooses the worker that computes the prompt, ``decode`` the one that its
    KV is sent to."""

    prefill: Policy
    decode: Policy

    @classmethod
    def of(cls, config: RouterConfig) -> Self:
        """The policies that ``router.policy`` names."""
        names = config.policies
        return cls(POLICIES[names.prefill].of(Role.PREFILL, config), POLICIES[names.decode].of(Role.DECODE, config))

    @property
    def use_prefixes(self) -> bool:
        """Whether one of them needs to know what is in prefix caches."""
        return self.prefill.uses_prefixes or self.decode.uses_prefixes
