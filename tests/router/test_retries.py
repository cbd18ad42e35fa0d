from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    NotReady,
    PdserveError,
    TransferError,
    TransferTimeout,
    WorkerLost,
)
from pdserve.core.request import Mode, RequestStatus
from router import retries
from router.attempt import ABORT_TIMEOUT_S
from router.deadline import Deadline
from router.retries import MIN_RETRIES
from tests.fake_worker import Point
from tests.router.conftest import Cluster, MakeCluster

PD_POINTS: list[tuple[str, Point]] = [("d0", "room"), ("p0", "prefill"), ("d0", "decode"), ("d0", "decode_more")]
ANYWHERE = pytest.mark.parametrize(("bad", "point"), PD_POINTS)
BREAKS = [TransferError(f"{i}") for i in range(10_000)]


def let_pass(cluster: Cluster, first: Point) -> None:
    """Of the points that are on their way at the same time, let all workers pass this one first."""
    for fake in cluster.fleet.values():
        fake.delay_s = {"room": 0.02, "prefill": 0.02, first: 0.01}


@pytest.mark.parametrize("policy", ["retry", "fail", "recompute"])
@pytest.mark.parametrize(
    "error",
    [
        *(LayoutMismatch("dtype"), InvalidRequest("prompt: bad")),
        *(WorkerLost("gone"), TransferTimeout("late")),
        *(CapacityExceeded("full"), NotReady("starting")),
    ],
    ids=repr,
)
@ANYWHERE
async def test_a_failure_costs_the_client_nothing_if_another_worker_may_cure_it(
    make_cluster: MakeCluster, bad: str, point: Point, error: PdserveError, policy: str
) -> None:
    """A worker that does not take the request has not failed to hand it over. A decode worker that fails in ``room``
    does so before prefill has given token 1, or after it."""
    first: Point
    for first in ("room", "prefill"):
        cluster = make_cluster(prefill=2, decode=2, on_kv_failure=policy)
        let_pass(cluster, first)
        cluster.fleet[bad].fail(point, error)
        record = cluster.record()
        is_final = isinstance(error, LayoutMismatch | InvalidRequest)
        not_handed_over = point != "decode_more" and isinstance(error, WorkerLost | TransferError)
        if is_final or (not_handed_over and policy == "fail"):
            with pytest.raises(type(error)):
                await cluster.served(record)
            assert (record.status, record.attempts) == (RequestStatus.FAILED, 1)
        else:
            result = await cluster.served(record)
            assert (record.status, record.attempts) == (RequestStatus.FINISHED, 2)
            assert bad not in (result.prefill_worker, result.decode_worker), "the retry avoids the worker that failed"
            if not_handed_over and policy == "recompute":
                assert (result.mode, result.kv_bytes_expected, result.proof) == (Mode.COLOCATED, 0, None)
            else:
                assert result.mode is Mode.PD
                assert result.proof is not None
                assert result.proof.kv_bytes == result.kv_bytes_expected
            suspects = [worker.worker_id for worker in cluster.registry.workers if worker.state == "suspect"]
            assert suspects == ([bad] if isinstance(error, WorkerLost | NotReady) else [])
        assert cluster.aborted("d0") == cluster.aborted("p0") == ["r"]


async def test_a_continuation_sends_prompt_and_tokens_so_far_under_a_new_name(make_cluster: MakeCluster) -> None:
    """And to the prefill worker that has computed the prompt."""
    cluster = make_cluster(prefill=3, decode=2)
    cluster.fleet["d0"].fail("decode_more", WorkerLost("gone"))
    await cluster.served(cluster.record(max_tokens=6))
    (_, first), (_, second) = cluster.fleet["p0"].requests
    assert (first.token_ids, first.max_tokens) == ((1, 2, 3, 4, 5), 6)
    assert (second.token_ids, second.max_tokens) == ((1, 2, 3, 4, 5, 6, 7), 4)
    assert first.attempt_id != second.attempt_id
    assert first.attempt_id.startswith("r#")
    assert second.attempt_id.startswith("r#")
    assert second.sampling.seed == first.sampling.seed
    assert (first.output_token_ids, second.output_token_ids) == ((), (6, 7))
    assert cluster.fleet["d0"].requests == [("receive", first)]
    assert cluster.fleet["d1"].requests == [("receive", second)]


async def test_a_continuation_of_one_token_needs_no_hand_off(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.fleet["d0"].fail("decode", TransferError("broken"))
    result = await cluster.served(cluster.record(max_tokens=2))
    assert (result.kv_bytes_expected, result.decode_worker) == (0, "")
    assert [call for call, _ in cluster.fleet["p0"].requests] == ["push", "run"]


async def test_a_worker_that_is_too_small_is_not_the_last_word(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=2)
    for worker_id in ("p0", "p1"):
        cluster.fleet[worker_id].fail("prefill", *(CapacityExceeded("full everywhere") for _ in range(3)))
    record = cluster.record()
    with pytest.raises(CapacityExceeded, match="full everywhere"):
        await cluster.served(record)
    assert record.attempts == 3, "each worker once, and then the one that is left to be asked again"


@pytest.mark.parametrize("serves", [True, False])
async def test_attempts_are_bounded_and_the_last_one_needs_no_transfer(make_cluster: MakeCluster, serves: bool) -> None:
    cluster = make_cluster(max_attempts=3)
    let_pass(cluster, "room")
    cluster.fleet["d0"].fail("room", *BREAKS)
    record = cluster.record()
    if serves:
        result = await cluster.served(record)
        assert (result.mode, record.attempts, result.kv_bytes_expected) == (Mode.COLOCATED, 3, 0)
    else:
        for worker in cluster.fleet.values():
            worker.fail("run", NotReady("three"))
        with pytest.raises(NotReady, match="three"):
            await cluster.served(record)
    assert (record.status, record.attempts) == (RequestStatus.FINISHED if serves else RequestStatus.FAILED, 3)


@pytest.mark.parametrize("point", ["room", "decode"])
async def test_tokens_begin_the_count_of_attempts_anew(make_cluster: MakeCluster, point: Point) -> None:
    cluster = make_cluster(max_attempts=3)
    let_pass(cluster, "prefill")
    cluster.fleet["d0"].fail(point, *BREAKS[:5])
    record = cluster.record(max_tokens=8)
    await cluster.served(record)
    assert record.attempts == 6, "each of the five failed ones gave token 1 of what was left"


async def test_a_request_that_loses_two_workers_in_a_row_ends(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=4, decode=1, policy="round_robin")
    for worker_id in ("p0", "p1", "p2", "p3"):
        cluster.fleet[worker_id].fail("prefill", WorkerLost(f"{worker_id} is lost"))
    with pytest.raises(WorkerLost, match="p1 is lost; the second worker in a row"):
        await cluster.served(cluster.record())
    assert not cluster.fleet["p2"].requests


async def test_a_worker_lost_after_tokens_makes_no_suspect(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(decode=3, policy="round_robin")
    let_pass(cluster, "room")
    cluster.fleet["d0"].fail("decode", WorkerLost("d0 is lost"))  # after token 1
    cluster.fleet["d1"].fail("room", WorkerLost("d1 is lost"))  # before the next token
    record = cluster.record()
    await cluster.served(record)
    assert record.attempts == 3


async def test_retries_pause_longer_each_time(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(max_attempts=4)
    monkeypatch.setattr(retries, "RETRY_PAUSE_S", 0.01)
    slept: list[float] = []
    real = Deadline.sleep

    async def sleep(self: Deadline, seconds: float, doing: str) -> None:
        if doing == "waiting for a retry":
            slept.append(seconds)
        await real(self, seconds, doing)

    monkeypatch.setattr(Deadline, "sleep", sleep)
    let_pass(cluster, "room")
    cluster.fleet["d0"].fail("room", *BREAKS[:3])
    await cluster.served(cluster.record())
    assert len(slept) == 3
    assert all(0.5 * base <= pause <= 1.5 * base for base, pause in zip((0.01, 0.02, 0.04), slept, strict=True))


async def test_an_outage_does_not_multiply_the_load(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=10**6)
    let_pass(cluster, "room")
    decode = cluster.worker("d0")
    decode.info = replace(decode.info, num_blocks=4096)  # room for all of them at once
    decode.load = replace(decode.load, free_blocks=4096)
    cluster.fleet["d0"].fail("room", *BREAKS)
    for worker in cluster.fleet.values():
        worker.fail("run", *BREAKS)
    records = [cluster.record(name=f"r{i}", timeout_s=0.3) for i in range(100)]
    outcomes = await asyncio.gather(*(cluster.served(record) for record in records), return_exceptions=True)
    assert all(isinstance(outcome, PdserveError) for outcome in outcomes)
    assert sum(record.attempts for record in records) == 100 + MIN_RETRIES + 50
    assert any("too many others are retried" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize(("mode", "max_tokens"), [(Mode.PD, 1), (Mode.PD, 9), (Mode.COLOCATED, 9)])
async def test_load_is_what_is_still_to_be_computed(make_cluster: MakeCluster, mode: Mode, max_tokens: int) -> None:
    """All is computed soon, though the client has read one token only."""
    cluster = make_cluster()
    generation = cluster.router.generate(cluster.record(max_tokens=max_tokens, mode=mode))
    await anext(aiter(generation))
    await cluster.until(lambda: not any(worker.outstanding_requests for worker in cluster.registry.workers))
    assert [worker.outstanding_tokens for worker in cluster.registry.workers] == [0, 0]
    await generation.aclose()


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
async def test_a_prefill_worker_that_is_lost_in_the_transfer_is_noticed_at_once(
    make_cluster: MakeCluster, first_token: str
) -> None:
    """The decode worker would wait for the KV until its lease ends."""
    cluster = make_cluster(prefill=2, first_token=first_token)
    cluster.fleet["d0"].delay_s = {"room": 0.2}
    record = cluster.record()
    task = asyncio.create_task(cluster.served(record))
    await cluster.until(lambda: bool(cluster.fleet["p0"].requests))
    await asyncio.sleep(0.05)  # token 1 is computed at once
    cluster.fleet["p0"].crash()
    cluster.registry.lost("p0")
    await asyncio.wait_for(task, 5.0)
    assert (record.attempts, len(cluster.fleet["p1"].requests)) == (2, 1)


async def test_a_deadline_waits_for_no_worker_that_does_not_answer(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.fleet["d0"].hangs = {"decode_more", "abort"}
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(cluster.served(cluster.record(timeout_s=0.1)), ABORT_TIMEOUT_S / 2)
    cluster.check_idle()
    cluster.fleet["d0"].crash()  # ends what hangs
    await asyncio.sleep(0)


async def test_a_retry_waits_no_longer_than_its_deadline(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.fleet["d0"].fail("decode", WorkerLost("gone"))
    record = cluster.record(timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match="waiting for a free worker"):
        await cluster.served(record)
    assert record.output_token_ids == [6]


@pytest.mark.parametrize(("bad", "point", "again"), [("p0", "prefill", 2), ("d0", "decode_more", None)])
async def test_logprobs_of_a_prompt_are_computed_until_they_are_known(
    make_cluster: MakeCluster, bad: str, point: Point, again: int | None
) -> None:
    cluster = make_cluster(prefill=2, decode=2)
    let_pass(cluster, "prefill")
    cluster.fleet[bad].fail(point, WorkerLost("gone"))
    record = cluster.record(prompt_logprobs=2)
    await cluster.served(record)
    assert [len(each.top) for each in record.prompt_logprobs] == [2] * 4
    requests = [request for worker in cluster.fleet.values() for call, request in worker.requests if call == "push"]
    requests.sort(key=lambda request: request.num_tokens)
    assert [request.sampling.prompt_logprobs for request in requests] == [2, again]
    assert record.failures == [(bad, "WorkerLost", "gone")]
