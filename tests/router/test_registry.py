from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from pdserve.core.clock import FakeClock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import NotReady
from pdserve.core.request import Mode
from pdserve.core.worker import Links, Role, WorkerLoad
from router.placement import Placed
from router.registered_worker import Share
from router.registry import WorkerRegistry
from router.view import Needs
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


async def test_lost_counts_at_once_but_only_for_its_own_incarnation(registry: WorkerRegistry) -> None:
    assert not registry.heartbeat("p0", WorkerLoad()), "it is unknown"
    registry.add(worker("p0", epoch="2"))
    assert not registry.heartbeat("p0", WorkerLoad(), fake_info("p0", Role.PREFILL))
    assert registry.heartbeat("p0", WorkerLoad(), fake_info("p0", Role.PREFILL, epoch="2"))
    registry.lost("p0", epoch="1")
    assert registry.ready()
    registry.lost("p0", epoch="2")
    assert not registry.ready()
    registry.lost("nobody")


@pytest.mark.parametrize("seed", range(8))
async def test_a_view_is_up_to_date_after_whatever_happened(seed: int) -> None:
    draw, clock = random.Random(seed), FakeClock(100.0)
    registry = WorkerRegistry(clock, RouterConfig(heartbeat_timeout_s=3.0, forget_s=10.0))
    shares: list[Share] = []
    for _ in range(400):
        name, decode = draw.choice(["p0", "p1", "d0", "d1"]), draw.choice(["d0", "d1"])
        entry = registry.get(name)
        links: Links = draw.choice([{}, fake_links("d0"), fake_links("d0", "d1"), {(decode, "1"): NotReady("not yet")}])
        match draw.choice(
            ["add", "begin", "begin", "token", "prefilled", "end", "beat", "beat", "suspect", "lost", "wait"]
        ):
            case "add":
                registry.add(worker(name, epoch=draw.choice("12")), WorkerLoad(free_blocks=draw.randrange(9)), links)
            case "begin" if entry is not None:
                shares.append(registry.begin(name, 20, draw.choice([0, 5]), draw.randrange(9)))
            case "token" if shares:
                draw.choice(shares).token_made()
            case "prefilled" if shares:
                draw.choice(shares).prefilled()
            case "end" if shares:
                draw.choice(shares).end()
            case "beat" if entry is not None:
                registry.heartbeat(name, WorkerLoad(free_blocks=draw.randrange(9)), entry.info, links)
            case "suspect" if entry is not None:
                registry.suspect(entry)
            case "lost":
                draw.choice([registry.lost, registry.retire, registry.dismiss])(name)
            case "wait":
                clock.advance(draw.random() * 2)
                registry.expire()
        live = frozenset([each.info.worker_epoch for each in registry.workers if not each.lost])
        assert sorted(registry.view().workers, key=lambda each: each.worker_id) == [
            msgspec.structs.replace(replace(each).view(live), late=each.heartbeat_s < clock.now() - 1.5)
            for each in registry.workers
        ], "as if all values were made anew"


def linked(registry: WorkerRegistry, worker_id: str = "p0") -> set[str]:
    """The workers that one can send KV to, for placements and in the status alike."""
    (seen,) = [each for each in registry.view().workers if each.worker_id == worker_id]
    entry = registry.get(worker_id)
    assert entry is not None
    assert {link.worker_id for link in registry.links(entry)} == set(seen.linked)
    return set(seen.linked)


async def test_a_late_error_of_an_earlier_incarnation_suspends_no_other(registry: WorkerRegistry) -> None:
    earlier = registry.add(worker("p0"))
    registry.lost("p0")
    later = registry.add(worker("p0", epoch="2"))
    registry.suspect(earlier)
    assert later.state == "ready"
    registry.suspect(later)
    assert later.state == "suspect"


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
    assert not registry.is_superseded("d0/1"), "nothing has its name"
    registry.add(worker("d0", epoch="2"))
    assert registry.is_superseded("d0/1"), "it has no way back though it was forgotten"
    assert linked(registry) == set()


async def test_what_was_replaced_or_dismissed_has_no_way_back(registry: WorkerRegistry) -> None:
    registry.add(worker("p0", epoch="1"))
    registry.lost("p0")
    registry.add(worker("p0", epoch="1"))
    assert not registry.is_superseded("p0/1"), "the same incarnation may come back"
    registry.add(worker("p0", epoch="2"))
    assert registry.is_superseded("p0/1")
    assert registry.restarts == {"p0": 1}
    assert registry.dismiss("p0") is not None
    assert registry.is_superseded("p0/2")
    assert registry.restarts == {}, "another worker may get its name"
    assert registry.workers == ()
    assert registry.dismiss("p0") is None


async def test_an_engine_that_starts_anew_is_the_same_worker(registry: WorkerRegistry) -> None:
    first = fake_info("p0", Role.PREFILL, epoch="1")
    registry.add(FakeWorker(first, {}))
    registry.retire("p0")
    again = registry.add(FakeWorker(replace(first, epoch="2"), {}))
    assert not registry.is_superseded(first.life)
    assert registry.restarts == {}
    assert again.retiring, "it gets nothing more, whatever its engine does"


async def test_only_members_get_requests(registry: WorkerRegistry) -> None:
    """A gateway that was restarted while a worker leaves is told of the others alone. A worker that joins may report
    before it is told of it."""

    def ready() -> set[str]:
        return {each.worker_id for each in registry.workers if each.is_ready}

    leaving = registry.add(worker("p0"))
    assert ready() == {"p0"}
    registry.set_members(["p1"])
    registry.add(worker("p2"))
    registry.add(worker("p1"))
    assert ready() == {"p1"}
    assert leaving.state == "retiring"
    registry.set_members(["p1", "p2"])
    assert ready() == {"p1", "p2"}


async def test_cached_tokens_of_a_prompt_are_no_load(registry: WorkerRegistry) -> None:
    registry.add(worker("p0"))
    placed = Placed("p0", None, "")
    shares = [registry.assign(Needs(Mode.COLOCATED, 100, 50, cached={"p0": 80, "p1": 96}), placed) for _ in range(2)]
    (view,) = registry.view().workers
    assert (view.outstanding_tokens, view.prompt_tokens) == (140, 40)
    shares[0].prefill.prefilled()
    (view,) = registry.view().workers
    assert (view.outstanding_tokens, view.prompt_tokens) == (120, 20)
    for share in shares:
        share.end()
    (view,) = registry.view().workers
    assert (view.outstanding_tokens, view.prompt_tokens) == (0, 0)


async def test_the_load_is_this_routers_own_and_what_the_worker_reports_of_others(registry: WorkerRegistry) -> None:
    registry.add(worker("p0"))
    own = registry.begin("p0", tokens=150, prompt_tokens=100)
    (view,) = registry.view().workers
    assert (view.outstanding_tokens, view.prompt_tokens, view.others_prompt_tokens) == (150, 100, 0)
    registry.heartbeat("p0", WorkerLoad(others_requests=2, others_tokens=300, others_prompt_tokens=60))
    (view,) = registry.view().workers
    assert (view.outstanding_tokens, view.prompt_tokens, view.others_prompt_tokens) == (450, 160, 60)
    own.prefilled()
    own.token_made()
    (view,) = registry.view().workers
    assert (view.outstanding_tokens, view.prompt_tokens) == (450 - 101, 60), "own progress counts at once"
    own.end()
    (view,) = registry.view().workers
    assert (view.outstanding_tokens, view.others_prompt_tokens) == (300, 60)


async def test_requests_of_other_gateways_fill_a_worker(registry: WorkerRegistry) -> None:
    fake = worker("d0")
    fake.info = replace(fake.info, max_num_seqs=4)
    registry.add(fake)
    own = registry.begin("d0", tokens=5, kv_tokens=5)
    registry.heartbeat("d0", WorkerLoad(free_blocks=64, running=5, others_requests=4))
    (view,) = registry.view().workers
    assert (view.others_requests, view.batch, view.is_full) == (4, 5, True)
    assert not view.has_room(5)
    own.end()
    (view,) = registry.view().workers
    assert view.has_room(5), "no gateway is kept from a worker by the others"
