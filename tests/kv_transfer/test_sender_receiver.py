"""Whole hand-offs, over every transport."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import kv_transfer.receiver
import kv_transfer.send_link
import kv_transfer.sender
from kv_transfer import protocol
from kv_transfer import sender as sender_module
from kv_transfer.handshake import measure
from kv_transfer.transfer import TransferEnded
from pdserve.core.errors import (
    ConfigError,
    LayoutMismatch,
    ModelError,
    PeerLost,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import KVLayout
from tests.host_pool import changed
from tests.kv_transfer.status import Status, status_of

MakeEnds = Callable[..., Awaitable[Any]]
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
)
TRANSPORTS = ["loopback", "shm", "tcp", "grpc_stream", "torch_dist"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_travels_in_chunks(make_ends: MakeEnds, transport: str, layout: KVLayout) -> None:
    ends = await make_ends(transport)
    target_ids, source_ids = [40, 3, 17, 18, 19, 60, 1, 2, 30], [5, 6, 7, 20, 21, 9, 8, 50, 49]
    ends.start("r", target_ids)
    assert status_of(ends.receiver, "r") is Status.BOOTSTRAPPING
    assert status_of(ends.sender, "r") is Status.BOOTSTRAPPING
    for first in (0, 3, 6):
        ends.sender.send_blocks(
            "r", first, source_ids[first : first + 3], last=first == 6, trailer=b"token 1" * (first == 6)
        )
        await asyncio.sleep(0.01)
    received = await ends.both("r")
    assert ends.blocks_of(ends.target, target_ids) == ends.blocks_of(ends.source, source_ids)
    expected = layout.expected_bytes(prompt_tokens=9 * layout.block_size - 1)
    assert received.proof.kv_bytes == expected
    assert received.proof.kv_bytes_retried == 0
    assert received.proof.transport == transport
    assert (received.proof.blocks_received, received.proof.blocks_skipped) == (9, 0)
    assert received.proof.messages <= 9
    assert received.proof.checksum == "xxh3-64 verified"
    assert received.trailer == b"token 1"
    proof = received.proof
    assert 0 < proof.wire_ms <= proof.span_ms <= proof.request_to_ready_ms < 10_000
    assert 0 < proof.import_ms <= proof.span_ms
    assert proof.export_ms > 0
    assert received.verified_s <= ends.clock.now()
    assert [link.worker_id for link in ends.sender.links()] == ["d"]
    assert not any(ends.target.data[i * 1024 : (i + 1) * 1024] != bytes(1024) for i in range(64) if i not in target_ids)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_travels_layer_by_layer(make_ends: MakeEnds, transport: str, layout: KVLayout) -> None:
    layout = changed(layout, num_layers=5)
    ends = await make_ends(transport, layout=layout, message_bytes=3 * layout.layer_bytes(range(1)))
    target_ids, source_ids = [40, 3, 17, 18, 19], [5, 6, 7, 20, 9]
    ends.start("r", target_ids, 1)
    for layers in (range(2), range(2, 3)):
        ends.sender.send_blocks("r", 0, source_ids[:3], layers)
        await asyncio.sleep(0.01)
    ends.sender.send_blocks("r", 3, source_ids[3:], range(4))
    ends.sender.send_blocks("r", 0, source_ids[:3], range(3, 5))
    ends.sender.send_blocks("r", 3, source_ids[3:], range(4, 5), last=True, trailer=b"token 1")
    received = await ends.both("r")
    assert ends.blocks_of(ends.target, target_ids[1:]) == ends.blocks_of(ends.source, source_ids[1:])
    assert received.proof.kv_bytes == 4 * layout.block_bytes
    assert received.proof.messages == 8
    assert received.trailer == b"token 1"
    assert not any(ends.target.data[40 * layout.block_bytes : 41 * layout.block_bytes])


async def test_no_more_travels_than_may(make_ends: MakeEnds) -> None:
    ends = await make_ends("tcp", message_bytes=1024, max_inflight_bytes=4096)
    await ends.sender.connect("d", "e1", ends.endpoints)
    peer = ends.sender._peers["d"]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, peer._inflight_bytes)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    for i in range(3):
        ids = list(range(20 * i, 20 * i + 20))
        ends.start(f"r{i}", ids, send=ids)
    await ends.receiver.abort("r1")
    with pytest.raises(TransferError):
        await ends.sender.wait("r1")
    await asyncio.gather(*(ends.sender.wait(name) for name in ("r0", "r2")))
    watching.cancel()
    assert 0 < most <= 4096
    assert peer._inflight_bytes == 0


async def test_a_hand_off_without_blocks_still_brings_its_trailer(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    ends.start("r", [10, 11], 2)
    ends.sender.send_blocks("r", 0, [0, 1], last=True, trailer=b"t" * 4096)
    received = await ends.both("r")
    assert (received.proof.kv_bytes, received.proof.messages, received.trailer) == (0, 1, b"t" * 4096)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("checksum", [True, False])
async def test_several_at_once_share_a_link(make_ends: MakeEnds, transport: str, checksum: bool) -> None:
    ends = await make_ends(transport, checksum=checksum)

    async def hand_off(i: int) -> None:
        ids = list(range(i * 10, i * 10 + 10))
        ends.start(f"r{i}", ids)
        for slot, block in enumerate(ids):
            ends.sender.send_blocks(f"r{i}", slot, [block], last=slot == 9)
            await asyncio.sleep(0)
        received = await ends.both(f"r{i}")
        assert received.proof.kv_bytes == 10 * 1024
        assert received.proof.checksum == ("xxh3-64 verified" if checksum else "off")

    async with asyncio.timeout(20):
        await asyncio.gather(*(hand_off(i) for i in range(6)))
    assert ends.target.data[: 60 * 1024] == ends.source.data[: 60 * 1024]
    assert ends.receiver.refused == {}


async def test_a_long_hand_off_does_not_keep_a_short_one_waiting(make_ends: MakeEnds) -> None:
    ends = await make_ends(message_bytes=1024)
    await ends.sender.connect("d", "e1", ends.endpoints)
    for name, ids in (("long", list(range(60))), ("short", [60, 61])):
        ends.start(name, ids, send=ids)
    short, long = await asyncio.gather(ends.receiver.wait("short"), ends.receiver.wait("long"))
    assert short.verified_s < long.verified_s


async def test_adjacent_blocks_are_coalesced(make_ends: MakeEnds) -> None:
    ends = await make_ends(message_bytes=4096)
    await ends.sender.connect("d", "e1", ends.endpoints)
    ends.start("r", list(range(10)))
    for slot in range(10):
        ends.sender.send_blocks("r", slot, [slot], last=slot == 9)
    assert (await ends.receiver.wait("r")).proof.messages == 3


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
async def test_blocks_larger_than_a_message_should_be(make_ends: MakeEnds, transport: str) -> None:
    layout = KVLayout.uniform("model", "bfloat16", block_size=64, num_layers=32, num_kv_heads=8, head_dim=128)  # 8 MiB
    ends = await make_ends(transport, layout=layout, num_blocks=3, message_bytes=2**20)
    ends.start("r", [2, 0, 1], for_s=20, send=[0, 1, 2])
    received = await ends.both("r")
    assert (received.proof.kv_bytes, received.proof.messages) == (3 * 8 * 2**20, 3)
    assert ends.blocks_of(ends.target, [2, 0, 1]) == ends.source.data


async def test_blocks_larger_than_any_message_are_a_configuration_error(make_ends: MakeEnds) -> None:
    layout = KVLayout.uniform("model", "float32", block_size=1024, num_layers=80, num_kv_heads=8, head_dim=128)
    with pytest.raises(ConfigError, match=r"^engine\.block_size: "):
        await make_ends(layout=layout, num_blocks=0)


async def test_other_layouts_are_refused_before_any_request(
    make_ends: MakeEnds, other_layout: KVLayout, caplog: pytest.LogCaptureFixture
) -> None:
    ends = await make_ends(sender_layout=other_layout)
    with pytest.raises(LayoutMismatch, match="block_size: 4 here, 8 at the peer"):
        await ends.sender.connect("d", "e1", ends.endpoints)
    assert ends.receiver.refused == {"layout": 1}
    assert "block_size: 4 here, 8 at the peer" in caplog.text
    assert ends.sender.links() == ()
    ends.start("r", [1], for_s=5)
    with pytest.raises(LayoutMismatch):
        await ends.sender.wait("r")


async def test_checksums_must_be_on_at_both_ends_or_neither(make_ends: MakeEnds) -> None:
    ends = await make_ends(sender_checksum=False)
    with pytest.raises(LayoutMismatch, match=r"transfer\.checksum differs: on here, off at the peer"):
        await ends.sender.connect("d", "e1", ends.endpoints)


@pytest.mark.parametrize("transport", ["loopback", "shm", NIXL])
async def test_links_are_measured_with_zeros_and_never_with_kv(
    make_ends: MakeEnds, transport: str, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = await make_ends(transport)
    source, target = ends.source, ends.target
    assert any(source.data)
    (area,) = target.probe(0, target.probe_bytes)
    target.host.view(area)[:] = b"\xff" * area.size

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a probe was cut from the pool")

    for pool in (source, target):
        monkeypatch.setattr(pool, "regions", refuse)
    await ends.sender.connect("d", "e1", ends.endpoints)
    measured = bytes(target.host.view(area))
    assert len(measured.rstrip(b"\xff")) >= 2**16
    assert set(measured) <= {0, 0xFF}
    assert not any(target.data)
    (link,) = ends.sender.links()
    assert link.transport == transport


async def test_end_ids_must_be_the_same_at_both_ends(make_ends: MakeEnds) -> None:
    """Else one goes on from a token that is the last one to the other."""
    ends = await make_ends(eos_token_ids=(7, 2), sender_eos_token_ids=(2,))
    with pytest.raises(LayoutMismatch, match=r"eos_token_ids differ: \[2, 7\] here, \[2\] at the peer"):
        await ends.sender.connect("d", "e1", ends.endpoints)
    assert ends.receiver.refused == {"layout": 1}
    same = await make_ends(eos_token_ids=(7, 2, 7), sender_eos_token_ids=(2, 7))
    await same.sender.connect("d", "e1", same.endpoints)
    many = await make_ends(eos_token_ids=tuple(range(1024)), sender_eos_token_ids=tuple(range(1, 1025)))
    with pytest.raises(LayoutMismatch, match=r"differ: \[0, 1, .*, 15, \.\.\.\] here"):
        await many.sender.connect("d", "e1", many.endpoints)
    with pytest.raises(ModelError, match="1025 eos_token_ids; at most 1024"):
        await make_ends(eos_token_ids=tuple(range(1025)))


async def test_connecting_is_idempotent_and_follows_the_epoch(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    await asyncio.gather(*(ends.sender.connect("d", "e1", ends.endpoints) for _ in range(3)))
    assert [link.worker_id for link in ends.sender.links()] == ["d"]
    with pytest.raises(TransferRefused, match="started anew"):
        await ends.sender.connect("d", "e0", ends.endpoints)
    assert [link.worker_id for link in ends.sender.links()] == ["d"]
    with pytest.raises(TransferRefused, match="another worker"):
        await ends.sender.connect("d2", "e1", ends.endpoints)
    with pytest.raises(ConfigError, match=r"^transfer\.transport: "):
        await ends.sender.connect("d", "e1", [KVEndpoint("torch_dist", "127.0.0.1:1")])


@pytest.mark.parametrize("transport", ["loopback", "tcp", "torch_dist"])
async def test_a_lost_link_fails_its_hand_offs_at_once_and_the_next_start_reconnects(
    make_ends: MakeEnds, transport: str
) -> None:
    ends = await make_ends(transport, lease_s=30.0)
    await ends.sender.connect("d", "e1", ends.endpoints)
    for name, ids in (("a", [1, 2]), ("b", [3, 4])):
        ends.start(name, ids, for_s=30)
        ends.sender.send_blocks(name, 0, ids[:1])
    await until(lambda: status_of(ends.receiver, "b") is Status.TRANSFERRING)
    start = time.monotonic()
    await ends.sender._peers["d"]._link.aclose()
    for end in (ends.sender, ends.receiver):
        for name in ("a", "b"):
            with pytest.raises(PeerLost):
                await end.wait(name)
    assert time.monotonic() - start < 8
    assert ends.sender.links() == ()
    ends.start("c", [5], for_s=5, send=[7])
    await ends.both("c")
    assert ends.blocks_of(ends.target, [5]) == ends.blocks_of(ends.source, [7])


@pytest.mark.parametrize("transport", ["loopback", "shm"])
@pytest.mark.parametrize("state", ["bootstrapping", "waiting", "transferring"])
async def test_aborting_at_the_sender_fails_the_receiver_fast(make_ends: MakeEnds, transport: str, state: str) -> None:
    ends = await make_ends(transport, lease_s=30.0)
    await reach(ends, state)
    await ends.sender.abort("r")
    async with asyncio.timeout(30):  # told as soon as there is a link
        with pytest.raises(TransferError, match=r"the sender of r gave up: "):
            await ends.receiver.wait("r")
    with pytest.raises(TransferEnded, match="not being sent"):
        status_of(ends.sender, "r")
    await ends.sender.abort("r")
    await check_works(ends)


@pytest.mark.parametrize("transport", ["loopback", "shm"])
@pytest.mark.parametrize("state", ["bootstrapping", "waiting", "transferring"])
async def test_aborting_at_the_receiver_fails_the_sender_fast(make_ends: MakeEnds, transport: str, state: str) -> None:
    ends = await make_ends(transport, lease_s=30.0)
    # Without a link nothing tells the sender, whose deadline ends it.
    await reach(ends, state, for_s=2.0 if state == "bootstrapping" else 30.0)
    before = bytes(ends.target.data)
    await ends.receiver.abort("r")
    ends.sender.send_blocks("r", 2, [2, 3], last=True)
    async with asyncio.timeout(30):
        with pytest.raises(TransferError):
            await ends.sender.wait("r")
    assert ends.target.data == before
    with pytest.raises(TransferEnded, match="not expected"):
        status_of(ends.receiver, "r")
    await ends.receiver.abort("r")
    await check_works(ends)


async def test_aborting_wakes_who_waits(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    await reach(ends, "transferring")
    waits = asyncio.gather(ends.sender.wait("r"), ends.receiver.wait("r"), return_exceptions=True)
    await asyncio.sleep(0)
    await ends.receiver.abort("r")
    await ends.sender.abort("r")
    at_sender, at_receiver = await waits
    assert "aborted by its" in str(at_sender)
    assert "aborted by its receiver" in str(at_receiver)


async def test_closing_either_end_fails_what_is_under_way(make_ends: MakeEnds) -> None:
    for closing in ("sender", "receiver"):
        ends = await make_ends(lease_s=30.0)
        await reach(ends, "transferring")
        for _ in range(2):
            await getattr(ends, closing).aclose()
        for end in (ends.sender, ends.receiver):
            async with asyncio.timeout(30):
                with pytest.raises(PeerLost):
                    await end.wait("r")


async def test_deadlines(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    await ends.sender.connect("d", "e1", ends.endpoints)
    start = time.monotonic()
    ends.start("r", [1, 2], for_s=0.2, receiver_for_s=0.3)
    ends.sender.send_blocks("r", 0, [1])
    with pytest.raises(TransferTimeout, match="deadline"):
        await ends.sender.wait("r")
    with pytest.raises(TransferError, match="deadline"):
        await ends.receiver.wait("r")
    assert 0.15 < time.monotonic() - start < 8
    await check_works(ends)


async def test_a_silent_sender_loses_its_lease_and_a_slow_one_keeps_it(make_ends: MakeEnds) -> None:
    ends = await make_ends(lease_s=1.0)
    ends.announce("unheard", [5])
    ends.start("slow", [1, 2])
    with pytest.raises(TransferTimeout, match="silent"):
        await ends.receiver.wait("unheard")
    await asyncio.sleep(1.5)
    ends.sender.send_blocks("slow", 0, [1, 2], last=True)
    await ends.both("slow")


async def test_the_planted_delay_comes_before_the_last_block_counts(make_ends: MakeEnds) -> None:
    ends = await make_ends(delay_s=0.2)
    ends.start("r", [1, 2], for_s=5, send=[1, 2])
    received = await ends.both("r")
    assert received.proof.span_ms >= 200


# --- announced hand-offs ---------------------------------------------------------------------------------------------


async def test_blocks_that_are_queued_wait_for_the_announcement(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    await ends.sender.connect("d", "e1", ends.endpoints)
    ends.push("r", 4)
    ends.sender.send_blocks("r", 0, [5, 6])
    ends.sender.send_blocks("r", 2, [7, 8], last=True, trailer=b"token 1")
    await asyncio.sleep(0.05)
    assert status_of(ends.sender, "r") is Status.WAITING
    target_ids = [40, 3, 17, 18]
    ends.announce("r", target_ids)
    received = await ends.both("r")
    assert ends.blocks_of(ends.target, target_ids) == ends.blocks_of(ends.source, [5, 6, 7, 8])
    assert (received.proof.kv_bytes, received.trailer) == (4096, b"token 1")
    assert ends.receiver.refused == {}
    check_nothing_left(ends)


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
@pytest.mark.parametrize("linked", [True, False])
async def test_an_announcement_that_comes_before_its_hand_off_is_kept(
    make_ends: MakeEnds, transport: str, linked: bool
) -> None:
    """Without a link it is made when the hand-off begins, and the announcement comes over it while it is measured."""
    ends = await make_ends(transport)
    if linked:
        await ends.sender.connect("d", "e1", ends.endpoints)
    ends.announce("r", [10, 11, 12])
    if linked:
        await until(lambda: "r" in ends.sender._peers["d"]._announced)
    ends.push("r", 3, send=[1, 2, 3])
    await ends.both("r")
    assert ends.blocks_of(ends.target, [10, 11, 12]) == ends.blocks_of(ends.source, [1, 2, 3])
    check_nothing_left(ends)


async def test_an_announcement_amid_the_blocks(make_ends: MakeEnds, layout: KVLayout) -> None:
    """Layer by layer, of slots some of which are skipped."""
    ends = await make_ends()
    await ends.sender.connect("d", "e1", ends.endpoints)
    ends.push("r", 5)
    ends.sender.send_blocks("r", 0, [5, 6, 7], range(1))
    ends.announce("r", [10, 11, 12, 13, 14], 1)
    await until(lambda: status_of(ends.receiver, "r") is Status.TRANSFERRING)
    ends.sender.send_blocks("r", 0, [5, 6, 7], range(1, 2))
    ends.sender.send_blocks("r", 3, [8, 9], last=True)
    received = await ends.both("r")
    assert received.proof.kv_bytes == 4 * layout.block_bytes
    assert ends.blocks_of(ends.target, [11, 12, 13, 14]) == ends.blocks_of(ends.source, [6, 7, 8, 9])
    assert not any(ends.target.data[10 * 1024 : 11 * 1024])


@pytest.mark.parametrize("skipped", [1, 5])
async def test_skipped_blocks_are_not_sent_if_they_were_queued_before_the_announcement(
    make_ends: MakeEnds, layout: KVLayout, skipped: int
) -> None:
    ends = await make_ends()
    await ends.sender.connect("d", "e1", ends.endpoints)
    ends.push("r", 5)
    ends.sender.send_blocks("r", 0, [0, 1, 2])
    ends.sender.send_blocks("r", 3, [3, 4], last=True, trailer=b"t")
    ends.announce("r", [10, 11, 12, 13, 14], skipped)
    received = await ends.both("r")
    expected = layout.expected_bytes(5 * layout.block_size, blocks_skipped=skipped)
    assert received.proof.kv_bytes == expected
    assert (received.proof.blocks_skipped, received.trailer) == (skipped, b"t")
    assert not any(ends.target.data[10 * 1024 : (10 + skipped) * 1024])
    rest = range(skipped, 5)
    assert ends.blocks_of(ends.target, [10 + i for i in rest]) == ends.blocks_of(ends.source, list(rest))


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
async def test_announcements_and_hand_offs_in_any_order(make_ends: MakeEnds, transport: str) -> None:
    ends = await make_ends(transport, message_bytes=1024)
    draw = random.Random(11)

    async def send(name: str, blocks: list[int]) -> None:
        await asyncio.sleep(draw.random() * 0.1)
        ends.push(name, 3)
        for slot, block in enumerate(blocks):
            ends.sender.send_blocks(name, slot, [block], last=slot == 2, trailer=name.encode() * (slot == 2))
            await asyncio.sleep(draw.random() * 0.02)
        await ends.sender.wait(name)

    async def receive(name: str, blocks: list[int]) -> None:
        await asyncio.sleep(draw.random() * 0.1)
        ends.announce(name, blocks)
        assert (await ends.receiver.wait(name)).trailer == name.encode()

    ids = draw.sample(range(64), 60)
    async with asyncio.timeout(30):
        await asyncio.gather(
            *(work(f"r{i}", ids[i : i + 3]) for i in range(0, 60, 3) for work in (send, receive)),
        )
    assert ends.blocks_of(ends.target, sorted(ids)) == ends.blocks_of(ends.source, sorted(ids))
    check_nothing_left(ends)


async def test_a_receiver_that_has_no_room_yet_is_not_taken_for_silent(make_ends: MakeEnds) -> None:
    ends = await make_ends(lease_s=1.0)
    ends.push("r", 2)
    ends.sender.send_blocks("r", 0, [1, 2])
    await asyncio.sleep(1.5)
    assert status_of(ends.sender, "r") is Status.WAITING
    ends.announce("r", [3, 4])
    await until(lambda: status_of(ends.receiver, "r") is Status.TRANSFERRING)
    await asyncio.sleep(1.5)  # from now on both ends are heard of
    ends.sender.send_blocks("r", 2, [], last=True)
    await ends.both("r")


async def test_a_receiver_that_is_silent_after_its_announcement_is_given_up(make_ends: MakeEnds) -> None:
    ends = await make_ends(lease_s=0.3)
    await ends.sender.connect("d", "e1", ends.endpoints)
    ends.push("r", 2)
    ends.announce("r", [3, 4])
    await until(lambda: status_of(ends.receiver, "r") is Status.WAITING)
    (source,) = ends.receiver._links.values()

    async def say_nothing(header: object) -> None:
        await asyncio.sleep(30)

    source.say = say_nothing
    async with asyncio.timeout(10):
        with pytest.raises(TransferTimeout, match=r"silent for 0\.3 s"):
            await ends.sender.wait("r")


@pytest.mark.parametrize("begun", [True, False])
async def test_what_was_announced_over_a_link_that_is_lost_fails_at_once(make_ends: MakeEnds, begun: bool) -> None:
    """Whether the sender has heard of it or not. What is announced later waits for the next link."""
    ends = await make_ends(lease_s=30.0)
    await ends.sender.connect("d", "e1", ends.endpoints)
    ends.announce("r", [10, 11], for_s=30)
    if begun:
        await until(lambda: "r" in ends.sender._peers["d"]._announced)
        ends.push("r", 2, for_s=30)
    await ends.sender._peers["d"]._link.aclose()
    async with asyncio.timeout(10):
        with pytest.raises(PeerLost, match="the sender of r was lost: "):
            await ends.receiver.wait("r")
        if begun:
            with pytest.raises(PeerLost):
                await ends.sender.wait("r")
    await until(lambda: ends.sender.links() == ())
    ends.announce("next", [10, 11], for_s=30)
    ends.push("next", 2, for_s=30, send=[1, 2])
    await ends.both("next")
    assert ends.blocks_of(ends.target, [10, 11]) == ends.blocks_of(ends.source, [1, 2])
    check_nothing_left(ends)


async def test_a_sender_that_makes_no_link_in_time_is_lost(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer.receiver, "LINK_TIMEOUT_S", 1.0)
    ends = await make_ends(lease_s=30.0)
    for name, sender_id in (("early", "p"), ("late", "p2"), ("given up", "p3")):
        ends.receiver.announce(name, sender_id, [len(name), len(name) + 20], 0, ends.in_s(30))
    await ends.receiver.abort("given up")
    ends.push("early", 2, for_s=30)
    async with asyncio.timeout(10):
        with pytest.raises(PeerLost, match="there is no KV link from p2"):
            await ends.receiver.wait("late")
    assert status_of(ends.receiver, "early") is Status.WAITING
    ends.sender.send_blocks("early", 0, [1, 2], last=True)
    await ends.both("early")
    check_nothing_left(ends)


async def test_an_old_link_that_ends_late_takes_nothing_along(make_ends: MakeEnds) -> None:
    """It was announced over the dead link, and again over the one that took its place."""
    ends, old = await make_ends(lease_s=30.0), await make_ends()
    await old.sender.connect("d", "e1", ends.endpoints)
    ends.announce("r", [10, 11], for_s=30)
    await until(lambda: "r" in old.sender._peers["d"]._announced)
    await ends.sender.connect("d", "e1", ends.endpoints)
    await old.sender.aclose()
    await until(lambda: len(ends.receiver._tasks) == 2)  # accepting, and serving the new link
    ends.push("r", 2, for_s=30, send=[1, 2])
    await ends.both("r")
    check_nothing_left(ends)


async def test_of_two_links_the_newest_is_told(make_ends: MakeEnds) -> None:
    """The worker has begun anew, and the receiver has not noticed that its old link is dead. Once it does, the new one
    is still known."""
    ends, old = await make_ends(), await make_ends()
    await old.sender.connect("d", "e1", ends.endpoints)
    await ends.sender.connect("d", "e1", ends.endpoints)

    async def pass_one(name: str) -> None:
        ends.announce(name, [10, 11])
        await until(lambda: name in ends.sender._peers["d"]._announced)
        ends.push(name, 2, send=[1, 2])
        await ends.both(name)

    await pass_one("r")
    assert not old.sender._peers["d"]._announced
    await old.sender.aclose()
    await until(lambda: len(ends.receiver._tasks) == 2)  # accepting, and serving the new link
    await pass_one("after")
    assert ends.blocks_of(ends.target, [10, 11]) == ends.blocks_of(ends.source, [1, 2])
    check_nothing_left(ends)


async def test_a_hand_off_is_announced_to_its_own_sender_alone(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    await ends.sender.connect("d", "e1", ends.endpoints)
    ends.receiver.announce("r", "another", [10], 0, ends.in_s(20))
    ends.push("r", 1, for_s=0.3, send=[1])
    with pytest.raises(TransferTimeout):
        await ends.sender.wait("r")
    assert status_of(ends.receiver, "r") is Status.BOOTSTRAPPING


@pytest.mark.parametrize("how", ["aborted", "expired"])
@pytest.mark.parametrize("linked", ["before", "meanwhile", "later"])
async def test_an_announcement_of_what_is_over_at_the_sender_fails_the_receiver_at_once(
    make_ends: MakeEnds, how: str, linked: str
) -> None:
    """Linked before the hand-off began, or by it (it is over before there is a link), or anew by the next one."""
    ends = await make_ends(lease_s=30.0)
    if linked == "before":
        await ends.sender.connect("d", "e1", ends.endpoints)
    ends.push("r", 2, for_s=0.05 if how == "expired" else 20.0)
    if how == "aborted":
        ends.sender.send_blocks("r", 0, [1, 2], last=True)
        await ends.sender.abort("r")
    else:
        with pytest.raises(TransferTimeout, match="deadline"):
            await ends.sender.wait("r")
    if linked == "later":
        await until(lambda: bool(ends.sender.links()))
        await ends.sender._peers["d"]._link.aclose()
        await until(lambda: not ends.sender.links() and not ends.receiver._links)
    ends.announce("r", [10, 11], for_s=30)
    if linked == "later":
        await ends.sender.connect("d", "e1", ends.endpoints)
    async with asyncio.timeout(10):
        with pytest.raises(TransferError, match="the sender of r gave up: ") as told:
            await ends.receiver.wait("r")
    assert type(told.value) in (TransferError, TransferTimeout)
    check_nothing_left(ends)
    await check_works(ends, "next")
    assert not any(ends.target.data[10 * 1024 : 12 * 1024])


async def test_an_announcement_of_what_was_given_up_while_its_link_is_made(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard before the link is known to the sender's other half."""
    ends, measured = await make_ends(lease_s=30.0), asyncio.Event()

    async def measure_late(*args: Any) -> float:
        await measured.wait()
        return await measure(*args)

    monkeypatch.setattr(sender_module, "measure", measure_late)
    ends.announce("r", [10, 11], for_s=30)
    ends.push("r", 2)
    await until(lambda: bool(ends.receiver._links))  # the receiver has greeted it, and tells it now
    assert ends.sender.links() == ()
    await ends.sender.abort("r")
    measured.set()
    async with asyncio.timeout(10):
        with pytest.raises(TransferError, match="the sender of r gave up: "):
            await ends.receiver.wait("r")
    await check_works(ends, "next")
    check_nothing_left(ends)


async def test_a_hand_off_given_up_at_the_receiver_before_the_sender_begins_it(make_ends: MakeEnds) -> None:
    ends = await make_ends(lease_s=30.0)
    await ends.sender.connect("d", "e1", ends.endpoints)
    ends.announce("r", [10, 11], for_s=30)
    await until(lambda: "r" in ends.sender._peers["d"]._announced)
    await ends.receiver.abort("r")
    ends.announce("other", [10, 11], for_s=30)  # the same blocks, somebody else's now
    ends.push("r", 2, for_s=30, send=[1, 2])
    async with asyncio.timeout(10):
        with pytest.raises(TransferRefused, match=r"r is not expected \(any more\)"):
            await ends.sender.wait("r")
    assert not any(ends.target.data)
    assert status_of(ends.receiver, "other") is Status.BOOTSTRAPPING
    await ends.receiver.abort("other")
    ends.push("other", 2)
    with pytest.raises(TransferRefused):
        await ends.sender.wait("other")
    check_nothing_left(ends)
    await check_works(ends, "next")


@pytest.mark.parametrize(("wanted", "first"), [(1, "push"), (3, "announcement")])
async def test_another_number_of_blocks_is_refused_at_both_ends(make_ends: MakeEnds, wanted: int, first: str) -> None:
    ends = await make_ends(lease_s=30.0)
    await ends.sender.connect("d", "e1", ends.endpoints)

    def push() -> None:
        ends.push("r", 2, for_s=30, send=[1, 2])

    if first == "push":
        push()
    ends.announce("r", list(range(10, 10 + wanted)), for_s=30)
    if first == "announcement":
        await until(lambda: "r" in ends.sender._peers["d"]._announced)
        push()
    why = f"d wants {wanted} blocks of r less 0; 2 are to be sent"
    async with asyncio.timeout(10):
        with pytest.raises(TransferRefused, match=f"^{why}"):
            await ends.sender.wait("r")
        with pytest.raises(TransferRefused, match=f"^the sender of r gave up: {why}"):
            await ends.receiver.wait("r")
    assert not any(ends.target.data)
    check_nothing_left(ends)
    await check_works(ends, "next")


@pytest.mark.parametrize("linked", [True, False])
async def test_a_deadline_that_passes_without_an_announcement(make_ends: MakeEnds, linked: bool) -> None:
    ends = await make_ends(lease_s=30.0)
    if linked:
        await ends.sender.connect("d", "e1", ends.endpoints)
    start = time.monotonic()
    ends.push("r", 2, for_s=0.3, send=[1, 2])
    with pytest.raises(TransferTimeout, match=r"^KV of r is not handed over and its deadline passed"):
        await ends.sender.wait("r")
    assert 0.25 < time.monotonic() - start < 8
    check_nothing_left(ends)
    await check_works(ends, "next")


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
async def test_a_link_that_is_lost_fails_what_waits_for_its_announcement(make_ends: MakeEnds, transport: str) -> None:
    ends = await make_ends(transport, lease_s=30.0)
    await ends.sender.connect("d", "e1", ends.endpoints)
    for name in ("a", "b"):
        ends.push(name, 2, for_s=30)
        ends.sender.send_blocks(name, 0, [1, 2])
    await ends.sender._peers["d"]._link.aclose()
    async with asyncio.timeout(10):
        for name in ("a", "b"):
            with pytest.raises(PeerLost, match="the KV link to d was lost"):
                await ends.sender.wait(name)
    check_nothing_left(ends)
    await check_works(ends, "next")


async def test_announcements_of_what_never_begins_are_bounded(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer.send_link, "_MAX_ANNOUNCED", 3)
    monkeypatch.setattr(kv_transfer.sender, "_REMEMBERED", 3)
    ends = await make_ends()
    await ends.sender.connect("d", "e1", ends.endpoints)
    for i in range(5):
        ends.announce(f"r{i}", [i])
    await until(lambda: "r4" in ends.sender._peers["d"]._announced)
    assert list(ends.sender._peers["d"]._announced) == ["r2", "r3", "r4"]
    for i in (2, 3, 4):
        ends.push(f"r{i}", 1, send=[i])
        await ends.both(f"r{i}")
    for i in range(5):
        ends.push(f"s{i}", 1)
        await ends.sender.abort(f"s{i}")
    assert list(ends.sender._over) == ["s2", "s3", "s4"]
    for i in (0, 1):
        await ends.receiver.abort(f"r{i}")
    check_nothing_left(ends)


async def test_bad_arguments(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    for ids, skipped in (([1, 1], 0), ([1, 64], 0), ([1, -1], 0), ([1, 2], 3), ([1, 2], -1)):
        with pytest.raises(ValueError, match="block"):
            ends.announce("r", ids, skipped)
    with pytest.raises(TransferEnded, match="not being sent"):
        ends.sender.send_blocks("r", 0, [1])
    ends.start("r", [1, 2], for_s=5)
    with pytest.raises(ValueError, match="already"):
        ends.announce("r", [3])
    with pytest.raises(ValueError, match="already"):
        ends.push("r", 2)
    for first, ids, last, trailer in ((1, [1, 2], True, b""), (-1, [1], True, b""), (0, [1], False, b"t")):
        with pytest.raises(ValueError, match=r"slots|trailer"):
            ends.sender.send_blocks("r", first, ids, last=last, trailer=trailer)
    with pytest.raises(ValueError, match="blocks outside a pool of 64"):
        ends.sender.send_blocks("r", 0, [64])
    ends.sender.send_blocks("r", 0, [1, 2], last=True)
    with pytest.raises(ValueError, match="after its last"):
        ends.sender.send_blocks("r", 0, [1])


async def reach(ends: Any, state: str, *, for_s: float = 30.0) -> None:
    """A hand-off "r" of four blocks (blocks 1 to 4 at the receiver), as far as ``state``."""
    ends.start("r", [1, 2, 3, 4], for_s=for_s)
    if state == "transferring":
        ends.sender.send_blocks("r", 0, [0, 1])
    await until(lambda: status_of(ends.receiver, "r") == state)


def check_nothing_left(ends: Any) -> None:
    """Neither end keeps anything of a hand-off that is over."""
    sender, receiver = ends.sender, ends.receiver
    left = [sender._transfers, receiver._by_attempt, receiver._by_nonce]
    for peer in sender._peers.values():
        left += [peer._transfers, peer._unbound, peer._announced]
    assert not any(left), left


async def check_works(ends: Any, name: str = "r") -> None:
    """A whole hand-off still passes, with the request id and blocks of before."""
    # An announcement over a link that the receiver has not noticed to be lost would fail with it.
    await until(lambda: len(ends.sender.links()) == len(ends.receiver._links))
    ends.start(name, [1, 2], send=[30, 31])
    await ends.both(name)
    assert ends.blocks_of(ends.target, [1, 2]) == ends.blocks_of(ends.source, [30, 31])


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something at the other end that nobody announces."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# --- the prefix of a prompt, of which the sender may have less than is wanted ----------------------------------------


@pytest.mark.parametrize(("sent", "skipped"), [(6, 0), (4, 0), (4, 2), (0, 0), (2, 3)])
async def test_a_partial_hand_off_brings_what_the_sender_has(
    make_ends: MakeEnds, layout: KVLayout, sent: int, skipped: int
) -> None:
    ends = await make_ends()
    target_ids, source_ids = [40, 3, 17, 18, 19, 60], [5, 6, 7, 20, 21, 9][:sent]
    before = bytes(ends.target.data)
    ends.sender.push("r", ends.peer, sent, ends.in_s(10), partial=True)
    ends.receiver.announce("r", "p", target_ids, skipped, ends.in_s(10), partial=True)
    ends.sender.send_blocks("r", 0, source_ids, layout.all_layers, last=True)
    received = await ends.both("r")
    moved = max(0, sent - skipped)
    assert received.num_blocks == skipped + moved
    assert (received.proof.blocks_received, received.proof.blocks_skipped) == (moved, skipped)
    assert received.proof.kv_bytes == moved * layout.block_bytes
    written = target_ids[skipped : skipped + moved]
    assert ends.blocks_of(ends.target, written) == ends.blocks_of(ends.source, source_ids[skipped:])
    others = [i for i in range(64) if i not in written]
    assert all(ends.target.data[i * 1024 : (i + 1) * 1024] == before[i * 1024 : (i + 1) * 1024] for i in others)


@pytest.mark.parametrize("sender_is_partial", [True, False])
async def test_only_a_partial_hand_off_may_end_early(make_ends: MakeEnds, sender_is_partial: bool) -> None:
    """The one that is not announced as partial is refused by the receiver, the one that is not begun as such by the
    sender."""
    ends = await make_ends()
    ends.sender.push("r", ends.peer, 2, ends.in_s(10), partial=sender_is_partial)
    ends.receiver.announce("r", "p", [1, 2, 3], 0, ends.in_s(10), partial=not sender_is_partial)
    ends.sender.send_blocks("r", 0, [5, 6], last=True)
    for end in (ends.sender, ends.receiver):
        with pytest.raises(TransferRefused):
            await asyncio.wait_for(end.wait("r"), 5)


async def test_a_changed_message_of_a_partial_hand_off_is_sent_again(
    make_ends: MakeEnds, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is not the last one, and the last one comes first."""
    ends = await make_ends(message_bytes=layout.block_bytes)
    real, calls = protocol.checksum, 0

    def wrong_once(payload: Any, trailer: bytes) -> int:
        nonlocal calls
        calls += 1
        return real(payload, trailer) ^ (calls == 2)

    monkeypatch.setattr(kv_transfer.send_link, "checksum", wrong_once)
    ends.sender.push("r", ends.peer, 3, ends.in_s(10), partial=True)
    ends.receiver.announce("r", "p", [1, 2, 3, 4], 0, ends.in_s(10), partial=True)
    ends.sender.send_blocks("r", 0, [5, 6, 7], last=True)
    received = await ends.both("r")
    assert (received.num_blocks, received.proof.kv_bytes_retried) == (3, layout.block_bytes)
    assert ends.blocks_of(ends.target, [1, 2, 3]) == ends.blocks_of(ends.source, [5, 6, 7])
