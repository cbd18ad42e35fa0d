"""Which of several gateways a stream asks, and which one after it if that one fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from pdserve.core.errors import NotReady


class HasTarget(Protocol):
    """A gateway, as far as it matters here."""

    @property
    def target(self) -> str:
        """Where it is."""
        ...


G = TypeVar("G", bound=HasTarget)


class Failover(Generic[G]):
    """The gateways of one stream, asked in this order and in a circle. None is asked a second time before `served`. Not
    thread-safe."""

    def __init__(self, gateways: Sequence[G]) -> None:
        self._gateways = tuple(gateways)
        self._index = 0
        self._failed: set[str] = set()  # targets

    @property
    def current(self) -> G:
        """The gateway that is asked."""
        return self._gateways[self._index]

    def served(self) -> None:
        """Note that a token has come: every gateway may be asked again."""
        self._failed.clear()

    def turn(self, error: NotReady) -> None:
        """Turn from the current gateway, which has failed with ``error``, to the next one that has not. Raises
        ``error`` if all have."""
        self._failed.add(self.current.target)
        count = len(self._gateways)
        for index in [(self._index + step) % count for step in range(1, count)]:
            if self._gateways[index].target not in self._failed:
                self._index = index
                return
        raise error
