"""A worker's links: wanted links are opened, broken ones are opened again, and each change is reported once."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from contract.control import Failure, LinkState
from pdserve.core.errors import LayoutMismatch, PdserveError, TransferTimeout
from pdserve.core.handoff import KVPeer, PeerLink
from worker.links import LinkKeeper


def peer(worker_id: str, epoch: str = "1") -> KVPeer:
    return KVPeer(worker_id, epoch, ())


def link(worker_id: str) -> PeerLink:
    return PeerLink(worker_id, "tcp", "a test", 0.0)


@dataclass
class Ends:
    """The KV ends: a link opens at once, unless the test says otherwise."""

    links: dict[str, PeerLink] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    news: int = 0

    async def connect(self, to: KVPeer) -> None:
        self.asked.append(f"{to.worker_id}/{to.epoch}")
        await self.gate.wait()
        if to.worker_id in self.errors:
            raise self.errors[to.worker_id]
        self.links[to.worker_id] = link(to.worker_id)

    def count(self) -> None:
        self.news += 1


@pytest.fixture
def ends() -> Ends:
    ends = Ends()
    ends.gate.set()
    return ends


@pytest.fixture
def keeper(ends: Ends) -> LinkKeeper:
    return LinkKeeper(ends.connect, ends.links.values, ends.count)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_wanted_link_is_opened_once_and_reported(ends: Ends, keeper: LinkKeeper) -> None:
    ends.gate.clear()
    for _ in range(3):
        keeper.want("a", [peer("d0"), peer("d1")])
        await settle()
    assert ends.asked == ["d0/1", "d1/1"]
    assert keeper.states() == []
    ends.gate.set()
    await settle()
    assert keeper.states() == [LinkState("d0", "1", link("d0")), LinkState("d1", "1", link("d1"))]
    assert ends.news == 2
    keeper.want("a", [peer("d0"), peer("d1")])
    await settle()
    assert (len(ends.asked), ends.news) == (2, 2)


async def test_a_failed_link_is_retried_and_reported_once(ends: Ends, keeper: LinkKeeper) -> None:
    ends.errors = {"d0": TransferTimeout("no answer")}
    for turn in range(1, 4):
        keeper.want("a", [peer("d0"), peer("d1")])
        await settle()
        assert keeper.states()[0] == LinkState("d0", "1", Failure("TransferTimeout", "no answer"))
        assert ends.asked.count("d0/1") == turn
    assert ends.news == 2
    ends.errors = {"d0": LayoutMismatch("dtype differs")}
    keeper.want("a", [peer("d0"), peer("d1")])
    await settle()
    assert keeper.states()[0] == LinkState("d0", "1", Failure("LayoutMismatch", "dtype differs"))
    assert ends.news == 2, "the next heartbeat tells it soon enough"
    ends.errors = {}
    keeper.want("a", [peer("d0"), peer("d1")])
    await settle()
    assert keeper.states()[0] == LinkState("d0", "1", link("d0"))
    assert (ends.news, ends.asked.count("d1/1")) == (3, 1)


async def test_an_unexpected_error_is_reported(
    ends: Ends, keeper: LinkKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    ends.errors = {"d0": ZeroDivisionError("a bug")}
    keeper.want("a", [peer("d0")])
    await settle()
    (state,) = keeper.states()
    assert isinstance(state.outcome, Failure)
    assert type(state.outcome.error()) is PdserveError
    assert "a bug" in state.outcome.message
    assert "unexpected error while a KV link is opened" in caplog.text


async def test_closing_cancels_links_being_opened(ends: Ends, keeper: LinkKeeper) -> None:
    ends.gate.clear()
    keeper.want("a", [peer("d0")])
    await settle()
    await keeper.aclose()
    ends.gate.set()
    await settle()
    assert (keeper.states(), ends.news, ends.links) == ([], 0, {})
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_any_gateway_wants_is_opened(ends: Ends, keeper: LinkKeeper) -> None:
    keeper.want("a", [peer("d0")])
    keeper.want("b", [peer("d1")])
    await settle()
    assert [state.worker_id for state in keeper.states()] == ["d0", "d1"]
    keeper.want("b", [])
    await settle()
    assert [state.worker_id for state in keeper.states()] == ["d0"], "a still wants it"
    assert ends.asked == ["d0/1", "d1/1"]


async def test_the_latest_answer_counts_if_gateways_know_different_incarnations(ends: Ends, keeper: LinkKeeper) -> None:
    keeper.want("a", [peer("d0", "1")])
    await settle()
    keeper.want("b", [peer("d0", "2")])
    await settle()
    assert [(state.worker_id, state.epoch) for state in keeper.states()] == [("d0", "2")]
    keeper.want("a", [peer("d0", "2")])
    await settle()
    assert ends.asked == ["d0/1", "d0/2"]


async def test_a_gateway_that_does_not_answer_is_forgotten_unless_it_is_the_only_one(
    ends: Ends, keeper: LinkKeeper
) -> None:
    keeper.want("a", [peer("d0")])
    keeper.forget("a")
    keeper.forget("never heard of")
    await settle()
    assert [state.worker_id for state in keeper.states()] == ["d0"], "the links outlive the only gateway"
    keeper.want("b", [peer("d1")])
    keeper.forget("a")
    await settle()
    assert [state.worker_id for state in keeper.states()] == ["d1"]
