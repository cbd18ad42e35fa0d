from __future__ import annotations

import asyncio
import logging

import pytest

from pdserve.core.errors import DeadlineExceeded, NotReady, TransferTimeout
from pdserve.core.request import Mode, RequestStatus
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import EXTERNAL_EVENTS, EventKind, Figure
from router.view import WaitMode
from tests.fake_worker import fake_links
from tests.planted.gateway import delay_dispatch, delay_route
from tests.router.conftest import MakeCluster

KV_BYTES = 2 * (4 * 2 * 2 * 1 * 8 * 4)
"""Of 5 tokens: two blocks of 4 tokens x 2 layers x K and V x 1 head x 8 dimensions x 4 bytes."""


async def test_pd_prefills_here_decodes_there_and_proves_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    record = cluster.record()
    generation = cluster.router.generate(record)
    tokens = [token async for token in generation]
    assert [token.token_id for token in tokens] == [6, 7, 8, 9]
    assert [token.finish_reason for token in tokens] == [None, None, None, FinishReason.LENGTH]
    result = record.result
    assert (result.mode, result.prefill_worker, result.decode_worker) == (Mode.PD, "p0", "d0")
    assert result.proof is not None
    assert result.proof.kv_bytes == result.kv_bytes_expected == KV_BYTES
    assert (result.block_size, record.attempts) == (4, 1)
    assert record.status is RequestStatus.FINISHED
    ((call, pushed),) = cluster.fleet["p0"].requests
    assert (call, pushed.max_tokens, pushed.token_ids) == ("push", 4, (1, 2, 3, 4, 5))
    assert cluster.fleet["d0"].requests == [("receive", pushed)]


async def test_the_timeline_has_every_event_and_the_stages_leave_no_gap(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    delay_route(cluster.router, 0.02)
    for worker in cluster.fleet.values():
        delay_dispatch(worker, 0.03)
    cluster.fleet["d0"].delay_s = {"room": 0.01, "decode": 0.02}
    record = cluster.record()
    await cluster.watched(record)
    others = {EventKind.FINISHED, EventKind.DECODE_READY, EventKind.PREFIX_AWAITED, EventKind.PREFIX_READY}
    others.add(EventKind.DRAFTED)
    assert set(EventKind) - EXTERNAL_EVENTS - set(record.timeline.events) == others
    for figure in Figure:
        breakdown = record.timeline.breakdown(figure)
        assert breakdown is not None
        assert abs(breakdown.unattributed_ms) < 0.01
        assert breakdown.stages_ms["route"] >= 19
        assert breakdown.stages_ms["dispatch"] >= 29
        if figure is Figure.TTFT_DECODE:  # token 1 waits neither for room nor for decode
            assert breakdown.stages_ms["kv_exposed"] == pytest.approx(30, abs=2)
    assert record.timeline.room_wait_ms == pytest.approx(10)


async def test_each_attempts_placement_is_kept_and_logged_with_its_reason(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "router")
    cluster = make_cluster(decode=2)
    cluster.fleet["d0"].fail("decode", TransferTimeout("late"))
    record = cluster.record()
    await cluster.served(record)
    first, second = record.placements
    assert first.startswith("prefill on p0: the only one free; decode on d0: cost 2, the least of 2: ")
    assert "decode on d1: the only one free, 1 avoided" in second
    assert f"request r: attempt 2: {second}" in caplog.messages
    assert record.failures == [("d0, p0", "TransferTimeout", "late")]


async def test_token_1_is_held_until_decode_can_go_on(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(first_token="decode")
    cluster.fleet["d0"].delay_s = {"decode": 0.02, "decode_step": 0.05}
    record = cluster.record()
    times_ms, _ = await cluster.watched(record)
    assert times_ms[0] == pytest.approx(20, abs=5)  # not until the next step
    assert record.output_token_ids == [6, 7, 8, 9]
    breakdown = record.timeline.breakdown(Figure.TTFT)
    assert breakdown is not None
    assert breakdown.stages_ms["kv_exposed"] == pytest.approx(20, abs=2)
    assert abs(breakdown.unattributed_ms) < 0.01


async def test_one_token_needs_no_hand_off(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    result = await cluster.served(cluster.record(max_tokens=1))
    assert [call for call, _ in cluster.fleet["p0"].requests] == ["run"]
    assert cluster.fleet["d0"].requests == []
    assert (result.mode, result.decode_worker, result.kv_bytes_expected, result.proof) == (Mode.PD, "", 0, None)


@pytest.mark.parametrize(
    ("auto_mode", "decode", "mode"),
    [(Mode.AUTO, 1, Mode.PD), (Mode.AUTO, 0, Mode.COLOCATED), (Mode.COLOCATED, 1, Mode.COLOCATED)],
)
async def test_auto_is_pd_unless_it_cannot_be_or_the_deployment_says_otherwise(
    make_cluster: MakeCluster, auto_mode: WaitMode, decode: int, mode: Mode
) -> None:
    cluster = make_cluster(decode=decode, auto_mode=auto_mode)
    result = await cluster.served(cluster.record(mode=Mode.AUTO))
    assert result.mode is mode
    if not decode:
        remedy = "modes auto and colocated need none; .* by `pdserve scale --decode 1`"
        with pytest.raises(NotReady, match=rf"no decode worker is ready .*; {remedy}"):
            await cluster.served(cluster.record(mode=Mode.PD))


async def test_a_service_that_was_ready_waits_for_its_workers_as_long_as_its_patience_lasts(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(patience_s=5.0)
    cluster.registry.lost("p0")
    begin_s = cluster.clock.now()
    with pytest.raises(NotReady, match="no prefill worker is ready"):
        await cluster.served(cluster.record(timeout_s=60.0))
    assert cluster.clock.now() - begin_s == pytest.approx(5.0, abs=0.01)
    waiting = asyncio.create_task(cluster.served(cluster.record()))
    await asyncio.sleep(4.0)
    cluster.registry.add(cluster.fleet["p0"])
    cluster.beat("p0", fake_links("d0"))
    await waiting


@pytest.mark.parametrize("mode", [Mode.PD, Mode.COLOCATED])
async def test_without_patience_it_waits_until_the_deadline(make_cluster: MakeCluster, mode: Mode) -> None:
    """The only worker of a role may take long to start again, on a busy host minutes."""
    cluster = make_cluster(patience_s=None)
    for worker_id in ("p0", "d0"):
        cluster.registry.lost(worker_id)
    late = asyncio.create_task(cluster.served(cluster.record(mode=mode, timeout_s=300.0)))
    waiting = asyncio.create_task(cluster.served(cluster.record(mode=mode, timeout_s=1000.0)))
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
    await waiting


async def test_nothing_ready_is_said_at_once_even_to_those_in_the_queue(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1)
    cluster.fleet["p0"].hangs = {"prefill"}
    running = asyncio.create_task(cluster.served(cluster.record(name="a")))
    queued = asyncio.create_task(cluster.served(cluster.record(name="b")))
    await cluster.until(lambda: (cluster.router.running, cluster.router.queued) == (1, 1))
    cluster.registry.lost("p0")
    with pytest.raises(NotReady, match="no prefill worker"):
        await queued
    await cluster.finish(running)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize(("mode", "tokens"), [(Mode.PD, 1), (Mode.PD, 3), (Mode.COLOCATED, 3)])
async def test_closing_between_tokens_aborts_and_stopping_finishes(
    make_cluster: MakeCluster, mode: Mode, tokens: int, stop: bool
) -> None:
    """After token 1, prefill holds the KV and decode makes room: nothing is to be moved any more if the client has
    enough."""
    cluster = make_cluster()
    if tokens == 1:
        cluster.fleet["d0"].hangs = {"room"}
    record = cluster.record(max_tokens=50, mode=mode)
    generation = cluster.router.generate(record)
    async for _ in generation:
        if len(record.output_token_ids) == tokens:
            break
    record.stopped = stop
    await generation.aclose()
    assert record.status is (RequestStatus.FINISHED if stop else RequestStatus.ABORTED)
    result = record.result
    moved = 0 if result.proof is None else result.proof.kv_bytes
    assert moved == (KV_BYTES if (mode, tokens) == (Mode.PD, 3) else 0)
    assert result.kv_bytes_expected == (KV_BYTES if (mode, tokens, stop) == (Mode.PD, 1, False) else moved)
    assert cluster.aborted("d0") == ["r"]
