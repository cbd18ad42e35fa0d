"""Who is next in the queue: priorities, then clients by turns, counted in tokens."""

from __future__ import annotations

import random
from collections import Counter

from pdserve.core.request import Mode
from router.fair_queue import MAX_IDLE, FairQueue, Waiting
from router.view import Needs, WaitMode

MODES: tuple[WaitMode, ...] = (Mode.PD, Mode.COLOCATED)


class Line:
    """A queue and the numbers of its requests."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.count = 0

    def add(
        self, client: str, tokens: int = 10, priority: int = 0, *, order: int | None = None, mode: WaitMode = Mode.PD
    ) -> Waiting:
        """A request that joins; with ``order`` it is a retry."""
        self.count += 1
        needs = Needs(mode, tokens - 1, 1)
        waiting = Waiting(
            self.count if order is None else order, needs, client, client, priority, retry=order is not None
        )
        self.queue.push(waiting)
        return waiting

    def serve(self, *modes: WaitMode) -> Waiting:
        """Serve the next one."""
        head = self.queue.head(modes or MODES)
        assert head is not None
        head.placed.set_result(None)  # type: ignore[arg-type]
        self.queue.served(head)
        return head

    def serve_all(self) -> list[str]:
        """Serve all requests; return their clients in order."""
        clients = []
        while self.queue.lengths.total():
            clients.append(self.serve().client)
        assert self.queue.head(MODES) is None
        assert self.queue.tokens == 0
        return clients

    def cancel(self, waiting: Waiting) -> None:
        """Its client leaves."""
        waiting.placed.cancel()
        self.queue.left(waiting)


async def test_clients_get_equal_tokens_not_equal_requests() -> None:
    line = Line()
    for _ in range(400):
        line.add("short", 10)
        line.add("long", 100)
    got = Counter[str]()
    for _ in range(220):
        waiting = line.serve()
        got[waiting.client] += waiting.tokens
    assert abs(got["short"] - got["long"]) <= 100, got


async def test_idle_clients_save_up_nothing_and_owe_what_they_got() -> None:
    line = Line()
    for _ in range(100):
        line.add("a")
    for _ in range(50):
        line.serve()
    for _ in range(20):
        line.add("b")
    assert Counter(line.serve().client for _ in range(20)) == {"a": 10, "b": 10}
    # One that always asks again as soon as it was served gets no more than its share.
    line = Line()
    for _ in range(100):
        line.add("a", 10)
    line.add("greedy", 50)
    got = Counter[str]()
    for _ in range(60):
        waiting = line.serve()
        got[waiting.client] += waiting.tokens
        if waiting.client == "greedy":
            line.add("greedy", 50)
    assert abs(got["a"] - got["greedy"]) <= 60, got


async def test_modes_share_turns() -> None:
    """A client that begins to wait neither lags behind nor is ahead by what others got before."""
    line = Line()
    for _ in range(100):
        line.add("many")
    for _ in range(40):
        line.serve()
    line.add("few", mode=Mode.COLOCATED)
    line.add("many", mode=Mode.COLOCATED)
    assert line.queue.head([Mode.COLOCATED]).client == "few"  # type: ignore[union-attr]
    assert sorted(line.serve().client for _ in range(4)) == ["few", "many", "many", "many"]


async def test_whoever_leaves_is_forgotten_and_nobody_is_lost() -> None:
    """Against a list, at random, with cancellations that the queue hears of late."""
    for seed in range(30):
        draw, line = random.Random(seed), Line()
        waiting: list[Waiting] = []
        told: list[Waiting] = []
        for _ in range(600):
            match draw.choice(("add", "add", "retry", "serve", "cancel", "cancel late", "hear")):
                case "add":
                    client, priority = draw.choice("abcdefgh"), draw.choice((0, 0, 0, 1, -1))
                    waiting.append(line.add(client, draw.randint(1, 50), priority))
                case "retry":
                    waiting.append(line.add("a", priority=draw.choice((0, 1)), order=-draw.randrange(10**6)))
                case "serve" if waiting:
                    served = line.serve()
                    waiting.remove(served)
                    assert served.priority == min([served.priority, *(each.priority for each in waiting)])
                    assert served.order <= min([served.order, *(each.order for each in waiting if (each.client,
                        each.priority, each.retry) == (served.client, served.priority, served.retry))])  # fmt: skip
                case "cancel" if waiting:
                    line.cancel(waiting.pop(draw.randrange(len(waiting))))
                case "cancel late" if waiting:
                    left = waiting.pop(draw.randrange(len(waiting)))
                    left.placed.cancel()
                    told.append(left)
                case "hear" if told:
                    line.queue.left(told.pop())
            assert line.queue.lengths.total() == len(waiting) + len(told)
            assert line.queue.tokens == sum(each.tokens for each in waiting + told)
            assert (line.queue.head(MODES) is None) == (not waiting)
            assert {id(each) for each in line.queue.waiting(Mode.PD)} == {id(each) for each in waiting}
        for left in told:
            line.queue.left(left)
        assert len(line.serve_all()) == len(waiting)
        assert not line.queue._levels
        assert not line.queue._shares


async def test_clients_that_come_once_are_not_remembered_for_ever() -> None:
    line = Line()
    line.add("always")
    for number in range(3 * MAX_IDLE):
        line.add(f"client {number}")
        line.serve()
        if not number % 3:
            line.add("always")
    (level,) = line.queue._levels.values()
    assert len(level.accounts) <= MAX_IDLE + 3
