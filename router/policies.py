"""How one worker is chosen among several that could take the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from pdserve.core.errors import ConfigError


class WorkerView(Protocol):
    """What a policy may look at. ``last_used`` grows with every choice; 0 was never chosen."""

    @property
    def worker_id(self) -> str:
        """The worker's name."""
        ...

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of the requests on it: prompts and what they may still generate."""
        ...

    @property
    def last_used(self) -> int:
        """The number of the choice that took it last."""
        ...


W = TypeVar("W", bound=WorkerView)


class RoutingPolicy(Protocol):
    """Chooses among workers that are ready and allowed; it is never asked with none."""

    def choose(self, candidates: Sequence[W]) -> W:
        """One of ``candidates`` (at least one)."""
        ...


class RoundRobin:
    """One after the other, by name; remembers whom it took last."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[W]) -> W:
        """The next by name after the one taken last."""
        by_name = sorted(candidates, key=lambda worker: worker.worker_id)
        chosen = next((worker for worker in by_name if worker.worker_id > self._last), by_name[0])
        self._last = chosen.worker_id
        return chosen


class LeastOutstandingTokens:
    """The one with the fewest outstanding tokens; among equals the one that was not used for longest."""

    def choose(self, candidates: Sequence[W]) -> W:
        """The least loaded."""
        return min(candidates, key=lambda worker: (worker.outstanding_tokens, worker.last_used, worker.worker_id))


_POLICIES: dict[str, type[RoundRobin] | type[LeastOutstandingTokens]] = {
    "round_robin": RoundRobin,
    "least_outstanding_tokens": LeastOutstandingTokens,
}


def create_policy(name: str) -> RoutingPolicy:
    """A fresh policy (they may keep state: one per role); `ConfigError` for a name that does not exist."""
    if name not in _POLICIES:
        raise ConfigError(f"router.policy: {name!r} does not exist; one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
