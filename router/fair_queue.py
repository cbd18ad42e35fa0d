"""The requests that wait for workers: lower priorities first, the clients of one priority by turns, and each client's
share of a full queue.

Turns are counted in tokens (virtual token counters, Sheng et al. 2024): of the clients that wait, the one that got the
fewest tokens is next. A client that begins to wait starts at the count of the client served last. So it does not save
up turns while it is idle, and does not wait for all requests of a client that sent a thousand before.

A priority is served before later ones, but not for ever: see `AGED_EVERY`.

A client alone may fill the queue. When another one comes then, the client with the most of it loses its newest request,
until both have equal shares."""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from router.prefix_index import Prompt
from router.registry import Assignment
from router.view import Needs, WaitMode

MAX_IDLE = 4096
"""Clients without a waiting request whose counts are kept."""

AGED_EVERY = 8
"""Of so many requests that are served, one may be of a later priority than others that wait, if it has waited for
`pdserve.core.request.AGED_S`. So no priority starves, and the earliest one keeps the rest."""


@dataclass(slots=True, order=True)
class Waiting:
    """A request in the queue."""

    order: int
    """Its position among the requests of its client; a retry keeps it."""
    needs: Needs = field(compare=False)
    client: str = field(compare=False, default="")
    """Whose turn it takes."""
    holder: str = field(compare=False, default="")
    """Whose share of the queue it takes."""
    priority: int = field(compare=False, default=0)
    """Lower values are served first."""
    patient: bool = field(compare=False, default=False)
    """It was placed before. It is not refused because the queue is full, and waits for a missing worker until its
    deadline, others for ``router.patience_s``, if that is set."""
    retry: bool = field(compare=False, default=False)
    """Its worker has failed it. It comes before other requests of its priority, and does not count again."""
    prompt: Prompt | None = field(compare=False, default=None)
    """Its tokens, if prefix caches matter."""
    since_s: float = field(compare=False, default=0.0)
    """When it joined the queue, on the router's clock."""
    placed: asyncio.Future[Assignment] = field(compare=False, default_factory=asyncio.Future)

    @property
    def tokens(self) -> int:
        """What it counts for: the tokens of its prompt, and those it may generate."""
        return self.needs.tokens

    @property
    def turn(self) -> Turn:
        """Whether it is a retry, and its client."""
        return self.retry, self.client


Turn = tuple[bool, str]


@dataclass(slots=True)
class _Account:
    """The tokens that a client got at one priority, and its waiting requests in all modes."""

    tokens: float = 0.0
    waiting: int = 0


class _Level:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.accounts: dict[str, _Account] = {}
        self.queues: dict[WaitMode, dict[Turn, list[Waiting]]] = {}
        """The requests of each client, in order."""
        # Of each queue an entry with its key, or an earlier one: keys only grow. There may be further entries.
        self._heaps: dict[WaitMode, list[tuple[float, int, Turn]]] = {}
        self._reached = 0.0  # the count of the client that was served last, and of each mode
        self._reached_in: dict[WaitMode, float] = {}

    def push(self, waiting: Waiting) -> None:
        mode, client = waiting.needs.mode, waiting.client
        reached = self._reached_in.setdefault(mode, self._reached)
        queues, heap = self.queues.setdefault(mode, {}), self._heaps.setdefault(mode, [])
        if not waiting.retry:
            if client not in self.accounts and len(self.accounts) > 2 * sum(map(len, self.queues.values())) + MAX_IDLE:
                self.accounts = {name: each for name, each in self.accounts.items() if each.waiting}
            account = self.accounts.setdefault(client, _Account())
            if not account.waiting:
                account.tokens = max(account.tokens, reached)
            account.waiting += 1
        queue = queues.setdefault(waiting.turn, [])
        insort(queue, waiting)
        if _first(queue) is waiting:
            heapq.heappush(heap, self._entry(waiting))
            if len(heap) > 2 * len(queues) + 16:
                heap[:] = [self._entry(queue[0]) for queue in queues.values()]
                heapq.heapify(heap)

    def _entry(self, waiting: Waiting) -> tuple[float, int, Turn]:
        # Retries come before the clients of their priority, and have been counted.
        return -1.0 if waiting.retry else self.accounts[waiting.client].tokens, waiting.order, waiting.turn

    def head(self, mode: WaitMode) -> tuple[float, Waiting] | None:
        """The next request of a mode, and the tokens that its client got."""
        heap = self._heaps.get(mode)
        while heap:
            queue = self.queues[mode].get(heap[0][2], ())
            waiting = _first(queue)
            if waiting is None:
                heapq.heappop(heap)
            elif (entry := self._entry(waiting)) == heap[0]:
                return entry[0], waiting
            else:
                heapq.heapreplace(heap, entry)
        return None

    def charge(self, waiting: Waiting) -> None:
        """Count the tokens of a request that is served."""
        if not waiting.retry:
            account, mode = self.accounts[waiting.client], waiting.needs.mode
            self._reached = self._reached_in[mode] = max(self._reached_in[mode], account.tokens)
            account.tokens += waiting.tokens

    def remove(self, waiting: Waiting) -> None:
        mode = waiting.needs.mode
        queues = self.queues[mode]
        queue = queues[waiting.turn]
        index = bisect_left(queue, waiting)
        while queue[index] is not waiting:
            index += 1
        del queue[index]
        if not waiting.retry:
            self.accounts[waiting.client].waiting -= 1
        if not queue:
            del queues[waiting.turn]
        if not queues:
            del self.queues[mode], self._heaps[mode], self._reached_in[mode]


class FairQueue:
    """The waiting requests of all modes. The future of a request that leaves must be done.

    A request whose client did not read counts in its client's share when it waits again, and does not give way. A retry
    does not count, because its client has waited for it already."""

    def __init__(self) -> None:
        self.lengths = Counter[WaitMode]()
        self.tokens = 0
        self._levels: dict[int, _Level] = {}
        self._shares = Counter[str]()  # requests of each holder, and their tokens
        self._token_shares = Counter[str]()

    def push(self, waiting: Waiting) -> None:
        """Add a request."""
        self._levels.setdefault(waiting.priority, _Level()).push(waiting)
        self._count(waiting, 1)

    def served(self, waiting: Waiting) -> None:
        """Note that a request was placed, which counts for its client."""
        self._levels[waiting.priority].charge(waiting)
        self.left(waiting)

    def left(self, waiting: Waiting) -> None:
        """Note that a request was refused or cancelled."""
        level = self._levels[waiting.priority]
        level.remove(waiting)
        if not level.queues:
            del self._levels[waiting.priority]
        self._count(waiting, -1)

    def _count(self, waiting: Waiting, sign: int) -> None:
        self.lengths[waiting.needs.mode] += sign
        self.tokens += sign * waiting.tokens
        if not waiting.retry:
            self._shares[waiting.holder] += sign
            self._token_shares[waiting.holder] += sign * waiting.tokens
            if not self._shares[waiting.holder]:
                del self._shares[waiting.holder], self._token_shares[waiting.holder]

    def head(self, modes: Collection[WaitMode]) -> Waiting | None:
        """The next request of these modes."""
        for _, level in sorted(self._levels.items()):
            if heads := [head for mode in modes if (head := level.head(mode)) is not None]:
                return min(heads)[1]
        return None

    def longest_waiting(self, modes: Collection[WaitMode], after: int) -> Waiting | None:
        """Of the requests that are next in priorities later than ``after``, the one that has waited the longest."""
        levels = [level for priority, level in self._levels.items() if priority > after]
        heads = [head[1] for level in levels for mode in modes if (head := level.head(mode)) is not None]
        return min(heads, key=lambda waiting: waiting.since_s, default=None)

    def waiting(self, mode: WaitMode) -> Iterator[Waiting]:
        """The waiting requests of a mode, in no order."""
        for level in list(self._levels.values()):
            for queue in list(level.queues.get(mode, {}).values()):
                yield from [waiting for waiting in queue if not waiting.placed.done()]

    def prompt_tokens_before(self, waiting: Waiting) -> int:
        """The prompt tokens of the requests of its client and mode that come before a new one. Retries do not count."""
        queues = [
            level.queues.get(waiting.needs.mode, {}).get((False, waiting.client), ())
            for priority, level in self._levels.items()
            if priority <= waiting.priority
        ]
        return sum([each.needs.prompt_tokens for queue in queues for each in queue])

    def way_for(self, holder: str) -> Sequence[Waiting] | None:
        """The request that is refused so that one of ``holder`` can wait: the newest of the holder that has the most.
        Empty if that one's requests must not be refused. None: ``holder`` has its share already, and its request is
        refused."""
        if not is_below_share(self._shares, holder):
            return None
        return self._newest(max(self._shares, key=self._shares.__getitem__))[:1]

    def way_for_tokens(
        self, holder: str, tokens: int, excess: int, besides: Sequence[Waiting] = ()
    ) -> Sequence[Waiting] | None:
        """The same for a request of so many ``tokens``: those that are refused have at least ``excess`` tokens together
        with those in ``besides``, or are all that may be refused."""
        excess -= sum([each.tokens for each in besides])
        if excess <= 0:
            return ()
        most = max(self._token_shares, key=self._token_shares.__getitem__, default=holder)
        if self._token_shares[most] - excess < self._token_shares[holder] + tokens:
            return None
        way: list[Waiting] = []
        for waiting in self._newest(most):
            if excess <= 0:
                break
            if waiting not in besides:
                way.append(waiting)
                excess -= waiting.tokens
        return way

    def _newest(self, holder: str) -> list[Waiting]:
        """The requests of a holder that may be refused, the newest first."""
        found = [
            waiting
            for mode in self.lengths
            for waiting in self.waiting(mode)
            if waiting.holder == holder and not (waiting.patient or waiting.retry)
        ]
        return sorted(found, key=lambda waiting: waiting.order, reverse=True)


def _first(queue: Sequence[Waiting]) -> Waiting | None:
    """The first request that has not been cancelled."""
    return next((waiting for waiting in queue if not waiting.placed.done()), None)


def is_below_share(counts: Mapping[str, int], client: str) -> bool:
    """Whether ``client`` has less than the one with the most of ``counts``, also with one more."""
    return counts.get(client, 0) + 1 < max(counts.values(), default=0)
