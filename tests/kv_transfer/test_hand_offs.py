"""Whole hand-offs, over every transport."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from typing import Any

import pytest

from kv_transfer.transfer import Transfer
from pdserve.core.errors import PeerLost, RequestAborted, TransferError
from pdserve.core.kv_layout import KVLayout
from tests.host_pool import changed
from tests.kv_transfer.conftest import LAYOUT, MakeEnds, until
from tests.kv_transfer.status import Status, status_of

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
)
TRANSPORTS = ["loopback", "shm", "tcp", "grpc_stream", "torch_dist"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_travels_in_chunks(make_ends: MakeEnds, transport: str) -> None:
    ends = await make_ends(transport)
    target_ids, source_ids = [40, 3, 17, 18, 19, 60, 1, 2, 30], [5, 6, 7, 20, 21, 9, 8, 50, 49]
    ends.start("r", target_ids)
    assert status_of(ends.receiving["r"]) is Status.BOOTSTRAPPING
    assert status_of(ends.sending["r"]) is Status.BOOTSTRAPPING
    for first in (0, 3, 6):
        ends.sending["r"].send_blocks(
            first, source_ids[first : first + 3], last=first == 6, trailer=b"token 1" * (first == 6)
        )
        await asyncio.sleep(0.01)
    received = await ends.both("r")
    proof = received.proof
    ends.check_moved(source_ids, target_ids)
    assert proof.kv_bytes == LAYOUT.expected_bytes(prompt_tokens=9 * LAYOUT.block_size - 1)
    assert (proof.kv_bytes_retried, proof.transport, proof.checksum) == (0, transport, "xxh3-64 verified")
    assert (proof.blocks_received, proof.blocks_skipped) == (9, 0)
    assert proof.messages <= 9
    assert received.trailer == b"token 1"
    assert 0 < proof.wire_ms <= proof.span_ms <= proof.request_to_ready_ms
    assert 0 < proof.import_ms <= proof.span_ms
    assert proof.export_ms > 0
    assert received.verified_s <= ends.clock.now()
    assert [link.worker_id for link in ends.sender.links()] == ["d"]
    assert not any(ends.target.bytes_of([i for i in range(64) if i not in target_ids]))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_travels_layer_by_layer(make_ends: MakeEnds, transport: str) -> None:
    layout = changed(LAYOUT, num_layers=5)
    ends = await make_ends(transport, layout=layout, message_bytes=3 * layout.layer_bytes(range(1)))
    target_ids, source_ids = [40, 3, 17, 18, 19], [5, 6, 7, 20, 9]
    ends.start("r", target_ids, 1)
    for layers in (range(2), range(2, 3)):
        ends.sending["r"].send_blocks(0, source_ids[:3], layers)
        await asyncio.sleep(0.01)
    ends.sending["r"].send_blocks(3, source_ids[3:], range(4))
    ends.sending["r"].send_blocks(0, source_ids[:3], range(3, 5))
    ends.sending["r"].send_blocks(3, source_ids[3:], range(4, 5), last=True, trailer=b"token 1")
    received = await ends.both("r")
    ends.check_moved(source_ids[1:], target_ids[1:])
    assert (received.proof.kv_bytes, received.proof.messages) == (4 * layout.block_bytes, 8)
    assert received.trailer == b"token 1"
    assert not any(ends.target.bytes_of([40]))


@pytest.mark.parametrize(
    ("transport", "checksum"), [*((each, True) for each in TRANSPORTS), ("loopback", False), ("tcp", False)]
)
async def test_several_at_once_share_a_link(make_ends: MakeEnds, transport: str, checksum: bool) -> None:
    ends = await make_ends(transport, checksum=checksum)

    async def hand_off(i: int) -> None:
        ids = list(range(i * 10, i * 10 + 10))
        ends.start(f"r{i}", ids)
        for slot, block in enumerate(ids):
            ends.sending[f"r{i}"].send_blocks(slot, [block], last=slot == 9)
            await asyncio.sleep(0)
        received = await ends.both(f"r{i}")
        assert received.proof.kv_bytes == 10 * 1024
        assert received.proof.checksum == ("xxh3-64 verified" if checksum else "off")

    async with asyncio.timeout(20):
        await asyncio.gather(*(hand_off(i) for i in range(6)))
    ends.check_moved(range(60), range(60))
    assert ends.receiver.refused == {}


async def test_blocks_larger_than_a_message_should_be(make_ends: MakeEnds) -> None:
    layout = KVLayout.uniform("model", "bfloat16", block_size=64, num_layers=32, num_kv_heads=8, head_dim=128)  # 8 MiB
    ends = await make_ends("tcp", layout=layout, num_blocks=3, message_bytes=2**20)
    ends.start("r", [2, 0, 1], for_s=20, send=[0, 1, 2])
    received = await ends.both("r")
    assert (received.proof.kv_bytes, received.proof.messages) == (3 * 8 * 2**20, 3)
    ends.check_moved([0, 1, 2], [2, 0, 1])


async def test_no_more_travels_than_may(make_ends: MakeEnds) -> None:
    ends = await make_ends("tcp", message_bytes=1024, max_inflight_bytes=4096)
    await ends.connect()
    peer = ends.sender._links["d"]
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
    await ends.receiving["r1"].abort()
    with pytest.raises(TransferError):
        await ends.sending["r1"].wait()
    await asyncio.gather(*(ends.sending[name].wait() for name in ("r0", "r2")))
    watching.cancel()
    assert 0 < most <= 4096
    assert peer._inflight_bytes == 0


@pytest.mark.parametrize("transport", ["loopback", "shm", NIXL])
async def test_links_are_measured_with_zeros_and_never_with_kv(
    make_ends: MakeEnds, transport: str, monkeypatch: pytest.MonkeyPatch
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
    await ends.connect()
    measured = bytes(target.host.view(area))
    assert len(measured.rstrip(b"\xff")) >= 2**16
    assert set(measured) <= {0, 0xFF}
    assert not any(target.data)
    (link,) = ends.sender.links()
    assert link.transport == transport


@pytest.mark.parametrize("transport", ["tcp", "torch_dist"])
async def test_a_lost_link_fails_its_hand_offs_at_once_and_the_next_one_reconnects(
    make_ends: MakeEnds, transport: str
) -> None:
    ends = await make_ends(transport, lease_s=30.0)
    for name, ids in (("a", [1, 2]), ("b", [3, 4])):
        ends.start(name, ids, for_s=30)
        ends.sending[name].send_blocks(0, ids[:1])
    await until(lambda: status_of(ends.receiving["b"]) is Status.TRANSFERRING)
    await ends.sender._links["d"]._link.aclose()
    async with asyncio.timeout(10):
        for name in ("a", "b"):
            for waiting in (ends.sending[name].wait(), ends.receiving[name].wait()):
                with pytest.raises(PeerLost):
                    await waiting
    await until(lambda: ends.sender.links() == ())
    await ends.check_works("c")


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize(
    ("transport", "state"), [("loopback", "bootstrapping"), ("loopback", "waiting"), ("shm", "transferring")]
)
async def test_aborting_at_one_end_fails_the_other_fast(
    make_ends: MakeEnds, transport: str, state: str, who: str
) -> None:
    ends = await make_ends(transport, lease_s=30.0)
    # Without a link nothing tells the sender, whose deadline ends it.
    for_s = 2.0 if (state, who) == ("bootstrapping", "receiver") else 30.0
    ends.start("r", [1, 2, 3, 4], for_s=for_s)
    if state == "transferring":
        ends.sending["r"].send_blocks(0, [0, 1])
    await until(lambda: status_of(ends.receiving["r"]) == state)
    before = bytes(ends.target.data)
    both: list[Transfer[Any]] = [ends.sending["r"], ends.receiving["r"]]
    own, other = both if who == "sender" else both[::-1]
    waiting = asyncio.create_task(own.wait())
    await asyncio.sleep(0)
    await own.abort()
    with pytest.raises(RequestAborted, match=f"aborted by its {who}"):
        await waiting
    if who == "receiver":
        ends.sending["r"].send_blocks(2, [2, 3], last=True)
    async with asyncio.timeout(30):  # told as soon as there is a link
        with pytest.raises(TransferError, match="the sender of r gave up: " if who == "sender" else None):
            await other.wait()
    assert who == "sender" or ends.target.data == before
    await own.abort()
    with pytest.raises(RequestAborted, match=f"aborted by its {who}"):
        await own.wait()
    await ends.check_works()


async def test_announcements_and_hand_offs_in_any_order(make_ends: MakeEnds) -> None:
    ends = await make_ends("tcp", message_bytes=1024)
    draw = random.Random(11)

    async def send(name: str, blocks: list[int]) -> None:
        await asyncio.sleep(draw.random() * 0.1)
        ends.push(name, 3)
        for slot, block in enumerate(blocks):
            ends.sending[name].send_blocks(slot, [block], last=slot == 2, trailer=name.encode() * (slot == 2))
            await asyncio.sleep(draw.random() * 0.02)
        await ends.sending[name].wait()

    async def receive(name: str, blocks: list[int]) -> None:
        await asyncio.sleep(draw.random() * 0.1)
        ends.announce(name, blocks)
        assert (await ends.receiving[name].wait()).trailer == name.encode()

    ids = draw.sample(range(64), 60)
    async with asyncio.timeout(30):
        await asyncio.gather(
            *(work(f"r{i}", ids[i : i + 3]) for i in range(0, 60, 3) for work in (send, receive)),
        )
    ends.check_moved(ids, ids)
    ends.check_nothing_left()
