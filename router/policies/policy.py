"""What a routing policy is, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

from pdserve.core.config import RouterConfig
from pdserve.core.worker import Role
from router.cost_model import Costs
from router.needs import Needs
from router.worker_view import WorkerView

LINK_FACTOR = 2.0
"""A link counts as faster than another one if the rate measured on it is at least this many times as high. Rates of
equal links differ by less."""


class Policy(ABC):
    """Chooses a worker of one role. It has no state: equal arguments give equal choices."""

    name: ClassVar[str]
    uses_prefixes: ClassVar[bool] = False
    """Whether it reads `Needs.cached`."""

    def __init__(self, role: Role) -> None:
        self.role = role

    @classmethod
    def of(cls, role: Role, config: RouterConfig) -> Self:
        """The policy for a role, with its settings."""
        return cls(role)

    def given(self, costs: Costs) -> Self:
        """The policy with what the cost model knows. Most do not need it."""
        return self

    @abstractmethod
    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """Choose one of ``candidates``, of which there are at least two, and say why in a few words.

        ``source`` is the prefill worker of a decode worker that is chosen, with links to all candidates.
        """


def least(
    candidates: Sequence[WorkerView], costs: Sequence[float], source: WorkerView | None = None
) -> tuple[WorkerView, str]:
    """The candidate of the least of ``costs``, which has one for each, and words about its link if that decided. Among
    equals, the ``source`` prefers its own host, then a faster link; then it is the turn of the one that was chosen
    longest ago."""
    lowest = min(costs)
    equals = [worker for worker, its in zip(candidates, costs, strict=True) if its == lowest]
    if len(equals) == 1:
        return equals[0], ""
    best, why = (equals, "") if source is None else nearest(equals, source)
    return min(best, key=_turn), why


def nearest(candidates: Sequence[WorkerView], source: WorkerView) -> tuple[Sequence[WorkerView], str]:
    """The candidates on the host of ``source``, or all if there are none; of these the ones with the fastest links.
    The second value says in words what excluded others."""
    near = [worker for worker in candidates if worker.node == source.node]
    why = ""
    if near and len(near) < len(candidates):
        candidates, why = near, f", on the host of {source.worker_id}"
    fastest = _fastest(candidates, source)
    if len(fastest) < len(candidates):
        candidates, why = fastest, f"{why}, over the fastest link"
    return candidates, why


def _fastest(candidates: Sequence[WorkerView], source: WorkerView) -> list[WorkerView]:
    """The candidates whose links are within `LINK_FACTOR` of the fastest one. A link without a measured rate is among
    them, so that it is measured."""
    rates = [source.linked[worker.worker_id] for worker in candidates]
    bound = max(rates) / LINK_FACTOR
    return [worker for worker, rate in zip(candidates, rates, strict=True) if rate == 0.0 or rate > bound]


def _turn(worker: WorkerView) -> tuple[int, str]:
    """The order in which equal workers take turns; unused workers by name."""
    return worker.last_used, worker.worker_id
