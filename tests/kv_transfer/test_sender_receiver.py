"""What both ends of hand-offs do when something comes late, twice, never, or from another peer. In one process and in
virtual time, so that time limits and orders are exact; `test_hand_offs` is about transports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

import kv_transfer.receiver
import kv_transfer.sender
from kv_transfer.sender import Early
from kv_transfer.transfer import Transfer
from pdserve.core.errors import (
    ConfigError,
    LayoutMismatch,
    ModelError,
    PeerLost,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from pdserve.core.handoff import KVEndpoint, KVPeer
from pdserve.core.kv_layout import KVLayout
from tests.kv_transfer.conftest import LAYOUT, Ends, MakeEnds, sender_of, until
from tests.kv_transfer.status import Status, status_of
from tests.loopback import create_transport
from tests.virtual_time import IN_VIRTUAL_TIME, LoopClock

pytestmark = IN_VIRTUAL_TIME
BLOCK = LAYOUT.block_bytes


async def linked(make_ends: MakeEnds, **options: Any) -> Ends:
    """Ends with a link."""
    ends = await make_ends(**options)
    await ends.connect()
    return ends


def is_announced(ends: Ends, name: str) -> bool:
    """Whether the sender has heard of it."""
    return isinstance(ends.sender._attempts.get(name), Early)


# --- messages --------------------------------------------------------------------------------------------------------


async def test_a_long_hand_off_does_not_keep_a_short_one_waiting(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends, message_bytes=1024)
    ended: list[str] = []

    async def receive(name: str) -> None:
        await ends.receiving[name].wait()
        ended.append(name)

    for name, ids in (("long", list(range(60))), ("short", [60, 61])):
        ends.start(name, ids, send=ids)
    await asyncio.gather(receive("long"), receive("short"))
    assert ended == ["short", "long"]


async def test_adjacent_blocks_are_coalesced(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends, message_bytes=4096)
    ends.start("r", list(range(10)))
    for slot in range(10):
        ends.sending["r"].send_blocks(slot, [slot], last=slot == 9)
    assert (await ends.receiving["r"].wait()).proof.messages == 3


async def test_blocks_larger_than_any_message_are_a_configuration_error(make_ends: MakeEnds) -> None:
    layout = KVLayout.uniform("model", "float32", block_size=1024, num_layers=80, num_kv_heads=8, head_dim=128)
    with pytest.raises(ConfigError, match=r"^engine\.block_size: "):
        await make_ends(layout=layout, num_blocks=0)


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sender_layout": replace(LAYOUT, block_size=8)}, "block_size: 4 here, 8 at the peer"),
        ({"sender_checksum": False}, r"transfer\.checksum differs: on here, off at the peer"),
        # Else one goes on from a token that is the last one to the other.
        (
            {"eos_token_ids": (7, 2), "sender_eos_token_ids": (2,)},
            r"eos_token_ids differ: \[2, 7\] here, \[2\] at the peer",
        ),
        (
            {"eos_token_ids": tuple(range(1024)), "sender_eos_token_ids": tuple(range(1, 1025))},
            r"differ: \[0, 1, .*, 15, \.\.\.\] here",
        ),
    ],
    ids=range(4),
)
async def test_unlike_ends_are_refused_before_any_request(
    make_ends: MakeEnds, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends = await make_ends(**options)
    with pytest.raises(LayoutMismatch, match=why):
        await ends.connect()
    assert ends.receiver.refused == {"layout": 1}
    assert "here" in caplog.text
    assert ends.sender.links() == ()
    ends.start("r", [1], for_s=5)
    with pytest.raises(LayoutMismatch):
        await ends.sending["r"].wait()


async def test_end_ids_are_compared_as_a_set_of_limited_size(make_ends: MakeEnds) -> None:
    await linked(make_ends, eos_token_ids=(7, 2, 7), sender_eos_token_ids=(2, 7))
    with pytest.raises(ModelError, match="1025 eos_token_ids; at most 1024"):
        await make_ends(eos_token_ids=tuple(range(1025)))


async def test_connecting_is_idempotent_and_follows_the_epoch(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    await asyncio.gather(*(ends.connect() for _ in range(3)))
    assert [link.worker_id for link in ends.sender.links()] == ["d"]
    with pytest.raises(TransferRefused, match="started anew"):
        await ends.sender.connect(KVPeer("d", "e0", ends.endpoints))
    assert [link.worker_id for link in ends.sender.links()] == ["d"]
    with pytest.raises(TransferRefused, match="another worker"):
        await ends.sender.connect(KVPeer("d2", "e1", ends.endpoints))
    with pytest.raises(ConfigError, match=r"^transfer\.transport: "):
        await ends.sender.connect(KVPeer("d", "e1", (KVEndpoint("torch_dist", "127.0.0.1:1"),)))


# --- time limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("is_linked", [True, False])
async def test_deadlines(make_ends: MakeEnds, announced: bool, is_linked: bool) -> None:
    ends = await make_ends(lease_s=30.0)
    if is_linked:
        await ends.connect()
    started_s = ends.clock.now()
    ends.push("r", 2, for_s=0.25)
    ends.sending["r"].send_blocks(0, [1])
    if announced:
        ends.announce("r", [1, 2], for_s=0.5)
    with pytest.raises(TransferTimeout, match=r"^KV of r is .* and its deadline passed"):
        await ends.sending["r"].wait()
    assert ends.clock.now() == pytest.approx(started_s + 0.25)
    if announced:
        with pytest.raises(TransferError, match="deadline"):
            await ends.receiving["r"].wait()
    await ends.check_works()


async def test_a_silent_sender_loses_its_lease_and_a_slow_one_keeps_it(make_ends: MakeEnds) -> None:
    ends = await make_ends(lease_s=1.0)
    ends.announce("unheard", [5])
    ends.start("slow", [1, 2])
    with pytest.raises(TransferTimeout, match="silent"):
        await ends.receiving["unheard"].wait()
    await asyncio.sleep(1.5)
    ends.sending["slow"].send_blocks(0, [1, 2], last=True)
    await ends.both("slow")


async def test_a_receiver_that_is_silent_after_its_announcement_is_given_up(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends, lease_s=0.3)
    ends.push("r", 2)
    ends.announce("r", [3, 4])
    await until(lambda: status_of(ends.receiving["r"]) is Status.WAITING)
    (source,) = ends.receiver._links

    async def say_nothing(header: object) -> None:
        await asyncio.sleep(30)

    source.say = say_nothing  # type: ignore[method-assign]
    async with asyncio.timeout(1):
        with pytest.raises(TransferTimeout, match=r"silent for 0\.3 s"):
            await ends.sending["r"].wait()


async def test_a_sender_that_makes_no_link_in_time_is_lost(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer.receiver, "LINK_TIMEOUT_S", 1.0)
    ends = await make_ends(lease_s=30.0)
    for name, sender_id in (("early", "p"), ("late", "p2"), ("given up", "p3")):
        ends.announce(name, [len(name), len(name) + 20], for_s=30, sender_id=sender_id)
    await ends.receiving["given up"].abort()
    ends.push("early", 2, for_s=30)
    async with asyncio.timeout(1.5):
        with pytest.raises(PeerLost, match="there is no KV link from p2"):
            await ends.receiving["late"].wait()
    assert status_of(ends.receiving["early"]) is Status.WAITING
    ends.sending["early"].send_blocks(0, [1, 2], last=True)
    await ends.both("early")
    ends.check_nothing_left()


async def test_a_link_that_its_sender_gives_up_does_not_hide_another_one(make_ends: MakeEnds) -> None:
    """Whichever of them is the newest: what was announced over it is announced again."""
    ends = await linked(make_ends, lease_s=30.0)
    transport = create_transport("loopback", ends.source.memory)
    given_up = sender_of(ends.source, transport, checksum=True, connect_timeout_s=5.0)
    await given_up.connect(ends.peer)
    ends.start("r", [1, 2], send=[3, 4])
    await given_up.aclose()
    async with asyncio.timeout(5):
        await ends.both("r")
    ends.check_moved([3, 4], [1, 2])
    ends.start("later", [5], send=[6])
    await ends.both("later")
    await transport.aclose()


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_link_is_cut_for_a_failed_hand_off_only_if_its_receiver_reads_nothing(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """A slow receiver may have others' blocks to read before those of the failed one."""
    ends = await linked(make_ends, lease_s=30.0)
    ends.start("failed", [1, 2])
    ends.sending["failed"].send_blocks(0, [1])
    ends.start("other", range(3, 13))
    await until(lambda: status_of(ends.receiving["failed"]) is Status.TRANSFERRING)
    monkeypatch.setattr(ends.sender._links["d"]._link, "drained", lambda: asyncio.sleep(2.0))
    aborting = asyncio.create_task(ends.sending["failed"].abort())
    for slot in range(10):
        await asyncio.sleep(0.3)
        if goes_on:
            ends.sending["other"].send_blocks(slot, [20 + slot], last=slot == 9)
    await aborting
    if goes_on:
        await ends.both("other")
        ends.check_moved(range(20, 30), range(3, 13))
    else:
        with pytest.raises(PeerLost, match="still read blocks of a failed transfer"):
            await ends.sending["other"].wait()


# --- the owner of a transfer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_a_wait_that_is_cancelled_aborts_the_hand_off(make_ends: MakeEnds, who: str) -> None:
    ends = await linked(make_ends, lease_s=30.0)
    ends.start("r", [1, 2], for_s=30)
    ends.sending["r"].send_blocks(0, [1])
    both: list[Transfer[Any]] = [ends.sending["r"], ends.receiving["r"]]
    own, other = both if who == "sender" else both[::-1]
    waiting = asyncio.create_task(own.wait())
    await until(lambda: status_of(ends.receiving["r"]) is Status.TRANSFERRING)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(1):
        with pytest.raises(TransferError, match=f"aborted by its {who}"):
            await other.wait()
    await ends.check_works("next")


class Resting(Transfer[None]):
    """A transfer whose blocks are accessed until ``rests`` is set."""

    _end_name, _unfinished = "sender", "not handed over"
    rests: asyncio.Event

    async def _at_rest(self) -> None:
        await self.rests.wait()


async def test_a_wait_that_is_cancelled_after_the_end_still_waits_for_the_blocks() -> None:
    transfer = Resting("r", LoopClock(), 1e6, None, lambda _: None)
    transfer.rests = asyncio.Event()
    waiting = asyncio.create_task(transfer.wait())
    transfer.end(PeerLost("the link"))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.sleep(0.1)
    assert not waiting.done()
    transfer.rests.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_attempt_is_sent_once(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends)
    ends.start("r", [1, 2], send=[1, 2])
    with pytest.raises(ValueError, match="r is being sent already"):
        ends.push("r", 2)
    await ends.both("r")
    ends.check_moved([1, 2], [1, 2])


# --- announcements ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", [0, 1, 5])
async def test_blocks_that_are_queued_wait_for_the_announcement(make_ends: MakeEnds, skipped: int) -> None:
    """Those that are skipped are not sent. If these are all, the trailer still comes."""
    ends = await linked(make_ends)
    ends.push("r", 5)
    ends.sending["r"].send_blocks(0, [5, 6, 7])
    ends.sending["r"].send_blocks(3, [8, 9], last=True, trailer=b"t" * 4096)
    await asyncio.sleep(0.05)
    assert status_of(ends.sending["r"]) is Status.WAITING
    target_ids = [40, 3, 17, 18, 50]
    ends.announce("r", target_ids, skipped)
    received = await ends.both("r")
    ends.check_moved([5, 6, 7, 8, 9][skipped:], target_ids[skipped:])
    assert received.proof.kv_bytes == LAYOUT.expected_bytes(5 * LAYOUT.block_size, blocks_skipped=skipped)
    assert (received.proof.blocks_skipped, received.trailer) == (skipped, b"t" * 4096)
    assert not any(ends.target.bytes_of(target_ids[:skipped]))
    assert ends.receiver.refused == {}
    ends.check_nothing_left()


async def test_a_hand_off_is_announced_to_its_own_sender_alone(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends)
    ends.announce("r", [10], sender_id="another")
    ends.push("r", 1, for_s=0.3, send=[1])
    with pytest.raises(TransferTimeout):
        await ends.sending["r"].wait()
    assert status_of(ends.receiving["r"]) is Status.BOOTSTRAPPING


@pytest.mark.parametrize("how", ["aborted", "expired"])
async def test_an_announcement_of_what_is_over_at_the_sender_fails_the_receiver_at_once(
    make_ends: MakeEnds, how: str
) -> None:
    ends = await linked(make_ends, lease_s=30.0)
    ends.push("r", 2, for_s=0.05 if how == "expired" else 20.0)
    if how == "aborted":
        ends.sending["r"].send_blocks(0, [1, 2], last=True)
        await ends.sending["r"].abort()
    else:
        with pytest.raises(TransferTimeout, match="deadline"):
            await ends.sending["r"].wait()
    ends.announce("r", [10, 11], for_s=30)
    async with asyncio.timeout(1):
        with pytest.raises(TransferError, match="the sender of r gave up: ") as told:
            await ends.receiving["r"].wait()
    assert type(told.value) in (TransferError, TransferTimeout)
    await ends.check_works("next")
    assert not any(ends.target.bytes_of([10, 11]))


@pytest.mark.parametrize(("wanted", "first"), [(1, "push"), (3, "announcement")])
async def test_another_number_of_blocks_is_refused_at_both_ends(make_ends: MakeEnds, wanted: int, first: str) -> None:
    ends = await linked(make_ends, lease_s=30.0)
    if first == "push":
        ends.push("r", 2, for_s=30, send=[1, 2])
    ends.announce("r", list(range(10, 10 + wanted)), for_s=30)
    if first == "announcement":
        await until(lambda: is_announced(ends, "r"))
        ends.push("r", 2, for_s=30, send=[1, 2])
    why = f"d wants {wanted} blocks of r less 0; 2 are to be sent"
    async with asyncio.timeout(1):
        with pytest.raises(TransferRefused, match=f"^{why}"):
            await ends.sending["r"].wait()
        with pytest.raises(TransferRefused, match=f"^the sender of r gave up: {why}"):
            await ends.receiving["r"].wait()
    assert not any(ends.target.data)
    await ends.check_works("next")


async def test_announcements_of_what_never_begins_are_bounded(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer.sender, "_REMEMBERED", 3)
    ends = await linked(make_ends)
    for i in range(5):
        ends.announce(f"r{i}", [i])
    await until(lambda: is_announced(ends, "r4"))
    assert list(ends.sender._attempts) == ["r2", "r3", "r4"]
    for i in (2, 3, 4):
        ends.push(f"r{i}", 1, send=[i])
        await ends.both(f"r{i}")
    for i in range(5):
        ends.push(f"s{i}", 1)
        await ends.sending[f"s{i}"].abort()
    assert list(ends.sender._attempts) == ["s2", "s3", "s4"]
    for i in (0, 1):
        await ends.receiving[f"r{i}"].abort()
    ends.check_nothing_left()


# --- the prefix of a prompt, of which the sender may have less than is wanted ----------------------------------------


@pytest.mark.parametrize(("sent", "skipped"), [(6, 0), (4, 2), (0, 0), (2, 3)])
async def test_a_partial_hand_off_brings_what_the_sender_has(make_ends: MakeEnds, sent: int, skipped: int) -> None:
    ends = await make_ends()
    target_ids, source_ids = [40, 3, 17, 18, 19, 60], [5, 6, 7, 20, 21, 9][:sent]
    ends.push("r", sent, partial=True)
    ends.announce("r", target_ids, skipped, partial=True)
    ends.sending["r"].send_blocks(0, source_ids, LAYOUT.all_layers, last=True)
    received = await ends.both("r")
    moved = max(0, sent - skipped)
    assert received.num_blocks == skipped + moved
    assert (received.proof.blocks_received, received.proof.blocks_skipped) == (moved, skipped)
    assert received.proof.kv_bytes == moved * BLOCK
    written = target_ids[skipped : skipped + moved]
    ends.check_moved(source_ids[skipped:], written)
    assert not any(ends.target.bytes_of([i for i in range(64) if i not in written]))


@pytest.mark.parametrize("sender_is_partial", [True, False])
async def test_only_a_partial_hand_off_may_end_early(make_ends: MakeEnds, sender_is_partial: bool) -> None:
    """The one that is not announced as partial is refused by the receiver, the one that is not begun as such by the
    sender."""
    ends = await make_ends()
    ends.push("r", 2, partial=sender_is_partial)
    ends.announce("r", [1, 2, 3], partial=not sender_is_partial)
    ends.sending["r"].send_blocks(0, [5, 6], last=True)
    for transfer in (ends.sending["r"], ends.receiving["r"]):
        with pytest.raises(TransferRefused):
            await asyncio.wait_for(transfer.wait(), 5)
