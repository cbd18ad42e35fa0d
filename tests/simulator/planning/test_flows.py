"""Transfers that share links: max-min fair at any time, and no byte is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from simulator.loop import World, WorldLoop
from simulator.planning.flows import Flow, Pipe


def raise_error(context: dict[str, Any]) -> None:
    raise AssertionError(context)


class Links:
    """Flows in a world of their own, and when each was drained."""

    def __init__(self) -> None:
        self.world = World(random.Random(0), raise_error, 0.0)
        self.loop = WorldLoop(self.world, "links")  # type: ignore[abstract]
        self.began_s = self.world.now()
        self.loop.call_later(1e3, lambda: None)  # so that the world does not end with the last flow
        self.drained: dict[str, float] = {}

    def flow(self, name: str, pipes: list[Pipe], most: float = float("inf")) -> Flow:
        """A flow, whose end is noted."""
        return Flow(self.loop, pipes, lambda: self.drained.update({name: self.world.now() - self.began_s}), most)

    def run(self, flows: int) -> None:
        """Until so many are drained."""
        assert self.world.run(lambda: len(self.drained) == flows, self.began_s + 1e6)


def test_two_share_and_the_second_has_the_rest() -> None:
    links, pipe = Links(), Pipe("a", 100.0)
    first, second = links.flow("first", [pipe]), links.flow("second", [pipe])
    first.add(100)
    second.add(200)
    links.run(2)
    assert links.drained == pytest.approx({"first": 2.0, "second": 3.0})
    assert pipe.carried == pytest.approx(300)


def test_a_later_flow_takes_its_share_from_then_on() -> None:
    links, pipe = Links(), Pipe("a", 100.0)
    first, second = links.flow("first", [pipe]), links.flow("second", [pipe])
    first.add(200)
    links.loop.call_later(1.0, second.add, 100)
    links.run(2)
    assert links.drained == pytest.approx({"first": 3.0, "second": 3.0})


def test_bytes_that_are_added_later_go_on_at_once() -> None:
    links, pipe = Links(), Pipe("a", 100.0)
    flow = links.flow("flow", [pipe])
    flow.add(100)
    links.loop.call_later(0.5, flow.add, 100)
    links.run(1)
    assert links.drained == pytest.approx({"flow": 2.0})


def test_what_one_does_not_use_the_others_have() -> None:
    links, narrow, wide = Links(), Pipe("narrow", 10.0), Pipe("wide", 100.0)
    held, free, slow = links.flow("held", [narrow, wide]), links.flow("free", [wide]), links.flow("slow", [wide], 20.0)
    for flow in (held, free, slow):
        flow.add(1e6)
    assert [flow.rate for flow in (held, free, slow)] == pytest.approx([10.0, 70.0, 20.0])


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_max_min_fair(seed: int) -> None:
    """No link carries more than it can, and each flow has a link that is full and on which none is faster, or all that
    it may have."""
    draw, links = random.Random(seed), Links()
    pipes = [Pipe(str(number), draw.uniform(1, 100)) for number in range(6)]
    flows = [
        links.flow(
            str(number), draw.sample(pipes, draw.randint(1, 3)), draw.choice((float("inf"), draw.uniform(1, 50)))
        )
        for number in range(12)
    ]
    for flow in flows:
        flow.add(1e9)
    for pipe in pipes:
        assert sum(flow.rate for flow in pipe.flows) <= pipe.bytes_per_s * (1 + 1e-9)
    for flow in flows:
        full = [pipe for pipe in flow.pipes if sum(f.rate for f in pipe.flows) >= pipe.bytes_per_s * (1 - 1e-9)]
        fastest = [max(f.rate for f in pipe.flows) for pipe in full]
        assert flow.rate == pytest.approx(flow.most_bytes_per_s) or any(
            flow.rate >= rate * (1 - 1e-9) for rate in fastest
        )


def test_fast_links_come_to_an_end() -> None:
    """Where the clock is too coarse for the last byte."""
    links, pipe = Links(), Pipe("a", 4.5e11)
    flows = [links.flow(str(number), [pipe]) for number in range(50)]
    for number, flow in enumerate(flows):
        links.loop.call_later(number * 1e-5 / 3, flow.add, 1_234_567.0 + number)
    links.run(50)
    assert pipe.carried == pytest.approx(sum(1_234_567.0 + number for number in range(50)), rel=1e-6)
