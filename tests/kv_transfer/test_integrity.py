"""What a receiver refuses, and that it then touches no block of anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import contract.kv as protocol
from contract.kv import (
    Abort,
    Ack,
    Announce,
    Blocks,
    Header,
    Hello,
    HelloOk,
    Open,
    Probe,
    Probed,
    Rated,
    Refused,
    checksum,
    decode,
)
from contract.message import encode
from kv_transfer.base import KVLink
from kv_transfer.memory import HostMemory, Memory
from kv_transfer.transfer import Transfer
from pdserve.core.errors import ChecksumMismatch, TransferError, WorkerLost
from pdserve.core.kv_layout import MAX_PROBE_BYTES, KVLayout
from tests.host_pool import HostPool, inline
from tests.kv_transfer.conftest import LAYOUT as LAYOUT_OF_ENDS
from tests.kv_transfer.conftest import MakeEnds
from tests.kv_transfer.status import Status, status_of
from tests.kv_transfer.tampering import Damage, TamperingTransport
from tests.loopback import LoopbackTransport, create_transport
from tests.virtual_time import IN_VIRTUAL_TIME


class RawPeer:
    """Speaks the protocol by hand, rightly or wrongly."""

    def __init__(self, link: KVLink, layout: KVLayout) -> None:
        self.link, self.layout = link, layout

    @classmethod
    async def meet(cls, ends: Any) -> RawPeer:
        """One the receiver has welcomed."""
        transport = LoopbackTransport(HostMemory.create(4096))
        peer = cls(await transport.connect(ends.endpoints[0], 1.0), ends.target.layout)
        assert await peer.say(Hello("raw", "e1", peer.layout, True, [])) == HelloOk("d", "e1", peer.layout)
        return peer

    async def say(self, header: Header | bytes, payload: bytes = b"") -> Header:
        """The receiver's answer to a message."""
        await self.link.send(header if isinstance(header, bytes) else encode(header), inline(payload))
        return await self.heard()

    async def heard(self) -> Header:
        """The receiver's next message that is no news of the link's rate."""
        async with asyncio.timeout(30):
            while isinstance(header := decode((await self.link.recv()).header), Rated):
                pass
            return header

    async def announced(
        self, ends: Any, name: str, block_ids: list[int], num_skipped: int = 0, *, for_s: float = 5.0
    ) -> Announce:
        """A hand-off that the receiver announces to this peer."""
        ends.announce(name, block_ids, num_skipped, for_s=for_s, sender_id="raw")
        announced = await self.heard()
        assert isinstance(announced, Announce)
        assert announced.attempt_id == name
        return announced


def blocks(announced: Announce, seq: int, first_slot: int, payload: bytes, **changes: Any) -> Blocks:
    """A right header for this payload of 1 KiB blocks, with ``changes``."""
    header = Blocks(
        nonce=announced.nonce,
        epoch="e1",
        attempt_id="r",
        sent_us=0,
        seq=seq,
        first_slot=first_slot,
        num_blocks=len(payload) // 1024,
        first_layer=0,
        num_layers=2,
        checksum=checksum([memoryview(payload)], changes.get("trailer", b"")),
        export_us=0,
        last=False,
        trailer=b"",
    )
    return msgspec.structs.replace(header, **changes)


ONE, TWO = b"\1" * 1024, b"\2" * 2048
ATTACKS: dict[str, tuple[str, Callable[[Announce], tuple[Blocks, bytes]]]] = {
    "a stale epoch": ("stale_epoch", lambda d: (blocks(d, 2, 2, ONE, epoch="e0"), ONE)),
    "an unknown nonce": ("unknown_nonce", lambda d: (blocks(d, 2, 2, ONE, nonce="0" * 32), ONE)),
    "another request's id": ("wrong_request", lambda d: (blocks(d, 2, 2, ONE, attempt_id="other"), ONE)),
    "a message twice": ("duplicate", lambda d: (blocks(d, 1, 1, ONE), ONE)),
    "a filled slot": ("duplicate", lambda d: (blocks(d, 2, 1, ONE), ONE)),
    "a skipped slot": ("out_of_bounds", lambda d: (blocks(d, 2, 0, ONE), ONE)),
    "a slot past the end": ("out_of_bounds", lambda d: (blocks(d, 2, 4, ONE), ONE)),
    "too many bytes": ("wrong_size", lambda d: (blocks(d, 2, 2, TWO, num_blocks=1), TWO)),
    "no blocks at all": ("wrong_size", lambda d: (blocks(d, 2, 2, b""), b"")),
    "another content": ("checksum", lambda d: (blocks(d, 2, 2, ONE), b"\0" + ONE[1:])),
    "another trailer": (
        "checksum",
        lambda d: (msgspec.structs.replace(blocks(d, 2, 2, TWO, last=True), trailer=b"x"), TWO),
    ),
    "no layer": ("out_of_bounds", lambda d: (blocks(d, 2, 2, b"", num_blocks=1, num_layers=0), b"")),
    "half the layers, all the bytes": ("wrong_size", lambda d: (blocks(d, 2, 2, ONE, num_layers=1), ONE)),
    "a layer that is there": (
        "duplicate",
        lambda d: (blocks(d, 2, 1, ONE[:512], num_blocks=1, first_layer=1, num_layers=1), ONE[:512]),
    ),
    "a message too early": ("reordered", lambda d: (blocks(d, 3, 2, ONE), ONE)),
    "a message before the first": ("reordered", lambda d: (blocks(d, 0, 2, ONE), ONE)),
    "an early last": ("incomplete", lambda d: (blocks(d, 2, 2, ONE, last=True), ONE)),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_wrong_message_is_refused_and_touches_nothing(make_ends: MakeEnds, attack: str) -> None:
    reason, make = ATTACKS[attack]
    ends = await make_ends()
    peer = await RawPeer.meet(ends)
    await peer.announced(ends, "other", [20, 21])
    announced = await peer.announced(ends, "r", [10, 11, 12, 13], 1)
    assert await peer.say(blocks(announced, 1, 1, b"\7" * 1024), b"\7" * 1024) == Ack(announced.nonce, 1)
    before = bytes(ends.target.data)

    header, payload = make(announced)
    answer = await peer.say(header, payload)
    assert isinstance(answer, Refused)
    assert answer.kind == ("ChecksumMismatch" if reason == "checksum" else "TransferRefused")
    assert (answer.nonce, answer.seq) == (header.nonce, header.seq)
    assert ends.receiver.refused == {reason: 1}
    own = slice(12 * 1024, 14 * 1024)  # what arrived changed lies in its own blocks, and counts for nothing
    after = bytearray(ends.target.data)
    if reason == "checksum":
        after[own] = before[own]
    assert after == before
    assert status_of(ends.receiving["r"]) is Status.TRANSFERRING
    assert status_of(ends.receiving["other"]) is Status.BOOTSTRAPPING

    final = blocks(announced, 2, 2, TWO, last=True, trailer=b"t")
    assert await peer.say(final, TWO) == Ack(announced.nonce, 2)
    received = await ends.receiving["r"].wait()
    assert (received.proof.kv_bytes, received.proof.messages, received.trailer) == (3072, 2, b"t")
    assert received.proof.kv_bytes_retried == (len(payload) if reason in ("checksum", "duplicate") else 0)
    expected = bytearray(before)
    expected[12 * 1024 : 14 * 1024] = TWO
    assert ends.target.data == expected
    late = await peer.say(final, TWO)
    assert isinstance(late, Refused)
    assert ends.receiver.refused["unknown_nonce"] == 1 + (reason == "unknown_nonce")


async def test_a_message_that_comes_again_keeps_its_number(make_ends: MakeEnds) -> None:
    """With another one, its blocks would be there, and the receiver would wait for the first one until the deadline."""
    ends = await make_ends()
    peer = await RawPeer.meet(ends)
    announced = await peer.announced(ends, "r", [10, 11, 12])
    assert await peer.say(blocks(announced, 1, 0, ONE), ONE) == Ack(announced.nonce, 1)
    right = blocks(announced, 2, 1, TWO, last=True)
    assert isinstance(await peer.say(right, b"\0" + TWO[1:]), Refused)
    answer = await peer.say(replace(right, seq=3), TWO)
    assert isinstance(answer, Refused)
    assert "fills blocks of a message that is to come again" in answer.message
    assert ends.receiver.refused == {"checksum": 1, "reordered": 1}
    assert await peer.say(right, TWO) == Ack(announced.nonce, 2)
    assert (await ends.receiving["r"].wait()).proof.kv_bytes == 3072


async def test_a_hand_off_belongs_to_the_link_it_began_on(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    first = await RawPeer.meet(ends)
    announced = await first.announced(ends, "r", [1, 2])
    second = await RawPeer.meet(ends)
    assert await second.heard() == announced
    assert await first.say(Open(announced.nonce, "e1", "r", 0)) == Ack(announced.nonce, 0)
    assert isinstance(await second.say(blocks(announced, 1, 0, ONE), ONE), Refused)
    await second.link.send(encode(Abort(announced.nonce, "TransferError", "not yours")))
    assert isinstance(await second.say(Open(announced.nonce, "e1", "r", 0)), Refused)
    assert ends.receiver.refused == {"wrong_link": 2}
    assert status_of(ends.receiving["r"]) is Status.WAITING


LAYOUT = KVLayout.uniform("m", "bfloat16", 4, 2, 2, 8)
RIGHT_LAYOUT = replace(LAYOUT, model_hash="model", dtype="float32")  # the receivers'


def hello(layout: object = LAYOUT, eos_token_ids: object = (), epoch: str = "e1") -> bytes:
    """The bytes of a hello, whatever its parts are."""
    return msgspec.msgpack.encode(["Hello", "p", epoch, layout, True, eos_token_ids])


async def test_a_probe_has_a_largest_size(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    peer = await RawPeer.meet(ends)
    assert isinstance(await peer.say(Probe(0, 0), bytes(MAX_PROBE_BYTES)), Probed)
    assert isinstance(await peer.say(Probe(0, 0), bytes(MAX_PROBE_BYTES + 1)), Refused)
    assert ends.receiver.refused == {"malformed": 1}


async def test_malformed_headers_are_counted_and_the_link_goes_on(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    peer = await RawPeer.meet(ends)
    misplaced: list[Header] = [
        HelloOk("d", "e1", LAYOUT), Ack("n", 1), Announce("r", "n", 1, 0), Probed(1, 1), Rated(1)
    ]  # fmt: skip
    headers = [b"junk", *map(encode, misplaced), hello({})]
    for header in headers:
        assert isinstance(await peer.say(header, ONE), Refused)
    assert ends.receiver.refused == {"malformed": len(headers)}
    announced = await peer.announced(ends, "r", [1])
    assert await peer.say(blocks(announced, 1, 0, ONE, last=True), ONE) == Ack(announced.nonce, 1)


@pytest.mark.parametrize(
    ("first", "reason"),
    [(b"junk", "malformed"), (encode(Open("n", "e1", "r", 0)), "malformed"), (hello({}), "malformed"),
     (hello(epoch="e0"), "stale_epoch"), (hello(), "layout"),
     (hello(replace(RIGHT_LAYOUT, dtype="int3")), "layout"), (hello(replace(RIGHT_LAYOUT, block_size=-1)), "layout"),
     (hello(RIGHT_LAYOUT, [7]), "layout")],
    ids=range(8),
)  # fmt: skip
async def test_nothing_but_a_right_hello_opens_a_link(make_ends: MakeEnds, first: bytes, reason: str) -> None:
    ends = await make_ends()
    link = await LoopbackTransport(HostMemory.create(4096)).connect(ends.endpoints[0], 1.0)
    await link.send(first)
    assert isinstance(decode((await link.recv()).header), Refused)
    assert ends.receiver.refused == {reason: 1}
    await link.aclose()


def tampering(memory: Memory, damage: Damage, *messages: int, transport: str = "loopback") -> TamperingTransport:
    """A transport that does this to these messages with blocks, counted from 0 over all that are sent."""
    tampering = TamperingTransport(create_transport(transport, memory))
    tampering.plan.extend(damage if number in messages else "" for number in range(max(messages) + 1))
    return tampering


@pytest.mark.parametrize(
    ("transport", "damage", "messages"),
    [
        *(("loopback", "corrupt", messages) for messages in ((0,), (3,), (1, 4))),
        *(("shm", "flip", messages) for messages in ((0,), (3,))),
    ],
)
async def test_a_message_that_changes_on_its_way_or_in_the_pool_is_sent_again(
    make_ends: MakeEnds, transport: str, damage: Damage, messages: tuple[int, ...]
) -> None:
    source = HostPool(LAYOUT_OF_ENDS, 64)
    sending = tampering(source.memory, damage, *messages, transport=transport)
    ends = await make_ends(transport, source=source, sending=sending, message_bytes=2048)
    ids = [9, 8, 7, 6, 5, 4, 3, 2]
    ends.start("r", ids, for_s=5)
    ends.sending["r"].send_blocks(0, range(8), last=True, trailer=b"t")
    received = await ends.both("r")
    ends.check_moved(range(8), ids)
    assert (received.proof.kv_bytes, received.proof.messages, received.trailer) == (8192, 4, b"t")
    assert received.proof.kv_bytes_retried == 2048 * len(messages)
    assert ends.receiver.refused == {"checksum": len(messages)}


async def test_what_comes_again_passes_the_bound_on_what_is_on_its_way(make_ends: MakeEnds) -> None:
    """Its bytes count already: if they filled the bound, nothing would move on this link any more."""
    source = HostPool(LAYOUT_OF_ENDS, 64)
    ends = await make_ends(
        source=source,
        sending=tampering(source.memory, "corrupt", 0, 1),
        message_bytes=2048,
        max_inflight_bytes=2048,
    )
    for name, ids in (("r", [1, 2, 3, 4]), ("other", [5, 6])):
        ends.start(name, ids, for_s=5, send=ids)
    async with asyncio.timeout(30):
        await asyncio.gather(ends.both("r"), ends.both("other"))
    assert ends.receiver.refused == {"checksum": 2}
    ends.check_moved([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert ends.sender._links["d"]._inflight_bytes == 0


async def test_a_message_that_never_arrives_whole_is_given_up(make_ends: MakeEnds) -> None:
    source = HostPool(LAYOUT_OF_ENDS, 64)
    ends = await make_ends(source=source, sending=tampering(source.memory, "corrupt", *range(100)))
    ends.start("r", [1, 2], for_s=5, send=[1, 2])
    with pytest.raises(ChecksumMismatch):
        await ends.sending["r"].wait()
    with pytest.raises(ChecksumMismatch):
        await ends.receiving["r"].wait()
    assert ends.receiver.refused == {"checksum": 1 + protocol.MAX_RESENDS}
    assert not any(ends.target.data[:1024])
    assert not any(ends.target.data[3 * 1024 :])


@pytest.mark.parametrize("failing", ["source", "target"])
async def test_a_pool_that_is_gone_fails_one_hand_off_not_the_link(
    make_ends: MakeEnds, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = await make_ends()
    await ends.connect()

    def fail(*_: object, **__: object) -> None:
        raise WorkerLost("the engine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(ends, failing), "regions", fail)
        ends.start("r", [1, 2], for_s=5, send=[1, 2])
        both: list[Transfer[Any]] = [ends.sending["r"], ends.receiving["r"]]
        own, other = both if failing == "source" else both[::-1]
        with pytest.raises(WorkerLost):
            await own.wait()
        with pytest.raises(TransferError, match="the engine is gone"):
            await other.wait()
    assert [link.worker_id for link in ends.sender.links()] == ["d"]


@IN_VIRTUAL_TIME
async def test_a_sender_paused_past_its_lease_cannot_write(make_ends: MakeEnds) -> None:
    ends = await make_ends(lease_s=0.1)
    peer = await RawPeer.meet(ends)
    announced = await peer.announced(ends, "r", [1, 2])
    assert isinstance(await peer.say(Open(announced.nonce, "e1", "r", 0)), Ack)
    with pytest.raises(TransferError, match="silent"):
        await ends.receiving["r"].wait()
    assert isinstance(decode((await peer.link.recv()).header), Abort)
    await peer.announced(ends, "next", [1, 2])  # the same blocks, somebody else's now
    assert isinstance(await peer.say(blocks(announced, 1, 0, TWO, last=True), TWO), Refused)
    assert ends.receiver.refused == {"unknown_nonce": 1}
    assert ends.target.data == bytes(len(ends.target.data))
