"""Cores are claimed one by one: no two engines of a host get the same ones while others are free."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from pdserve.core.config import PdserveConfig
from pdserve.core.worker import Role, SharedCores
from worker.cores import (
    CoreHolder,
    claim_cores,
    core_holders,
    is_of_service,
    leave_engine_cores,
    shared_cores,
    sharing_note,
    spare_cores,
)
from worker.spec import WorkerSpec

FIRST = 1_000_000 + os.getpid() * 16
"""Numbers above those of any machine, so that services that run beside the tests have not claimed them."""


def make_spec(
    worker_id: str = "prefill-0", *, port: int = 50_051, width: int = 1, oversubscribe: bool = False
) -> WorkerSpec:
    cluster = {"cores_per_worker": width, "oversubscribe": oversubscribe}
    config = PdserveConfig.parse({"cluster": cluster, "gateway": {"port": port}})
    return WorkerSpec(
        worker_id, Role.PREFILL, "127.0.0.1", "127.0.0.1", "cpu", ("127.0.0.1:1",), "0.1.0", config=config
    )


Claim = Callable[..., tuple[WorkerSpec, contextlib.ExitStack]]


@pytest.fixture
def claim() -> Iterator[Claim]:
    """Claims of four cores that no machine has."""
    claims: list[contextlib.ExitStack] = []

    def make(spec: WorkerSpec) -> tuple[WorkerSpec, contextlib.ExitStack]:
        claimed, held = claim_cores(spec, range(FIRST, FIRST + 4))
        claims.append(held)
        return replace(claimed, cores=tuple(core - FIRST for core in claimed.cores)), held

    yield make
    for each in claims:
        each.close()


def really(spec: WorkerSpec) -> WorkerSpec:
    """With the numbers of the cores that were claimed."""
    return replace(spec, cores=tuple(core + FIRST for core in spec.cores))


def test_services_of_other_widths_get_other_cores(claim: Claim) -> None:
    narrow, _ = claim(make_spec(port=1))
    wide, _ = claim(make_spec(port=2, width=2))
    assert (narrow.cores, wide.cores) == ((0,), (1, 2))
    assert shared_cores(really(wide)) == ()
    assert claim(make_spec("decode-0", port=1))[0].cores == (3,)


def test_a_core_is_free_again_once_its_worker_has_ended(claim: Claim) -> None:
    _, first = claim(make_spec(port=1))
    assert claim(make_spec(port=2))[0].cores == (1,)
    first.close()
    assert claim(make_spec(port=3))[0].cores == (0,)


def test_cores_with_the_fewest_engines_are_shared_and_noted_while_they_are(claim: Claim) -> None:
    _, first = claim(make_spec("prefill-0", port=1, width=3))
    spec, _ = claim(make_spec("decode-0", port=2, width=2))
    assert spec.cores == (0, 3)
    shared = shared_cores(really(spec))
    assert shared == (SharedCores((FIRST,), 1),)
    assert sharing_note({"decode-0": shared}) == (
        f"engines that share cores slow each other down: decode-0 (core {FIRST}) with the service on port 1; end one "
        "of the services, or start it on other cores (taskset)"
    )
    assert claim(make_spec("decode-1", port=2))[0].cores == (1,), "the next goes where there is one engine, not two"
    first.close()
    assert shared_cores(really(spec)) == ()


def test_all_that_is_shared_is_one_line() -> None:
    spec = replace(make_spec("decode-0", port=2), cores=(0, 1, 2), service="aaaaaaaaaa")
    holders = [
        CoreHolder(0, 10, os.getuid(), 1, "b", "prefill-0"),
        CoreHolder(1, 11, os.getuid(), 1, "b", "decode-0"),
        CoreHolder(1, 12, os.getuid() + 1, 1, "c", "prefill-0"),
        CoreHolder(2, 13, os.getuid(), 2, "aaaaaaaa", "prefill-0"),
        CoreHolder(2, os.getpid(), os.getuid(), 2, "aaaaaaaa", "decode-0"),  # itself
        CoreHolder(3, 14, os.getuid(), 1, "b", "decode-1"),
    ]
    shared = shared_cores(spec, holders)
    assert shared == (
        SharedCores((0, 1), 1),
        SharedCores((1,), 1, os.getuid() + 1),
        SharedCores((2,), 2, own=True),
    )
    note = sharing_note({"prefill-0": (SharedCores((5,), 1),), "decode-0": shared})
    assert note == (
        "engines that share cores slow each other down: decode-0 (cores 0, 1), prefill-0 (core 5) with the service on "
        f"port 1; decode-0 (core 1) with the service on port 1 of user {os.getuid() + 1}; decode-0 (core 2) with other "
        "workers of this service, as Ray was told of more cores than the node has, or its other cores have more "
        "engines; end one of the services, or start it on other cores (taskset)"
    )
    alike = {name: (SharedCores((core,), 1), SharedCores((core,), 3)) for core, name in enumerate(("a-0", "b-0"))}
    assert ": a-0 (core 0), b-0 (core 1) with the services on port 1, 3; end one " in sharing_note(alike)
    own = sharing_note({"prefill-0": (SharedCores((5,), 1, own=True),)})
    assert own == (
        "engines that share cores slow each other down: prefill-0 (core 5) with other workers of this service, as Ray "
        "was told of more cores than the node has, or its other cores have more engines"
    )
    assert sharing_note({"prefill-0": (), "decode-0": ()}) == ""


def test_a_gap_in_the_claims_of_a_core_does_not_make_it_free(claim: Claim) -> None:
    firsts = [claim(make_spec(f"prefill-{i}", port=1))[1] for i in range(4)]
    claim(make_spec("decode-0", port=1))  # a second one on core 0
    firsts[0].close()
    firsts[1].close()
    assert claim(make_spec("decode-1", port=1))[0].cores == (1,)


def test_workers_of_one_oversubscribed_service_share_without_a_note(claim: Claim) -> None:
    for oversubscribe in (True, False):
        spec = make_spec(port=1, width=4, oversubscribe=oversubscribe)
        _, first = claim(spec)
        shared, second = claim(replace(spec, worker_id="decode-0"))
        own = SharedCores(tuple(range(FIRST, FIRST + 4)), 1, own=True)
        assert shared_cores(really(shared)) == (() if oversubscribe else (own,))
        first.close()
        second.close()


def test_a_gpu_worker_claims_none(claim: Claim) -> None:
    spec, _ = claim(replace(make_spec(), device="cuda"))
    assert (spec.cores, shared_cores(spec)) == ((), ())


def test_names_that_are_not_ours_are_no_holders(claim: Claim) -> None:
    odd = make_spec("a worker/with -odd- name, and a long one at that")
    claim(odd)
    (holder,) = [each for each in core_holders() if each.core == FIRST]
    assert holder.worker_id == "a_worker_with_-odd-_name__and_a_"
    assert is_of_service(holder, odd)
    assert not is_of_service(holder, replace(odd, service="another"))


def test_a_worker_leaves_all_engines_their_cores() -> None:
    def holder(core: int, port: int) -> CoreHolder:
        return CoreHolder(core, 1, 0, port, "", "prefill-0")

    def spare(spec: WorkerSpec, *holders: CoreHolder) -> list[int]:
        return spare_cores(spec, [3, 5, 8, 9], holders)

    spec = replace(make_spec(port=1), cores=(3,))
    assert spare(spec, holder(3, 1)) == [5, 8, 9]
    assert spare(replace(spec, num_slots=2), holder(3, 1)) == [8, 9], "the second worker will come to 5"
    assert spare(replace(spec, num_slots=2), holder(3, 1), holder(5, 2)) == [9], "or to 8, where 5 is another service's"
    assert spare(spec, holder(3, 1), holder(9, 1)) == [5, 8], "one has joined after the others were counted"
    assert spare(replace(spec, num_slots=4)) == []


def test_leaving_binds_every_thread() -> None:
    before = os.sched_getaffinity(0)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        leave_engine_cores(replace(make_spec(), cores=(min(before),)), holders=())
        spare = before - {min(before)} or before
        assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id or 0) == spare
    finally:
        stop.set()
        thread.join()
        for each in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(each), before)
