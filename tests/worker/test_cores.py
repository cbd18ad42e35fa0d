"""Cores are claimed one by one: no two engines of a host get the same ones while others are free."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.core.config import PdserveConfig
from pdserve.core.secret import ServiceSecret
from pdserve.core.worker import Role
from tests.local_cluster import ROOT, free_port
from tests.random_models import save_random_model
from worker.cores import (
    CoreClaim,
    CoreHolder,
    claim_cores,
    core_holders,
    is_of_service,
    leave_engine_cores,
    sharing_notes,
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


Claim = Callable[..., tuple[WorkerSpec, CoreClaim]]


@pytest.fixture
def claim() -> Iterator[Claim]:
    """Claims of four cores that no machine has."""
    claims: list[CoreClaim] = []

    def make(spec: WorkerSpec) -> tuple[WorkerSpec, CoreClaim]:
        claimed, held = claim_cores(spec, range(FIRST, FIRST + 4))
        claims.append(held)
        return replace(claimed, cores=tuple(core - FIRST for core in claimed.cores)), held

    yield make
    for each in claims:
        each.close()


def test_services_of_other_widths_get_other_cores(claim: Claim) -> None:
    narrow, _ = claim(make_spec(port=1))
    wide, held = claim(make_spec(port=2, width=2))
    assert (narrow.cores, wide.cores) == ((0,), (1, 2))
    assert not held.others
    assert claim(make_spec("decode-0", port=1))[0].cores == (3,)


def test_a_core_is_free_again_once_its_worker_has_ended(claim: Claim) -> None:
    _, first = claim(make_spec(port=1))
    assert claim(make_spec(port=2))[0].cores == (1,)
    first.close()
    assert claim(make_spec(port=3))[0].cores == (0,)


def test_cores_with_the_fewest_engines_are_shared_and_noted(claim: Claim) -> None:
    claim(make_spec("prefill-0", port=1, width=3))
    spec, held = claim(make_spec("decode-0", port=2, width=2))
    assert spec.cores == (0, 3)
    (other,) = held.others
    assert (other.core, other.pid, other.uid, other.port) == (FIRST, os.getpid(), os.getuid(), 1)
    (note,) = sharing_notes(spec, held.others)
    other_service = f"prefill-0 of the service on port 1 (process {os.getpid()})"
    assert note.startswith(f"decode-0: core {FIRST} is shared with {other_service}, and ")
    assert claim(make_spec("decode-1", port=2))[0].cores == (1,), "the next goes where there is one engine, not two"


def test_a_gap_in_the_claims_of_a_core_does_not_make_it_free(claim: Claim) -> None:
    firsts = [claim(make_spec(f"prefill-{i}", port=1))[1] for i in range(4)]
    claim(make_spec("decode-0", port=1))  # a second one on core 0
    firsts[0].close()
    firsts[1].close()
    assert claim(make_spec("decode-1", port=1))[0].cores == (1,)


def test_workers_of_one_oversubscribed_service_share_without_a_note(claim: Claim) -> None:
    for oversubscribe, notes in ((True, 0), (False, 1)):
        spec = make_spec(port=1, width=4, oversubscribe=oversubscribe)
        _, first = claim(spec)
        shared, second = claim(replace(spec, worker_id="decode-0"))
        assert len(second.others) == 4
        assert len(sharing_notes(shared, second.others)) == 4 * notes
        first.close()
        second.close()


def test_a_gpu_worker_claims_none(claim: Claim) -> None:
    spec, held = claim(replace(make_spec(), device="cuda"))
    assert (spec.cores, held.others) == ((), ())


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


@pytest.mark.timeout(120)
def test_a_second_service_on_the_same_core_says_so(tmp_path: Path) -> None:
    """Two real workers that may use one core only, of two services."""
    model = save_random_model(tmp_path, "gqa")
    core = min(os.sched_getaffinity(0))
    processes: list[subprocess.Popen[str]] = []
    ports = [free_port(), free_port()]
    try:
        for port in ports:
            config = PdserveConfig.parse({
                "model": {"path": str(model)}, "gateway": {"port": port}, "engine": {"kv_memory_mb": 8},
            })  # fmt: skip
            spec = replace(make_spec(), config=config, registry_addresses=(f"127.0.0.1:{free_port()}",))
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ops.launch.worker", json.dumps(spec.to_wire())],
                env={**os.environ, **ServiceSecret.new().environment(), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
            processes.append(process)
            said = ""
            assert process.stderr is not None
            for said in process.stderr:
                if "engine ready" in said or f"service on port {ports[0]} " in said:
                    break
        assert f"prefill-0: core {core} is shared with prefill-0 of the service on port {ports[0]} " in said
        assert f"(process {processes[0].pid})" in said
    finally:
        for process in processes:
            process.terminate()
            process.wait(20)
            assert process.stderr is not None
            process.stderr.close()
