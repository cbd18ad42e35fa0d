from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.core.clock import FakeClock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import LayoutMismatch, NotReady, TransferTimeout
from pdserve.core.request import Mode
from pdserve.core.worker import Role, WorkerLoad
from router.registry import WorkerRegistry
from tests.fake_worker import FakeWorker, fake_info, fake_links


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def registry(clock: FakeClock) -> WorkerRegistry:
    return WorkerRegistry(clock, RouterConfig(heartbeat_timeout_s=3.0))


def worker(worker_id: str, epoch: str = "1") -> FakeWorker:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    return FakeWorker(fake_info(worker_id, role, epoch=epoch), {})


async def test_heartbeat_age_expires_a_worker_and_a_new_handle_brings_it_back(
    registry: WorkerRegistry, clock: FakeClock
) -> None:
    registry.add(worker("p0"))
    registry.add(worker("p1"))
    clock.advance(2.0)
    assert registry.heartbeat("p0", WorkerLoad(free_blocks=7))
    clock.advance(2.0)
    assert [w.worker_id for w in registry.expire()] == ["p1"]
    assert registry.expire() == []
    assert [w.worker_id for w in registry.ready(Role.PREFILL)] == ["p0"]
    lost = registry.get("p1")
    assert lost is not None
    assert lost.state == "lost"
    assert "4.0 s" in lost.lost
    assert registry.age_s(lost) == pytest.approx(4.0)
    assert not registry.heartbeat("p1", WorkerLoad()), "a lost worker has to be added again"
    registry.add(worker("p1"))
    assert len(registry.ready(Role.PREFILL)) == 2


async def test_unknown_and_new_incarnations_are_not_taken_by_a_heartbeat(registry: WorkerRegistry) -> None:
    assert not registry.heartbeat("p0", WorkerLoad())
    registry.add(worker("p0"))
    assert not registry.heartbeat("p0", WorkerLoad(), fake_info("p0", Role.PREFILL, epoch="2"))
    assert registry.heartbeat("p0", WorkerLoad(), fake_info("p0", Role.PREFILL))


async def test_lost_counts_at_once_but_only_for_its_own_incarnation(registry: WorkerRegistry) -> None:
    registry.add(worker("p0", epoch="2"))
    registry.lost("p0", epoch="1")
    assert registry.ready()
    registry.lost("p0", epoch="2")
    assert not registry.ready()
    registry.lost("nobody")


async def test_a_starting_engine_and_a_suspect_are_not_ready(registry: WorkerRegistry) -> None:
    entry = registry.add(worker("p0"))
    registry.suspect(entry)
    assert (entry.state, registry.ready()) == ("suspect", [])
    registry.heartbeat("p0", WorkerLoad(), entry.info)
    assert registry.ready() == [entry]
    registry.heartbeat("p0", WorkerLoad(), replace(entry.info, ready=False))
    assert (entry.state, registry.ready()) == ("starting", [])


async def test_load_is_counted_until_its_end_and_never_leaks_into_a_new_incarnation(registry: WorkerRegistry) -> None:
    entry = registry.add(worker("p0"))
    first, second = registry.begin("p0", 30, prompt_tokens=20), registry.begin("p0", 5)
    assert (entry.outstanding_tokens, entry.outstanding_requests, entry.prompt_tokens) == (35, 2, 20)
    assert registry.view().workers[0].prompt_tokens == 20
    first.prefilled()
    first.prefilled()
    assert (entry.outstanding_tokens, entry.prompt_tokens) == (15, 0), "what is computed is no load any more"
    first.token_made()
    assert entry.outstanding_tokens == 14
    second.end()
    second.end()
    assert (entry.outstanding_tokens, entry.outstanding_requests) == (9, 1)
    renewed = registry.add(worker("p0", epoch="2"))
    first.end()
    assert (renewed.outstanding_tokens, renewed.outstanding_requests, entry.outstanding_tokens) == (0, 0, 0)
    assert renewed.last_used == entry.last_used


async def test_listeners_hear_of_every_change(registry: WorkerRegistry, clock: FakeClock) -> None:
    heard: list[str] = []
    entry = registry.add(worker("p0"))
    share = registry.begin("p0", 9, 9)
    registry.subscribe(lambda: heard.append(entry.state))
    for change in (share.prefilled, share.end):
        change()
    registry.heartbeat("p0", WorkerLoad())
    assert heard == ["ready"] * 3
    clock.advance(9)
    registry.expire()
    assert heard[3:] == ["lost"]
    registry.lost("p0")
    assert len(heard) == 4, "it was lost already"


def linked(registry: WorkerRegistry, worker_id: str = "p0") -> set[str]:
    """The workers that one can send KV to, for placements and in the status alike."""
    (seen,) = [each for each in registry.view().workers if each.worker_id == worker_id]
    entry = registry.get(worker_id)
    assert entry is not None
    assert {link.worker_id for link in registry.links(entry)} == seen.linked
    return set(seen.linked)


async def test_links_are_those_of_the_last_heartbeat_to_workers_that_live(registry: WorkerRegistry) -> None:
    registry.add(worker("p0"), links=fake_links("d1"))
    registry.add(worker("d0"))
    assert linked(registry) == set(), "d1 is not there"
    registry.add(worker("d1"))
    assert linked(registry) == {"d1"}
    registry.heartbeat("p0", WorkerLoad(), links=fake_links("d0", "d1"))
    assert linked(registry) == {"d0", "d1"}
    registry.heartbeat("p0", WorkerLoad(), links={**fake_links("d1"), ("d0", "1"): TransferTimeout("d0 is mute")})
    assert linked(registry) == {"d1"}
    registry.lost("d1")
    assert linked(registry) == set()
    registry.add(worker("d1"))
    assert linked(registry) == {"d1"}, "it was only cut off"


async def test_a_new_incarnation_of_decode_must_be_linked_anew(registry: WorkerRegistry) -> None:
    registry.add(worker("p0"), links=fake_links("d0"))
    registry.add(worker("d0"))
    registry.add(worker("d0", epoch="2"))
    assert linked(registry) == set()
    registry.heartbeat("p0", WorkerLoad(), links=fake_links("d0"))
    assert linked(registry) == set(), "the prefill worker still speaks of the earlier one"
    registry.heartbeat("p0", WorkerLoad(), links={("d0", "1"): LayoutMismatch("of the earlier one")})
    assert isinstance(registry.unavailable(Mode.PD), NotReady)
    registry.heartbeat("p0", WorkerLoad(), links=fake_links("d0", epoch="2"))
    assert linked(registry) == {"d0"}


async def test_unavailable_says_what_is_missing(registry: WorkerRegistry) -> None:
    def message(mode: Mode = Mode.PD) -> str:
        error = registry.unavailable(mode)
        assert isinstance(error, NotReady)
        return str(error)

    assert "none has registered" in message()
    assert "none has registered" in message(Mode.COLOCATED)
    registry.add(worker("d0"))
    assert "no prefill worker is ready" in message()
    assert "modes auto and colocated need none" in message()
    assert registry.unavailable(Mode.COLOCATED) is None
    registry.add(worker("p0"))
    assert "no prefill worker is connected to a decode worker" in message()
    registry.heartbeat("p0", WorkerLoad(), links={("d0", "1"): TransferTimeout("d0 did not answer")})
    assert "d0 did not answer" in message()
    registry.heartbeat("p0", WorkerLoad(), links={("d0", "1"): LayoutMismatch("KV layout differs in dtype")})
    mismatch = registry.unavailable(Mode.PD)
    assert isinstance(mismatch, LayoutMismatch)
    assert "differs in dtype" in str(mismatch)
    registry.heartbeat("p0", WorkerLoad(), links=fake_links("d0"))
    assert registry.unavailable(Mode.PD) is None
    registry.lost("d0")
    assert "no decode worker is ready (1 prefill registered, 1 decode registered)" in message()


async def test_the_long_dead_are_forgotten(registry: WorkerRegistry, clock: FakeClock) -> None:
    registry.add(worker("p0"))
    registry.add(worker("d0"))
    registry.lost("d0")
    clock.advance(2.0)
    registry.heartbeat("p0", WorkerLoad())
    for _ in range(30):
        assert registry.get("d0") is not None
        clock.advance(2.0)
        registry.heartbeat("p0", WorkerLoad())
        assert registry.expire() == []
    assert [w.worker_id for w in registry.workers] == ["p0"]
    registry.add(worker("d0"))
    assert [w.worker_id for w in registry.ready(Role.DECODE)] == ["d0"]
    assert linked(registry) == set()


async def test_what_was_replaced_or_dismissed_has_no_way_back(registry: WorkerRegistry) -> None:
    registry.add(worker("p0", epoch="1"))
    registry.lost("p0")
    registry.add(worker("p0", epoch="1"))
    assert not registry.is_superseded("p0/1"), "the same incarnation may come back"
    registry.add(worker("p0", epoch="2"))
    assert registry.is_superseded("p0/1")
    assert registry.dismiss("p0") is not None
    assert registry.is_superseded("p0/2")
    assert registry.workers == ()
    assert registry.dismiss("p0") is None


async def test_who_retires_gets_nothing_more(registry: WorkerRegistry) -> None:
    entry = registry.add(worker("p0"))
    share = registry.begin("p0", 10)
    registry.retire("p0")
    registry.retire("nobody")
    assert (entry.state, registry.ready(), entry.outstanding_requests) == ("retiring", [], 1)
    registry.heartbeat("p0", WorkerLoad(), entry.info)
    assert registry.ready() == []
    share.end()
    assert entry.outstanding_requests == 0


async def test_who_was_forgotten_has_no_way_back_either(registry: WorkerRegistry, clock: FakeClock) -> None:
    registry.add(worker("p0", epoch="1"))
    registry.lost("p0")
    clock.advance(61.0)
    registry.expire()
    assert registry.workers == ()
    assert not registry.is_superseded("p0/1"), "nobody has its name"
    registry.add(worker("p0", epoch="2"))
    assert registry.is_superseded("p0/1")


async def test_an_engine_that_starts_anew_is_the_same_worker(registry: WorkerRegistry) -> None:
    first = fake_info("p0", Role.PREFILL, epoch="1")
    registry.add(FakeWorker(first, {}))
    registry.retire("p0")
    again = registry.add(FakeWorker(replace(first, epoch="2"), {}))
    assert not registry.is_superseded(first.life)
    assert again.retiring, "it gets nothing more, whatever its engine does"
