"""The rate of a link: its arithmetic, and what handshake, doctor and hand-offs make of every transport."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from contract.kv import Hello
from kv_transfer.handshake import introduce, survey
from kv_transfer.link_rate import Run, SenderClock
from kv_transfer.pool import Pool
from pdserve.core.clock import MonotonicClock
from pdserve.core.handoff import KVPeer, TransferProof
from pdserve.core.kv_layout import MAX_PROBE_AREA_BYTES
from tests.kv_transfer.conftest import sender_of
from tests.kv_transfer.peer_process import LARGE
from tests.loopback import create_transport

ROOT = Path(__file__).parents[2]
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
)
BLOCKS = 24  # 35 MB
HANDOFFS = 4


def run_of(*messages: tuple[int, float, float]) -> Run:
    run = Run()
    for message in messages:
        run.add(*message)
    return run


def test_back_to_back_messages_last_from_completion_to_completion() -> None:
    run = run_of((1000, 1.0, 1.5), (1000, 1.1, 2.0), (1000, 1.2, 2.5))
    assert (run.num_bytes, run.busy_s) == (3000, 1.5)
    assert run.gbs == pytest.approx(2e-6)


def test_a_wait_for_the_sender_does_not_count() -> None:
    assert run_of((1000, 1.0, 1.5), (1000, 7.0, 7.25)).busy_s == 0.75


def test_what_was_buffered_while_the_receiver_was_away_is_no_faster() -> None:
    """Two messages that lay in a socket for a second."""
    assert run_of((1000, 1.0, 2.0), (1000, 1.1, 2.001)).gbs == pytest.approx(2000 / 1.001 / 1e9)


def test_a_run_without_bytes_has_no_rate() -> None:
    assert Run().gbs == 0.0


@pytest.mark.parametrize(("size", "took_s", "tells"), [(2**20, 1e-4, True), (2**16, 1e-4, False), (2**16, 0.006, True)])
def test_a_small_fast_train_tells_nothing(size: int, took_s: float, tells: bool) -> None:
    assert run_of((size, 0.0, took_s)).tells == tells


def test_the_senders_clock_is_known_by_the_fastest_header() -> None:
    clock = SenderClock()
    clock.heard(1_000_000, 51.5)  # the clocks differ by 50 s; the header took half a second
    clock.heard(2_000_000, 52.01)
    clock.heard(3_000_000, 53.2)
    assert clock.arrival_s(3_000_000) == pytest.approx(53.01, abs=1e-3)
    assert clock.departure_s(3_000_000) == clock.arrival_s(3_000_000)
    for round_trip_s in (0.5, 0.02, 0.04):
        clock.answered(round_trip_s)
    assert clock.departure_s(3_000_000) == pytest.approx(53.0, abs=1e-3)


def test_clocks_may_drift_apart() -> None:
    clock = SenderClock()
    for minute in range(120):  # the sender's clock loses 50 us in a second
        sent_s = minute * 60.0
        received_s = sent_s * (1 + 5e-5) + 0.01
        clock.heard(round(sent_s * 1e6), received_s)
        assert received_s - 0.01 < clock.arrival_s(round(sent_s * 1e6)) <= received_s


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


@pytest.mark.parametrize("name", ["shm", "tcp", "grpc_stream", "torch_dist", NIXL])
async def test_hand_offs_are_at_most_as_fast_as_the_ceiling_of_their_link(name: str) -> None:
    """Survey a link as the doctor does, then open one as a worker does and send large hand-offs, one by one."""
    async with AsyncExitStack() as stack:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "tests/kv_transfer/peer_process.py"), name, str(BLOCKS),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        stack.push_async_callback(_end, process)
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(60):
            peer = msgspec.json.decode(await process.stdout.readline(), type=KVPeer)
            pool = Pool.create(LARGE, BLOCKS, probe_bytes=MAX_PROBE_AREA_BYTES)
            transport = create_transport(name, pool.memory)
            stack.push_async_callback(transport.aclose)
            link = await transport.connect(peer.endpoints[0], 10.0)
            await introduce(link, Hello("p", peer.epoch, LARGE, link.hashes(True), []), peer.worker_id)
            surveyed = await survey(link, pool, 0.2, MonotonicClock())
            await link.aclose()
            assert surveyed.moved_bytes > 0
            assert 0 < surveyed.round_trip_s <= surveyed.median_round_trip_s
            assert min(surveyed.gbs, surveyed.ceiling_gbs) > 0

            sender = sender_of(pool, transport, lease_s=10.0)
            stack.push_async_callback(sender.aclose)
            await sender.connect(peer.worker_id, peer.epoch, peer.endpoints)
            ceilings = [sender.links()[0].ceiling_gbs]
            for number in range(HANDOFFS):
                process.stdin.write(b"r%d\n" % number)
                sender.push(f"r{number}", peer, BLOCKS, MonotonicClock().now() + 30)
                sender.send_blocks(f"r{number}", 0, range(BLOCKS), last=True)
                await sender.wait(f"r{number}")
                proof = msgspec.json.decode(await process.stdout.readline(), type=TransferProof)
                assert 0 < proof.gbs <= proof.ceiling_gbs
                assert proof.kv_bytes > 16e6
                ceilings.append(sender.links()[0].ceiling_gbs)
                assert ceilings[-1] == pytest.approx(proof.ceiling_gbs)
    assert ceilings == sorted(ceilings)
