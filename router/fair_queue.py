"""Queues that serve lower priorities first, and the clients of one priority by turns.

Turns are counted in tokens (virtual token counters, Sheng et al. 2024): of the clients that wait, the one that got the
fewest tokens is next. A client that begins to wait starts at the count of the client served last. So it does not save
up turns while it is idle, and does not wait for all requests of a client that sent a thousand before.

A priority is served before later ones, but not for ever: see `AGED_EVERY`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.waiting import Waiting

MAX_IDLE = 4096
"""Clients without a waiting request whose counts are kept."""

AGED_EVERY = 8
"""Of so many requests that are served, one may be of a later priority than others that wait, if it has waited for
`pdserve.core.request.AGED_S`. So no priority starves, and the earliest one keeps the rest."""

Key = tuple[int, float, int]
"""Priority, the client's count, and position: the request with the lowest is next."""


@dataclass(slots=True)
class _Account:
    """The tokens that a client got, and its waiting requests in all queues."""

    tokens: float = 0.0
    waiting: int = 0


class _Accounts:
    """The accounts of one priority. ``reached`` is the count of the client that was served last."""

    def __init__(self) -> None:
        self.by_client: dict[str, _Account] = {}
        self.queues = 0  # queues in which requests of this priority wait
        self.reached = 0.0
        self._waiting = 0

    def join(self, client: str, reached: float) -> _Account:
        """The account of a client with one more waiting request. If it is the only one, the count is at least
        ``reached``."""
        account = self.by_client.get(client)
        if account is None:
            if len(self.by_client) > 2 * self._waiting + MAX_IDLE:
                self.by_client = {name: each for name, each in self.by_client.items() if each.waiting}
            account = self.by_client[client] = _Account()
        if not account.waiting:
            self._waiting += 1
            account.tokens = max(account.tokens, reached)
        account.waiting += 1
        return account

    def leave(self, account: _Account) -> None:
        """Note that a waiting request has left."""
        account.waiting -= 1
        self._waiting -= not account.waiting


class Turns:
    """The accounts of all priorities, which the queues of one line share."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Accounts] = {}

    def enter(self, priority: int) -> _Accounts:
        """The accounts of a priority, for a queue in which requests of it begin to wait."""
        accounts = self._accounts.setdefault(priority, _Accounts())
        accounts.queues += 1
        return accounts

    def leave(self, priority: int) -> None:
        """Note that no request of the priority waits in a queue any more. Without any, its accounts are closed."""
        accounts = self._accounts[priority]
        accounts.queues -= 1
        if not accounts.queues:
            del self._accounts[priority]


_RETRIES = _Account(tokens=-1.0)
"""Retries are served before the clients of their priority, and have been counted."""


@dataclass(slots=True, eq=False)
class _ClientQueue:
    """The requests of one client at one priority, oldest first. Those that left early stay until they are at the front,
    or the majority. ``prompt_tokens`` are those of its requests. ``entry`` is the client's valid entry in the heap of
    its level."""

    account: _Account
    heap: list[Waiting] = field(default_factory=list)
    length: int = 0
    prompt_tokens: int = 0
    entry: tuple[float, int, int, _ClientQueue] | None = None

    @property
    def head(self) -> Waiting | None:
        while self.heap and self.heap[0].placed.done():
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None

    def left(self, waiting: Waiting) -> None:
        self.length -= 1
        self.prompt_tokens -= waiting.needs.prompt_tokens
        if len(self.heap) > 2 * self.length + 16:
            self.heap = [waiting for waiting in self.heap if not waiting.placed.done()]
            heapq.heapify(self.heap)


class _Level:
    """The requests of one priority in one queue. Entries of its heap may be out of date: counts only grow."""

    def __init__(self, accounts: _Accounts) -> None:
        self.length = 0
        self._accounts = accounts
        self._reached = accounts.reached
        self._clients: dict[str | None, _ClientQueue] = {}
        self._heap: list[tuple[float, int, int, _ClientQueue]] = []
        self._numbers = itertools.count()

    def push(self, waiting: Waiting) -> None:
        """Add a request."""
        name = None if waiting.retry else waiting.client
        queue = self._clients.get(name)
        account = _RETRIES if name is None else self._accounts.join(name, self._reached)
        if queue is None:
            queue = self._clients[name] = _ClientQueue(account)
        heapq.heappush(queue.heap, waiting)
        queue.length += 1
        queue.prompt_tokens += waiting.needs.prompt_tokens
        self.length += 1
        if queue.entry is None or (account.tokens, waiting.order) < queue.entry[:2]:
            queue.entry = (account.tokens, waiting.order, next(self._numbers), queue)
            heapq.heappush(self._heap, queue.entry)

    @property
    def head(self) -> tuple[float, Waiting] | None:
        """The next request, and its client's count."""
        while self._heap:
            entry = self._heap[0]
            queue = entry[3]
            waiting = queue.head if queue.entry is entry else None
            if waiting is None:
                heapq.heappop(self._heap)
                if queue.entry is entry:
                    queue.entry = None
            elif (queue.account.tokens, waiting.order) == entry[:2]:
                return entry[0], waiting
            else:
                queue.entry = (queue.account.tokens, waiting.order, next(self._numbers), queue)
                heapq.heapreplace(self._heap, queue.entry)
        return None

    def charge(self, waiting: Waiting) -> None:
        """Count the tokens of a request that is served."""
        if not waiting.retry:
            account = self._clients[waiting.client].account
            self._reached = self._accounts.reached = max(self._reached, account.tokens)
            account.tokens += waiting.tokens

    def left(self, waiting: Waiting) -> None:
        """Note that a request has left. Its future must be done."""
        name = None if waiting.retry else waiting.client
        queue = self._clients[name]
        queue.left(waiting)
        self.length -= 1
        if name is not None:
            self._accounts.leave(queue.account)
        if not queue.length:
            queue.entry = None
            del self._clients[name]
        if len(self._heap) > 2 * len(self._clients) + 16:
            self._heap = [queue.entry for queue in self._clients.values() if queue.entry is not None]
            heapq.heapify(self._heap)

    def prompt_tokens_of(self, client: str) -> int:
        """The prompt tokens of a client's requests, without retries."""
        queue = self._clients.get(client)
        return queue.prompt_tokens if queue is not None else 0

    def waiting(self) -> Iterator[Waiting]:
        """The waiting requests, in no order."""
        for queue in list(self._clients.values()):
            yield from [waiting for waiting in queue.heap if not waiting.placed.done()]


class FairQueue:
    """Requests that wait for the same kind of workers. Every operation takes time logarithmic in their number.

    ``length`` and ``tokens`` count the waiting requests. A request that leaves must have a future that is done."""

    def __init__(self, turns: Turns) -> None:
        self.length = 0
        self.tokens = 0
        self._turns = turns
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # a heap, which may have levels that are gone
        self._listed: set[int] = set()  # what is in it

    def push(self, waiting: Waiting) -> None:
        """Add a request."""
        priority = waiting.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(self._turns.enter(priority))
        if priority not in self._listed:
            self._listed.add(priority)
            heapq.heappush(self._priorities, priority)
        level.push(waiting)
        self.length += 1
        self.tokens += waiting.tokens

    @property
    def head(self) -> tuple[Key, Waiting] | None:
        """The next request, and the key that orders it among the heads of other queues."""
        while self._priorities:
            priority = self._priorities[0]
            level = self._levels.get(priority)
            head = level.head if level is not None else None
            if head is not None:
                return (priority, head[0], head[1].order), head[1]
            self._listed.discard(heapq.heappop(self._priorities))
        return None

    def longest_waiting(self, after: int) -> Waiting | None:
        """Of the requests that are next in priorities later than ``after``, the one that has waited the longest. Takes
        time in proportion to the number of priorities."""
        heads = [level.head for priority, level in self._levels.items() if priority > after]
        return min([head[1] for head in heads if head], key=lambda waiting: waiting.since_s, default=None)

    def served(self, waiting: Waiting) -> None:
        """Note that a request was placed, which counts for its client."""
        self._levels[waiting.priority].charge(waiting)
        self.left(waiting)

    def left(self, waiting: Waiting) -> None:
        """Note that a request was refused or cancelled."""
        level = self._levels[waiting.priority]
        level.left(waiting)
        if not level.length:
            del self._levels[waiting.priority]
            self._turns.leave(waiting.priority)
        self.length -= 1
        self.tokens -= waiting.tokens

    def prompt_tokens_before(self, client: str, priority: int) -> int:
        """The prompt tokens of a client's requests that come before a new one of this ``priority``. Takes time in
        proportion to the number of priorities."""
        return sum([level.prompt_tokens_of(client) for each, level in self._levels.items() if each <= priority])

    def waiting(self) -> list[Waiting]:
        """The waiting requests, in no order."""
        return [waiting for level in self._levels.values() for waiting in level.waiting()]
