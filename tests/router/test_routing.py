from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.core.errors import CapacityExceeded, DeadlineExceeded, InvalidRequest, NotReady, TransferTimeout
from pdserve.core.request import Mode, RequestStatus
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import EventKind, Figure
from tests.fake_worker import fake_links
from tests.planted.gateway import delay_dispatch, delay_route

if TYPE_CHECKING:
    from tests.router.conftest import MakeCluster


async def test_pd_prefills_here_decodes_there_and_proves_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    record = cluster.record()
    generation = cluster.router.generate(record)
    tokens = [token async for token in generation]
    assert [token.token_id for token in tokens] == [6, 7, 8, 9]
    assert [token.finish_reason for token in tokens] == [None, None, None, FinishReason.LENGTH]
    result = generation.result
    assert (result.mode, result.prefill_worker, result.decode_worker) == (Mode.PD, "p0", "d0")
    assert result.proof is not None
    # 5 tokens are two blocks of 4 tokens x 2 layers x K and V x 1 head x 8 dimensions x 4 bytes.
    assert result.proof.kv_bytes == result.kv_bytes_expected == 2 * (4 * 2 * 2 * 1 * 8 * 4)
    assert (result.block_size, result.attempts, record.attempts) == (4, 1, 1)
    assert record.status is RequestStatus.FINISHED
    ((call, pushed),) = cluster.fleet["p0"].requests
    assert (call, pushed.max_tokens, pushed.token_ids) == ("push", 4, (1, 2, 3, 4, 5))
    assert cluster.fleet["d0"].requests == [("receive", pushed)]
    cluster.check_idle()


async def test_the_timeline_has_every_event_and_the_stages_leave_no_gap(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    delay_route(cluster.router, 0.02)
    for worker in cluster.fleet.values():
        delay_dispatch(worker, 0.03)
    cluster.fleet["d0"].delay_s = {"room": 0.01, "decode": 0.02}
    record = cluster.record()
    async with aclosing(cluster.router.generate(record)) as generation:
        async for _ in generation:
            kind = [EventKind.TOKEN_1_EMITTED, EventKind.TOKEN_2_EMITTED][len(record.output_token_ids) > 1]
            if not record.timeline.has(kind):
                record.timeline.record(kind, "gateway", cluster.clock.now())
    others = {EventKind.FINISHED, EventKind.DECODE_READY, EventKind.PREFIX_AWAITED, EventKind.PREFIX_READY}
    assert set(EventKind) - set(record.timeline.events) == others
    for figure in Figure:
        breakdown = record.timeline.breakdown(figure)
        assert breakdown is not None
        assert abs(breakdown.unattributed_ms) < 0.01
        assert breakdown.stages_ms["route"] >= 19
        assert breakdown.stages_ms["dispatch"] >= 29
        if figure is Figure.TTFT_DECODE:  # token 1 waits neither for room nor for decode
            assert breakdown.stages_ms["kv_exposed"] == pytest.approx(30, abs=2)
    assert record.timeline.room_wait_ms == pytest.approx(10)


@pytest.mark.parametrize(("mode", "cached", "told"), [(Mode.PD, 4, 4), (Mode.COLOCATED, 4, 4), (Mode.PD, 99, 5)])
async def test_the_salt_goes_to_every_worker_and_what_prefill_found_comes_back(
    make_cluster: MakeCluster, mode: Mode, cached: int, told: int
) -> None:
    cluster = make_cluster()
    record = cluster.record(mode=mode, salt="tenant")
    for worker in cluster.fleet.values():
        worker.cached_tokens = cached
    generation = cluster.router.generate(record)
    assert len([token async for token in generation]) == 4
    assert generation.result.prefill_cached_tokens == told  # never more than the prompt has
    requests = [request for worker in cluster.fleet.values() for _, request in worker.requests]
    assert [request.salt for request in requests] == ["tenant"] * (2 if mode is Mode.PD else 1)


async def test_each_attempts_placement_is_kept_and_logged_with_its_reason(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "router")
    cluster = make_cluster(prefill=1, decode=2)
    cluster.fleet["d0"].fail("decode", TransferTimeout("late"))
    record = cluster.record()
    assert await cluster.tokens(record) == [6, 7, 8, 9]
    first, second = record.placements
    assert first.startswith("prefill on p0: the only one free; decode on d0: cost 2, the least of 2: ")
    assert "decode on d1: the only one free, 1 avoided" in second
    assert f"request r: attempt 2: {second}" in caplog.messages
    assert record.failures == [("d0, p0", "TransferTimeout", "late")]


async def test_token_1_is_held_until_decode_can_go_on(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(first_token="decode")
    cluster.fleet["d0"].delay_s = {"decode": 0.02, "decode_step": 0.05}
    record = cluster.record()
    started_s = cluster.clock.now()
    async with aclosing(cluster.router.generate(record)) as generation:
        async for _ in generation:
            if not record.timeline.has(EventKind.TOKEN_1_EMITTED):
                record.timeline.record(EventKind.TOKEN_1_EMITTED, "gateway", cluster.clock.now())
                assert cluster.clock.now() - started_s == pytest.approx(0.02, abs=0.005)  # not until the next step
    assert record.output_token_ids == [6, 7, 8, 9]
    breakdown = record.timeline.breakdown(Figure.TTFT)
    assert breakdown is not None
    assert breakdown.stages_ms["kv_exposed"] == pytest.approx(20, abs=2)
    assert abs(breakdown.unattributed_ms) < 0.01
    cluster.check_idle()


async def test_a_held_token_is_delivered_once_though_decode_fails(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(decode=2, first_token="decode")
    cluster.fleet["d0"].fail("decode", TransferTimeout("late"))
    record = cluster.record()
    assert await cluster.tokens(record) == [6, 7, 8, 9]
    assert record.attempts == 2
    cluster.check_idle()


async def test_a_token_that_ends_the_request_is_not_held(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(first_token="decode")
    cluster.fleet["p0"].eos_token_id = 6
    assert await cluster.tokens(cluster.record()) == [6]
    cluster.check_idle()


async def test_one_token_needs_no_hand_off(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    generation = cluster.router.generate(cluster.record(max_tokens=1))
    assert [(t.token_id, t.finish_reason) async for t in generation] == [(6, FinishReason.LENGTH)]
    assert [call for call, _ in cluster.fleet["p0"].requests] == ["run"]
    assert cluster.fleet["d0"].requests == []
    result = generation.result
    assert (result.mode, result.decode_worker, result.kv_bytes_expected, result.proof) == (Mode.PD, "", 0, None)
    cluster.check_idle()


async def test_token_1_ends_the_request_and_the_proof_still_comes(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.fleet["p0"].eos_token_id = 6
    generation = cluster.router.generate(cluster.record())
    assert [(t.token_id, t.finish_reason) async for t in generation] == [(6, FinishReason.STOP)]
    assert generation.result.proof is not None
    assert generation.result.proof.kv_bytes == generation.result.kv_bytes_expected > 0
    cluster.check_idle()


async def test_token_1_ends_the_request_and_a_failing_proof_costs_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.fleet["p0"].eos_token_id = 6
    cluster.fleet["d0"].fail("decode", InvalidRequest("broken"))
    record = cluster.record()
    generation = cluster.router.generate(record)
    assert [t.token_id async for t in generation] == [6]
    assert generation.result.proof is None
    assert generation.result.kv_bytes_expected > 0, "a hand-off that failed is not hidden"
    assert (record.status, record.attempts) == (RequestStatus.FINISHED, 1)
    cluster.check_idle()


async def test_colocated_takes_the_least_loaded_of_all(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=1, decode=2, policy="least_tokens")
    shares = [cluster.registry.begin("p0", 50), cluster.registry.begin("d0", 40), cluster.registry.begin("d1", 10)]
    record = cluster.record(mode=Mode.COLOCATED)
    generation = cluster.router.generate(record)
    assert [t.token_id async for t in generation] == [6, 7, 8, 9]
    result = generation.result
    assert (result.mode, result.prefill_worker, result.decode_worker) == (Mode.COLOCATED, "d1", "d1")
    assert (result.kv_bytes_expected, result.proof) == (0, None)
    assert EventKind.TOKEN_2_SAMPLED in record.timeline.events
    assert EventKind.ROOM_MADE not in record.timeline.events
    for share in shares:
        share.end()
    cluster.check_idle()


async def test_auto_is_pd_and_says_so_where_it_cannot_be(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    generation = cluster.router.generate(cluster.record(mode=Mode.AUTO))
    assert [t.token_id async for t in generation] == [6, 7, 8, 9]
    assert generation.result.mode is Mode.PD
    cluster = make_cluster(decode=0)
    generation = cluster.router.generate(cluster.record(mode=Mode.AUTO))
    assert [t.token_id async for t in generation] == [6, 7, 8, 9]
    assert generation.result.mode is Mode.COLOCATED, "any ready worker is enough"
    with pytest.raises(NotReady, match="no decode worker is ready"):
        await cluster.tokens(cluster.record(mode=Mode.PD))


@pytest.mark.parametrize("lost", ["p0", "d0"])
async def test_auto_runs_where_a_worker_is_left(make_cluster: MakeCluster, lost: str) -> None:
    cluster = make_cluster(patience_s=5.0, prefill_backlog_tokens=1)
    cluster.fleet["p0"].hangs = {"prefill"}
    first, queued = (asyncio.create_task(cluster.tokens(cluster.record(name=n, mode=Mode.AUTO))) for n in "ab")
    await cluster.until(lambda: cluster.router.queued == 1 and bool(cluster.fleet["p0"].stuck))
    cluster.fleet["p0"].hangs.clear()
    cluster.fleet[lost].crash()
    cluster.registry.lost(lost)
    assert await first == await queued == [6, 7, 8, 9]
    assert await cluster.tokens(cluster.record(mode=Mode.AUTO)) == [6, 7, 8, 9]
    cluster.check_idle()


async def test_a_service_that_was_ready_waits_for_its_workers(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(patience_s=5.0)
    cluster.registry.lost("p0")
    waiting = asyncio.create_task(cluster.tokens(cluster.record()))
    await cluster.until(lambda: cluster.router.queued == 1)
    cluster.registry.add(cluster.fleet["p0"])
    cluster.beat("p0", fake_links("d0"))
    assert await waiting == [6, 7, 8, 9]
    cluster.check_idle()


@pytest.mark.parametrize("mode", [Mode.PD, Mode.COLOCATED])
async def test_without_patience_it_waits_until_the_deadline(make_cluster: MakeCluster, mode: Mode) -> None:
    """The only worker of a role may take long to start again, on a busy host minutes."""
    cluster = make_cluster(patience_s=None)
    for worker_id in ("p0", "d0"):
        cluster.registry.lost(worker_id)
    late = asyncio.create_task(cluster.tokens(cluster.record(mode=mode, timeout_s=300.0)))
    waiting = asyncio.create_task(cluster.tokens(cluster.record(mode=mode, timeout_s=1000.0)))
    await asyncio.sleep(299.0)
    assert not late.done()
    with pytest.raises(
        DeadlineExceeded, match=r"^deadline: it passed while waiting for a free worker.*; no .*is ready"
    ):
        await late
    await asyncio.sleep(300.0)
    for worker_id in ("p0", "d0"):
        cluster.registry.add(cluster.fleet[worker_id])
    cluster.beat("p0", fake_links("d0"))
    assert await waiting == [6, 7, 8, 9]
    cluster.check_idle()


async def test_patience_ends(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(patience_s=0.05)
    cluster.registry.lost("p0")
    with pytest.raises(NotReady, match="no prefill worker is ready"):
        await asyncio.wait_for(cluster.tokens(cluster.record(timeout_s=60.0)), 5.0)
    cluster.check_idle()


async def test_a_request_goes_where_its_kv_fits(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(decode=2)
    small = cluster.registry.get("d0")
    assert small is not None
    small.info = replace(small.info, num_blocks=1)
    for mode in (Mode.PD, Mode.COLOCATED):
        for _ in range(4):
            generation = cluster.router.generate(cluster.record(mode=mode))
            assert [t.token_id async for t in generation] == [6, 7, 8, 9]
            assert generation.result.decode_worker != "d0"
    for name in ("p0", "d1"):
        worker = cluster.registry.get(name)
        assert worker is not None
        worker.info = replace(worker.info, num_blocks=2)
    for mode in (Mode.PD, Mode.COLOCATED, Mode.AUTO):
        with pytest.raises(CapacityExceeded, match=r"5 \+ 4 tokens exceed the KV pool of every worker \(8 tokens"):
            await cluster.tokens(cluster.record(mode=mode))
    cluster.check_idle()


async def test_auto_is_colocated_where_the_deployment_says_so(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(decode=0, auto_mode=Mode.COLOCATED)
    generation = cluster.router.generate(cluster.record(mode=Mode.AUTO))
    assert [t.token_id async for t in generation] == [6, 7, 8, 9]
    assert generation.result.mode is Mode.COLOCATED
    with pytest.raises(NotReady, match="no decode worker is ready"):
        await cluster.tokens(cluster.record(mode=Mode.PD))


async def test_nothing_ready_is_said_at_once_even_to_those_in_the_queue(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1)
    cluster.fleet["p0"].hangs = {"prefill"}
    running = asyncio.create_task(cluster.tokens(cluster.record(name="a")))
    queued = asyncio.create_task(cluster.tokens(cluster.record(name="b")))
    await cluster.until(lambda: (cluster.router.running, cluster.router.queued) == (1, 1))
    cluster.registry.lost("p0")
    with pytest.raises(NotReady, match="no prefill worker"):
        await queued
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    cluster.check_idle()


async def test_requests_wait_in_order_for_a_free_prefill_worker(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1)
    cluster.fleet["p0"].delay_s = {"prefill": 0.005}
    names = [f"r{i}" for i in range(6)]
    await asyncio.gather(*(cluster.tokens(cluster.record(name=name)) for name in names))
    assert [request.request_id for _, request in cluster.fleet["p0"].requests] == names
    cluster.check_idle()


async def test_a_prefill_worker_takes_prompts_up_to_its_backlog(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=6)
    cluster.fleet["p0"].hangs = {"prefill"}
    tasks = [asyncio.create_task(cluster.tokens(cluster.record(name=f"r{i}"))) for i in range(4)]
    await cluster.until(lambda: cluster.router.queued == 2 and bool(cluster.fleet["p0"].stuck))
    assert len(cluster.fleet["p0"].requests) == 2, "5 tokens are below 6, 10 are not"
    for task in reversed(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    cluster.check_idle()


async def test_load_spreads_over_pairs(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=2, decode=2, policy="round_robin")
    await asyncio.gather(*(cluster.tokens(cluster.record(name=f"r{i}")) for i in range(8)))
    assert [len(cluster.fleet[w].requests) for w in ("p0", "p1", "d0", "d1")] == [4, 4, 4, 4]
    cluster.check_idle()


async def test_the_deadline_holds_at_every_point(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    for worker, point in (("d0", "room"), ("p0", "prefill"), ("d0", "decode"), ("d0", "decode_more")):
        cluster.fleet[worker].hangs = {point}  # type: ignore[arg-type]
        record = cluster.record(timeout_s=0.05)
        with pytest.raises(DeadlineExceeded, match="deadline: it passed while"):
            await cluster.tokens(record)
        assert record.status is RequestStatus.FAILED
        await cluster.until(lambda: cluster.aborted("d0") == cluster.aborted("p0") == ["r"])
        assert record.output_token_ids == {"prefill": [], "decode_more": [6, 7]}.get(point, [6])
        cluster.check_idle()
        for fake in cluster.fleet.values():
            fake.hangs.clear()
            fake.aborted.clear()


async def test_the_deadline_holds_in_the_queue(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1)
    share = cluster.registry.begin("p0", 1, 1)
    with pytest.raises(DeadlineExceeded, match="waiting for a free worker"):
        await cluster.tokens(cluster.record(timeout_s=0.03))
    share.end()
    cluster.check_idle()


@pytest.mark.parametrize(
    ("worker", "point"), [("d0", "room"), ("p0", "prefill"), ("d0", "decode"), ("d0", "decode_more")]
)
async def test_cancelling_aborts_on_both_workers(make_cluster: MakeCluster, worker: str, point: str) -> None:
    cluster = make_cluster()
    cluster.fleet[worker].hangs = {point}  # type: ignore[arg-type]
    record = cluster.record()
    task = asyncio.create_task(cluster.tokens(record))
    await cluster.until(lambda: bool(cluster.fleet[worker].stuck))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert record.status is RequestStatus.ABORTED
    assert cluster.aborted("d0") == cluster.aborted("p0") == ["r"]
    cluster.check_idle()


async def test_a_second_cancellation_leaves_nothing_on_workers(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    for worker in cluster.fleet.values():
        worker.hangs = {"prefill"}
        worker.delay_s["abort"] = 0.03
    task = asyncio.create_task(cluster.tokens(cluster.record()))
    await cluster.until(lambda: bool(cluster.fleet["p0"].stuck))
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task
    await cluster.until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert cluster.aborted("d0") == cluster.aborted("p0") == ["r"]
    cluster.check_idle()


async def test_stopping_calls_off_a_hand_off_that_gave_nothing(make_cluster: MakeCluster) -> None:
    for tokens in (1, 2):
        cluster = make_cluster()
        generation = cluster.router.generate(cluster.record(max_tokens=50))
        async for _ in generation:
            if len(generation.record.output_token_ids) == tokens:
                break
        await generation.stop()
        proof = generation.result.proof
        moved = proof.kv_bytes if proof is not None else 0
        assert moved == generation.result.kv_bytes_expected
        assert (moved > 0) == (tokens == 2)


async def test_closing_between_tokens_aborts_and_stopping_finishes(make_cluster: MakeCluster) -> None:
    for mode in (Mode.PD, Mode.COLOCATED):
        for stop in (False, True):
            cluster = make_cluster()
            record = cluster.record(max_tokens=50, mode=mode)
            generation = cluster.router.generate(record)
            async for _ in generation:
                if len(record.output_token_ids) == 3:
                    break
            await (generation.stop() if stop else generation.aclose())
            assert record.status is (RequestStatus.FINISHED if stop else RequestStatus.ABORTED)
            cluster.check_idle()


async def test_a_worker_that_ignores_aborts_does_not_hold_up_the_load_accounts(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.attempt.ABORT_TIMEOUT_S", 0.02)
    cluster = make_cluster()
    cluster.fleet["d0"].hangs = {"decode", "abort"}
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(cluster.tokens(cluster.record(timeout_s=0.05)), 1.0)
    cluster.check_idle()
    cluster.fleet["d0"].crash()
    await asyncio.sleep(0)
