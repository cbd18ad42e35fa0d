"""Prefill and decode get a request at the same moment: decode makes room while prefill computes. What that means for
tokens, failures and ends of requests."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from pdserve.core.errors import (
    CapacityExceeded,
    InvalidRequest,
    PdserveError,
    TransferTimeout,
    WorkerLost,
)
from pdserve.core.request import RequestStatus
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import EventKind, Figure
from pdserve.core.worker import WorkerLoad
from router.attempt import PROOF_TIMEOUT_S
from tests.fake_worker import FAKE_LAYOUT
from tests.router.conftest import MakeCluster

ALL = [6, 7, 8, 9]
POLL_MS = 1.0  # how often a fake that prefills looks whether there is room
BLOCK_BYTES = FAKE_LAYOUT.block_bytes
NO_ROOM = [WorkerLost("gone"), CapacityExceeded("full"), TransferTimeout("late")]


async def test_a_decode_worker_that_makes_room_for_long_does_not_delay_token_1(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.fleet["p0"].delay_s = {"prefill": 0.1}
    cluster.fleet["d0"].delay_s = {"room": 30.0}
    record = cluster.record(timeout_s=60.0)
    begin_s = cluster.clock.now()
    task = asyncio.create_task(cluster.watched(record))
    await asyncio.sleep(1.0)
    assert record.output_token_ids == [6]
    # Prefill may get the next prompt, though it holds this one's KV as long as it takes.
    loads = {worker.worker_id: worker.outstanding_requests for worker in cluster.registry.workers}
    assert loads == {"p0": 0, "d0": 1}

    times, result = await task
    assert times == pytest.approx([100, 30_000, 30_000, 30_000], abs=2 * POLL_MS)
    assert result.proof is not None
    assert result.proof.kv_bytes == result.kv_bytes_expected == 2 * BLOCK_BYTES
    timeline = record.timeline
    assert timeline.gateway_time(EventKind.PREFILL_SENT) == begin_s
    assert timeline.gateway_time(EventKind.PREFILL_RECEIVED) == begin_s
    assert timeline.gateway_time(EventKind.ROOM_MADE) - begin_s == pytest.approx(30.0)
    assert timeline.room_wait_ms == pytest.approx(29_900)
    first, second = timeline.breakdown(Figure.TTFT), timeline.breakdown(Figure.TTFT_DECODE)
    assert first is not None
    assert second is not None
    assert first.total_ms == pytest.approx(100)
    assert second.stages_ms["kv_exposed"] == pytest.approx(29_900, abs=2 * POLL_MS)
    assert abs(second.unattributed_ms) < 0.01
    assert cluster.aborted("p0") == cluster.aborted("d0") == []


@pytest.mark.parametrize("error", NO_ROOM)
async def test_a_decode_worker_that_fails_before_token_1_ends_the_attempt_at_once(
    make_cluster: MakeCluster, error: PdserveError
) -> None:
    cluster = make_cluster(prefill=2, decode=2)
    for fake in cluster.fleet.values():
        fake.delay_s = {"prefill": 1.0, "room": 0.1}
    cluster.fleet["d0"].fail("room", error)
    times, result = await cluster.watched(record := cluster.record())
    assert record.output_token_ids == ALL
    assert times == pytest.approx([1_100] * 4, abs=POLL_MS), "the prefill had 0.9 s to go, and was not waited for"
    # A transfer has two ends, either of which may be at fault; else prefill is innocent and has begun with the prompt.
    assert result.prefill_worker == ("p1" if isinstance(error, TransferTimeout) else "p0")
    assert (result.decode_worker, record.attempts) == ("d1", 2)
    assert cluster.aborted("p0") == cluster.aborted("d0") == ["r"]


@pytest.mark.parametrize("skipped", [0, 1, 2])
async def test_what_must_travel_is_all_until_decode_has_said_what_it_held_already(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, skipped: int
) -> None:
    cluster = make_cluster()
    decode = cluster.fleet["d0"]
    whole = decode._proof(5)
    sent = msgspec.structs.replace(
        whole, kv_bytes=(2 - skipped) * BLOCK_BYTES, blocks_received=2 - skipped, blocks_skipped=skipped
    )
    monkeypatch.setattr(decode, "_proof", lambda prompt_tokens: sent)
    record = cluster.record()
    async with aclosing(cluster.router.generate(record)) as tokens:
        expected = [record.result.kv_bytes_expected async for _ in tokens]
    assert expected == [2 * BLOCK_BYTES] + [(2 - skipped) * BLOCK_BYTES] * 3
    assert record.result.proof == sent


@pytest.mark.parametrize("fails", [False, True])
async def test_a_last_token_1_does_not_wait_for_room_and_its_proof_not_for_ever(
    make_cluster: MakeCluster, fails: bool
) -> None:
    """A proof that does not come, or a hand-off that fails, costs the request nothing."""
    cluster = make_cluster()
    cluster.fleet["p0"].eos_token_id = 6
    if fails:
        cluster.fleet["d0"].fail("decode", InvalidRequest("broken"))
    else:
        cluster.fleet["d0"].hangs = {"room"}
    record = cluster.record(timeout_s=60.0)
    generation = cluster.router.generate(record)
    begin_s, tokens = cluster.clock.now(), aiter(generation)
    token = await anext(tokens)
    assert (token.token_id, token.finish_reason, cluster.clock.now()) == (6, FinishReason.STOP, begin_s)
    assert [late async for late in tokens] == []
    assert cluster.clock.now() - begin_s <= PROOF_TIMEOUT_S + 0.01
    assert (record.status, record.attempts) == (RequestStatus.FINISHED, 1)
    assert record.result.proof is None
    assert record.result.kv_bytes_expected == 2 * BLOCK_BYTES, "a hand-off that failed is not hidden"
    assert cluster.aborted("p0") == cluster.aborted("d0") == ["r"]


async def test_no_more_requests_are_placed_than_decode_has_blocks_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=10**6)
    cluster.fleet["d0"].hangs = {"decode"}
    cluster.registry.heartbeat("d0", WorkerLoad(free_blocks=5))
    tasks = [asyncio.create_task(cluster.served(cluster.record(name=f"r{i}"))) for i in range(4)]

    async def sent_and_free() -> tuple[int, int]:
        await asyncio.sleep(0.01)
        return len(cluster.fleet["d0"].requests), cluster.worker("d0").view(frozenset()).room

    assert await sent_and_free() == (2, 1), "a prompt of 5 tokens takes two blocks of 4"
    assert cluster.router.queued == 2
    assert len(cluster.fleet["p0"].requests) == 2, "prefill would only hold the blocks of the others"

    # The next heartbeat counts what was placed before it.
    cluster.registry.heartbeat("d0", WorkerLoad(free_blocks=3))
    assert await sent_and_free() == (3, 1)

    # One that ends gives its blocks back, whether a heartbeat has counted it (r0) or not (r2).
    for ended, left in ((0, (4, 1)), (2, (4, 3))):
        tasks[ended].cancel()
        assert await sent_and_free() == left
    await cluster.finish(*tasks)
