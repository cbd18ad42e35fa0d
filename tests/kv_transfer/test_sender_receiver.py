"""Whole hand-offs, over every transport."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.factory import create_transport
from kv_transfer.handoff_over import HandoffOver
from kv_transfer.memory_store import MemoryStore
from kv_transfer.status import TransferStatus
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

MakeEnds = Callable[..., Awaitable[Any]]
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
)
TRANSPORTS = ["loopback", "shm", "tcp", "grpc_stream", "torch_dist"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_travels_in_chunks(make_ends: MakeEnds, transport: str, layout: KVLayout) -> None:
    ends = await make_ends(transport)
    target_ids, source_ids = [40, 3, 17, 18, 19, 60, 1, 2, 30], [5, 6, 7, 20, 21, 9, 8, 50, 49]
    destination = ends.receiver.expect("r", target_ids, 0, ends.in_s(10))
    assert ends.receiver.status("r") is TransferStatus.BOOTSTRAPPING
    ends.sender.start("r", destination, ends.in_s(10))
    assert ends.sender.status("r") is TransferStatus.BOOTSTRAPPING
    for first in (0, 3, 6):
        ends.sender.send_blocks(
            "r", first, source_ids[first : first + 3], last=first == 6, trailer=b"token 1" * (first == 6)
        )
        await asyncio.sleep(0.01)
    received, sent = await asyncio.gather(ends.receiver.wait("r"), ends.sender.wait("r"))
    assert ends.blocks_of(ends.target, target_ids) == ends.blocks_of(ends.source, source_ids)
    expected = layout.expected_bytes(prompt_tokens=9 * layout.block_size - 1)
    assert received.proof.kv_bytes == sent.bytes == expected
    assert received.proof.kv_bytes_retried == sent.retries == 0
    assert received.proof.transport == sent.transport == transport
    assert (received.proof.blocks_received, received.proof.blocks_skipped) == (9, 0)
    assert received.proof.messages == sent.messages <= 9
    assert received.proof.checksum == "xxh3-64 verified"
    assert received.trailer == b"token 1"
    proof = received.proof
    assert 0 < proof.wire_ms <= proof.span_ms <= proof.request_to_ready_ms < 10_000
    assert 0 < proof.import_ms <= proof.span_ms
    assert 0 < proof.export_ms == pytest.approx(sent.export_ms, abs=0.01)
    assert received.verified_s <= ends.clock.now()
    assert [link.worker_id for link in ends.sender.links()] == ["d"]
    assert not any(ends.target.data[i * 1024 : (i + 1) * 1024] != bytes(1024) for i in range(64) if i not in target_ids)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_travels_layer_by_layer(make_ends: MakeEnds, transport: str, layout: KVLayout) -> None:
    layout = replace(layout, num_layers=5)
    ends = await make_ends(transport, layout=layout, message_bytes=3 * layout.layer_bytes)
    target_ids, source_ids = [40, 3, 17, 18, 19], [5, 6, 7, 20, 9]
    ends.sender.start("r", ends.receiver.expect("r", target_ids, 1, ends.in_s(10)), ends.in_s(10))
    for layers in (range(2), range(2, 3)):
        ends.sender.send_blocks("r", 0, source_ids[:3], layers)
        await asyncio.sleep(0.01)
    ends.sender.send_blocks("r", 3, source_ids[3:], range(4))
    ends.sender.send_blocks("r", 0, source_ids[:3], range(3, 5))
    ends.sender.send_blocks("r", 3, source_ids[3:], range(4, 5), last=True, trailer=b"token 1")
    received, sent = await asyncio.gather(ends.receiver.wait("r"), ends.sender.wait("r"))
    assert ends.blocks_of(ends.target, target_ids[1:]) == ends.blocks_of(ends.source, source_ids[1:])
    assert received.proof.kv_bytes == sent.bytes == 4 * layout.block_bytes
    assert received.proof.messages == sent.messages == 8
    assert received.trailer == b"token 1"
    assert not any(ends.target.data[40 * layout.block_bytes : 41 * layout.block_bytes])


async def test_a_layer_that_never_comes_keeps_a_hand_off_incomplete(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    ends.sender.start("r", ends.receiver.expect("r", [1, 2], 0, ends.in_s(5)), ends.in_s(5))
    ends.sender.send_blocks("r", 0, [1, 2], range(1))
    ends.sender.send_blocks("r", 0, [1], range(1, 2), last=True)
    with pytest.raises(TransferRefused, match="1 layers of blocks never came"):
        await ends.sender.wait("r")


async def test_no_more_travels_than_may(make_ends: MakeEnds) -> None:
    ends = await make_ends("tcp", message_bytes=1024, max_inflight_bytes=4096, delay_s=0.0)
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
        ends.sender.start(f"r{i}", ends.receiver.expect(f"r{i}", ids, 0, ends.in_s(10)), ends.in_s(10))
        ends.sender.send_blocks(f"r{i}", 0, ids, last=True)
    ends.receiver.expect("given up", [61], 0, ends.in_s(10))
    await ends.receiver.abort("r1")
    with pytest.raises(TransferError):
        await ends.sender.wait("r1")
    await asyncio.gather(*(ends.sender.wait(name) for name in ("r0", "r2")))
    watching.cancel()
    assert 0 < most <= 4096
    assert peer._inflight_bytes == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_link_is_measured_when_it_is_opened(make_ends: MakeEnds, transport: str) -> None:
    layout = KVLayout("model", "float32", block_size=64, num_layers=8, num_kv_heads=4, head_dim=64)  # 1 MiB
    ends = await make_ends(transport, layout=layout, num_blocks=8, message_bytes=2**20)
    await ends.sender.connect("d", "e1", ends.endpoints)
    (link,) = ends.sender.links()
    assert (link.worker_id, link.transport) == ("d", transport)
    assert 0.05 < link.ceiling_gbs < 1000
    ends.sender.start("r", ends.receiver.expect("r", list(range(8)), 0, ends.in_s(10)), ends.in_s(10))
    ends.sender.send_blocks("r", 0, range(8), last=True)
    proof = (await ends.receiver.wait("r")).proof
    assert proof.ceiling_gbs == pytest.approx(link.ceiling_gbs, rel=0.05)
    assert proof.gbs == pytest.approx(proof.kv_bytes / (proof.wire_ms + proof.import_ms) / 1e6)
    assert proof.share_of_ceiling == pytest.approx(proof.gbs / proof.ceiling_gbs)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_skipped_blocks_are_not_sent(make_ends: MakeEnds, transport: str, layout: KVLayout) -> None:
    ends = await make_ends(transport)
    destination = ends.receiver.expect("r", [10, 11, 12, 13, 14], 2, ends.in_s(10))
    ends.sender.start("r", destination, ends.in_s(10))
    ends.sender.send_blocks("r", 0, [0, 1, 2])
    ends.sender.send_blocks("r", 3, [3, 4], last=True)
    received, sent = await asyncio.gather(ends.receiver.wait("r"), ends.sender.wait("r"))
    assert received.proof.kv_bytes == sent.bytes == layout.expected_bytes(5 * layout.block_size, blocks_skipped=2)
    assert ends.blocks_of(ends.target, [10, 11]) == bytes(2048)
    assert ends.blocks_of(ends.target, [12, 13, 14]) == ends.blocks_of(ends.source, [2, 3, 4])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_hand_off_without_blocks_still_brings_its_trailer(make_ends: MakeEnds, transport: str) -> None:
    ends = await make_ends(transport)
    destination = ends.receiver.expect("r", [10, 11], 2, ends.in_s(10))
    ends.sender.start("r", destination, ends.in_s(10))
    ends.sender.send_blocks("r", 0, [0, 1], last=True, trailer=b"t" * 4096)
    received, sent = await asyncio.gather(ends.receiver.wait("r"), ends.sender.wait("r"))
    assert (received.proof.kv_bytes, received.proof.messages, received.trailer) == (0, 1, b"t" * 4096)
    assert (sent.bytes, sent.messages) == (0, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("checksum", [True, False])
async def test_several_at_once_share_a_link(make_ends: MakeEnds, transport: str, checksum: bool) -> None:
    ends = await make_ends(transport, checksum=checksum)

    async def hand_off(i: int) -> None:
        ids = list(range(i * 10, i * 10 + 10))
        ends.sender.start(f"r{i}", ends.receiver.expect(f"r{i}", ids, 0, ends.in_s(10)), ends.in_s(10))
        for slot, block in enumerate(ids):
            ends.sender.send_blocks(f"r{i}", slot, [block], last=slot == 9)
            await asyncio.sleep(0)
        received, _ = await asyncio.gather(ends.receiver.wait(f"r{i}"), ends.sender.wait(f"r{i}"))
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
        ends.sender.start(name, ends.receiver.expect(name, ids, 0, ends.in_s(10)), ends.in_s(10))
        ends.sender.send_blocks(name, 0, ids, last=True)
    short, long = await asyncio.gather(ends.receiver.wait("short"), ends.receiver.wait("long"))
    assert short.verified_s < long.verified_s


async def test_adjacent_blocks_are_coalesced(make_ends: MakeEnds) -> None:
    ends = await make_ends(message_bytes=4096)
    await ends.sender.connect("d", "e1", ends.endpoints)
    ends.sender.start("r", ends.receiver.expect("r", list(range(10)), 0, ends.in_s(10)), ends.in_s(10))
    for slot in range(10):
        ends.sender.send_blocks("r", slot, [slot], last=slot == 9)
    assert (await ends.sender.wait("r")).messages == 3


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_blocks_larger_than_a_message_should_be(make_ends: MakeEnds, transport: str) -> None:
    layout = KVLayout("model", "bfloat16", block_size=64, num_layers=32, num_kv_heads=8, head_dim=128)  # 8 MiB
    ends = await make_ends(transport, layout=layout, num_blocks=3, message_bytes=2**20)
    ends.sender.start("r", ends.receiver.expect("r", [2, 0, 1], 0, ends.in_s(20)), ends.in_s(20))
    ends.sender.send_blocks("r", 0, [0, 1, 2], last=True)
    received, sent = await asyncio.gather(ends.receiver.wait("r"), ends.sender.wait("r"))
    assert (received.proof.kv_bytes, sent.messages) == (3 * 8 * 2**20, 3)
    assert ends.blocks_of(ends.target, [2, 0, 1]) == ends.source.data


async def test_blocks_larger_than_any_message_are_a_configuration_error(make_ends: MakeEnds) -> None:
    layout = KVLayout("model", "float32", block_size=1024, num_layers=80, num_kv_heads=8, head_dim=128)
    with pytest.raises(ConfigError, match=r"^engine\.block_size: "):
        await make_ends(layout=layout, num_blocks=0)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_other_layouts_are_refused_before_any_request(
    make_ends: MakeEnds, transport: str, other_layout: KVLayout, caplog: pytest.LogCaptureFixture
) -> None:
    ends = await make_ends(transport, sender_layout=other_layout)
    with pytest.raises(LayoutMismatch, match="block_size: 4 here, 8 at the peer"):
        await ends.sender.connect("d", "e1", ends.endpoints)
    assert ends.receiver.refused == {"layout": 1}
    assert "block_size: 4 here, 8 at the peer" in caplog.text
    assert ends.sender.links() == ()
    ends.sender.start("r", ends.receiver.expect("r", [1], 0, ends.in_s(5)), ends.in_s(5))
    with pytest.raises(LayoutMismatch):
        await ends.sender.wait("r")


async def test_checksums_must_be_on_at_both_ends_or_neither(make_ends: MakeEnds) -> None:
    ends = await make_ends(sender_checksum=False)
    with pytest.raises(LayoutMismatch, match=r"transfer\.checksum differs: on here, off at the peer"):
        await ends.sender.connect("d", "e1", ends.endpoints)


class RecordingStore(MemoryStore):
    """Keeps what is thrown away here, and gives no blocks away."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.thrown_away: list[memoryview] = []

    if not TYPE_CHECKING:

        def scratch(self, size: int, *, on_device: bool = False) -> memoryview:
            """Memory that the test sees afterwards."""
            self.thrown_away.append(memoryview(bytearray(b"\xff" * size)))
            return self.thrown_away[-1]

        def read_blocks(self, *_: object, **__: object) -> list[memoryview]:
            """Nobody may ask for blocks."""
            raise AssertionError("a probe was cut from the pool")


@pytest.mark.parametrize("transport", [*TRANSPORTS, NIXL])
async def test_links_are_measured_with_zeros_and_never_with_kv(
    make_ends: MakeEnds, transport: str, layout: KVLayout
) -> None:
    source, target = RecordingStore(layout, 64), RecordingStore(layout, 64)
    ends = await make_ends(transport, source=source, target=target)
    assert any(source.data)
    await ends.sender.connect("d", "e1", ends.endpoints)
    assert target.thrown_away
    assert not any(any(probe) for probe in target.thrown_away)
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


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_lost_link_fails_its_hand_offs_at_once_and_the_next_start_reconnects(
    make_ends: MakeEnds, transport: str
) -> None:
    ends = await make_ends(transport, lease_s=30.0)
    await ends.sender.connect("d", "e1", ends.endpoints)
    for name, ids in (("a", [1, 2]), ("b", [3, 4])):
        ends.sender.start(name, ends.receiver.expect(name, ids, 0, ends.in_s(30)), ends.in_s(30))
        ends.sender.send_blocks(name, 0, ids[:1])
    await until(lambda: ends.receiver.status("b") is TransferStatus.TRANSFERRING)
    start = time.monotonic()
    await ends.sender._peers["d"]._link.aclose()
    for end in (ends.sender, ends.receiver):
        for name in ("a", "b"):
            with pytest.raises(PeerLost):
                await end.wait(name)
    assert time.monotonic() - start < 8
    assert ends.sender.links() == ()
    ends.sender.start("c", ends.receiver.expect("c", [5], 0, ends.in_s(5)), ends.in_s(5))
    ends.sender.send_blocks("c", 0, [7], last=True)
    await asyncio.gather(ends.receiver.wait("c"), ends.sender.wait("c"))
    assert ends.blocks_of(ends.target, [5]) == ends.blocks_of(ends.source, [7])


async def test_nobody_listens(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    destination = ends.receiver.expect("r", [1], 0, ends.in_s(5))
    await ends.receiver.aclose()
    await ends.receiving_transport.aclose()
    ends.sender.start("r", destination, ends.in_s(5))
    with pytest.raises(PeerLost):
        await ends.sender.wait("r")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("state", ["bootstrapping", "waiting", "transferring"])
async def test_aborting_at_the_sender_fails_the_receiver_fast(make_ends: MakeEnds, transport: str, state: str) -> None:
    ends = await make_ends(transport, lease_s=30.0)
    await reach(ends, state)
    await ends.sender.abort("r")
    async with asyncio.timeout(30):  # told as soon as there is a link
        with pytest.raises(TransferError, match=r"the sender of r gave up: .* aborted by its sender"):
            await ends.receiver.wait("r")
    with pytest.raises(HandoffOver, match="not being sent"):
        ends.sender.status("r")
    await ends.sender.abort("r")
    await check_works(ends)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("state", ["bootstrapping", "waiting", "transferring"])
async def test_aborting_at_the_receiver_fails_the_sender_fast(make_ends: MakeEnds, transport: str, state: str) -> None:
    ends = await make_ends(transport, lease_s=30.0)
    await reach(ends, state)
    before = bytes(ends.target.data)
    await ends.receiver.abort("r")
    ends.sender.send_blocks("r", 2, [2, 3], last=True)
    async with asyncio.timeout(30):
        with pytest.raises(TransferError):
            await ends.sender.wait("r")
    assert ends.target.data == before
    with pytest.raises(HandoffOver, match="not expected"):
        ends.receiver.status("r")
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


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_deadlines(make_ends: MakeEnds, transport: str) -> None:
    ends = await make_ends(transport)
    await ends.sender.connect("d", "e1", ends.endpoints)
    start = time.monotonic()
    ends.sender.start("r", ends.receiver.expect("r", [1, 2], 0, ends.in_s(0.3)), ends.in_s(0.2))
    ends.sender.send_blocks("r", 0, [1])
    with pytest.raises(TransferTimeout, match="deadline"):
        await ends.sender.wait("r")
    with pytest.raises(TransferError, match="deadline"):
        await ends.receiver.wait("r")
    assert 0.15 < time.monotonic() - start < 8
    ends.receiver.expect("unheard", [1, 2], 0, ends.in_s(0.1))
    with pytest.raises(TransferTimeout, match="deadline"):
        await ends.receiver.wait("unheard")
    await check_works(ends)


async def test_a_silent_sender_loses_its_lease_and_a_slow_one_keeps_it(make_ends: MakeEnds) -> None:
    ends = await make_ends(lease_s=1.0)
    ends.receiver.expect("unheard", [5], 0, ends.in_s(10))
    ends.sender.start("slow", ends.receiver.expect("slow", [1, 2], 0, ends.in_s(10)), ends.in_s(10))
    with pytest.raises(TransferTimeout, match="silent"):
        await ends.receiver.wait("unheard")
    await asyncio.sleep(1.5)
    ends.sender.send_blocks("slow", 0, [1, 2], last=True)
    await asyncio.gather(ends.receiver.wait("slow"), ends.sender.wait("slow"))


async def test_the_planted_delay_comes_before_the_last_block_counts(make_ends: MakeEnds) -> None:
    ends = await make_ends(delay_s=0.2)
    ends.sender.start("r", ends.receiver.expect("r", [1, 2], 0, ends.in_s(5)), ends.in_s(5))
    ends.sender.send_blocks("r", 0, [1, 2], last=True)
    received, sent = await asyncio.gather(ends.receiver.wait("r"), ends.sender.wait("r"))
    assert received.proof.span_ms >= 200
    assert sent.span_ms >= 200


async def test_bad_arguments(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    for ids, skipped in (([1, 1], 0), ([1, 64], 0), ([1, -1], 0), ([1, 2], 3), ([1, 2], -1)):
        with pytest.raises(ValueError, match="block"):
            ends.receiver.expect("r", ids, skipped, ends.in_s(5))
    destination = ends.receiver.expect("r", [1, 2], 0, ends.in_s(5))
    with pytest.raises(ValueError, match="already"):
        ends.receiver.expect("r", [3], 0, ends.in_s(5))
    with pytest.raises(HandoffOver, match="not being sent"):
        ends.sender.send_blocks("r", 0, [1])
    ends.sender.start("r", destination, ends.in_s(5))
    with pytest.raises(ValueError, match="already"):
        ends.sender.start("r", destination, ends.in_s(5))
    for first, ids, last, trailer in ((1, [1, 2], True, b""), (-1, [1], True, b""), (0, [1], False, b"t")):
        with pytest.raises(ValueError, match=r"slots|trailer"):
            ends.sender.send_blocks("r", first, ids, last=last, trailer=trailer)
    with pytest.raises(ValueError, match="blocks outside a pool of 64"):
        ends.sender.send_blocks("r", 0, [64])
    ends.sender.send_blocks("r", 0, [1, 2], last=True)
    with pytest.raises(ValueError, match="after its last"):
        ends.sender.send_blocks("r", 0, [1])
    with pytest.raises(ValueError, match="comes first"):
        unstarted(ends).expect("r", [1], 0, 0.0)


def test_the_memory_store_knows_its_blocks(layout: KVLayout) -> None:
    store = MemoryStore(layout, 4)
    with pytest.raises(ValueError, match="block 4 is outside the pool of 4"):
        store.land([4])
    assert [len(view) for view in store.read_blocks([0, 1, 3])] == [2048, 1024]
    assert [len(view) for view in store.land([0, 1, 3], range(1, 2)).parts] == [512, 512, 512]


def unstarted(ends: Any) -> Any:
    """A receiver that does not listen yet."""
    return type(ends.receiver)(
        ends.target,
        [create_transport("loopback")],
        worker_id="x",
        epoch="x",
        checksum=True,
        clock=ends.clock,
        lease_s=1.0,
    )


async def reach(ends: Any, state: str) -> None:
    """A hand-off "r" of four blocks (blocks 1 to 4 at the receiver), as far as ``state``."""
    destination = ends.receiver.expect("r", [1, 2, 3, 4], 0, ends.in_s(30))
    ends.sender.start("r", destination, ends.in_s(30))
    if state == "transferring":
        ends.sender.send_blocks("r", 0, [0, 1])
    await until(lambda: ends.receiver.status("r") == state)


async def check_works(ends: Any) -> None:
    """A whole hand-off still passes, with the request id and blocks of before."""
    ends.sender.start("r", ends.receiver.expect("r", [1, 2], 0, ends.in_s(10)), ends.in_s(10))
    ends.sender.send_blocks("r", 0, [30, 31], last=True)
    async with asyncio.timeout(30):
        await asyncio.gather(ends.receiver.wait("r"), ends.sender.wait("r"))
    assert ends.blocks_of(ends.target, [1, 2]) == ends.blocks_of(ends.source, [30, 31])


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something at the other end that nobody announces."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
