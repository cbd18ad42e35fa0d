"""How much of the queue each client has, and who gives way when it is full.

A client alone may fill the queue. When another one comes then, the client with the most of it loses its newest request,
until both have equal shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.waiting import Waiting


def is_below_share(counts: Mapping[str, int], client: str) -> bool:
    """Whether ``client`` has less than the one with the most of ``counts``, also with one more."""
    return counts.get(client, 0) + 1 < max(counts.values(), default=0)


@dataclass(slots=True)
class _Share:
    """The requests of one client: their number, and their tokens. ``requests``: those that can give way, oldest first.
    Those that left early stay until they are the newest, or the majority."""

    requests: list[Waiting] = field(default_factory=list)
    length: int = 0
    tokens: int = 0


class QueueShares:
    """The shares of all clients that wait. A request whose client did not read counts in its client's share when it
    waits again, and does not give way. A retry does not count, because its client has waited for it already."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}

    def join(self, waiting: Waiting) -> None:
        """Add a request."""
        if waiting.retry:
            return
        share = self._shares.setdefault(waiting.holder, _Share())
        if not waiting.patient:
            share.requests.append(waiting)
        share.length += 1
        share.tokens += waiting.tokens

    def leave(self, waiting: Waiting) -> None:
        """Note that a request has left. Its future must be done."""
        if waiting.retry:
            return
        share = self._shares[waiting.holder]
        share.length -= 1
        share.tokens -= waiting.tokens
        if not share.length:
            del self._shares[waiting.holder]
        elif len(share.requests) > 2 * share.length + 16:
            share.requests = [each for each in share.requests if not each.placed.done()]

    def way_for(self, client: str) -> list[Waiting] | None:
        """The request that is refused so that one of ``client`` can wait: the newest of the client that has the most.
        The list is empty if that client's requests must not be refused. None: ``client`` has its share already, and its
        request is refused. Takes time in proportion to the number of clients."""
        own = self._shares.get(client, _Share())
        most = max(self._shares.values(), key=lambda share: share.length, default=own)
        if own.length + 1 >= most.length:
            return None
        while most.requests and most.requests[-1].placed.done():
            most.requests.pop()
        return most.requests[-1:]

    def way_for_tokens(
        self, client: str, tokens: int, excess: int, besides: Sequence[Waiting] = ()
    ) -> list[Waiting] | None:
        """The requests, of at least ``excess`` tokens in all, that are refused so that one of ``client`` with so many
        ``tokens`` can wait: the newest of the client that has the most tokens, without those in ``besides``. There are
        fewer if that client's other requests must not be refused. None: ``client`` has its share already, and its
        request is refused."""
        own = self._shares.get(client, _Share())
        most = max(self._shares.values(), key=lambda share: share.tokens, default=own)
        if most.tokens - excess < own.tokens + tokens:
            return None
        way: list[Waiting] = []
        for waiting in reversed(most.requests):
            if excess <= 0:
                break
            if not waiting.placed.done() and waiting not in besides:
                way.append(waiting)
                excess -= waiting.tokens
        return way
