"""What gateways and the scaling controller of a service tell each other: the load, and what was done about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pdserve.core.worker import Role

SHARES = (0.25, 1 / 3, 0.4, 0.5, 0.6, 2 / 3, 0.75, 0.8, 0.9, 1.0)
"""Shares of an objective up to which durations are counted apart."""

PROMPT_SIZES = tuple(round(16 * 2 ** (step / 2)) for step in range(33))
"""Tokens up to which prompts are counted apart: from 16 to a million, each 1.4 times the one before."""


class WorkerSteps(msgspec.Struct, array_like=True):
    """The steps that a worker's engine has computed in this life, and the seconds that they took."""

    role: Role
    epoch: str
    steps: int
    busy_s: float


class RoleSamples(msgspec.Struct):
    """Sums over all looks at the workers of a role."""

    load: float = 0.0  # the mean share of their capacity in use
    running: float = 0.0  # the mean number of requests in a batch
    short: int = 0  # 1 if the next request waited for a worker of this role
    ready: int = 0  # the number of workers that were ready


class GatewayLoad(msgspec.Struct):
    """Counts since the gateway's start, and its state now.

    Times are between events at the gateway that the client has no part in: a first token counts from when the prompt
    had been read, and a gap until the token reached the gateway.
    """

    ttft: list[int] = []
    """First tokens: for each of `SHARES` those that took longer than the share before and at most this one of the
    objective, then those beyond it. Empty without an objective."""
    itl: list[int] = []
    """The same of gaps between tokens after token 2."""
    first_tokens: int = 0
    prompt_tokens: int = 0
    """Of the requests with a first token."""
    prompts: list[int] = []
    """The same requests by the tokens of their prompts that were computed: for each of `PROMPT_SIZES` those with more
    than the size before and at most this one, then longer ones."""
    gaps: int = 0
    """Further tokens."""
    steps: dict[str, WorkerSteps] = {}
    """Those of each worker so far."""
    looks: int = 0
    """At the workers."""
    samples: dict[Role, RoleSamples] = {}
    """What the looks saw."""
    waiting: int = 0
    """Requests that wait for their first token now."""
    overdue: int = 0
    """Those of them that have missed its objective already."""
    decoding: int = 0
    """Requests that have a first token now."""


def within_objective(counts: Sequence[int]) -> tuple[int, int]:
    """Of `GatewayLoad.ttft` or `itl`: how many met the objective, and how many missed it."""
    return sum(counts[: len(SHARES)]), sum(counts[len(SHARES) :])


@dataclass(frozen=True)
class ScalingReport:
    """What the scaling controller has done, as the gateways show it."""

    controller: str = "off"  # `ScalingConfig.controller`
    last: str = ""  # action
    reason: str = ""  # of the last action
    last_s: float = 0.0  # when it was taken, in seconds since 1970
    actions: dict[str, int] = field(default_factory=dict)  # how many there were, by kind (``flip prefill``)
    verdict: str = ""  # what the controller saw lately, and why it did nothing

    def after(self, last: str, kind: str, reason: str, now_s: float) -> ScalingReport:
        """The report after a further action."""
        actions = {**self.actions, kind: self.actions.get(kind, 0) + 1}
        return replace(self, last=last, reason=reason, last_s=now_s, actions=actions, verdict="")
