"""What both ends of hand-offs do when something comes late, twice, never, or from another peer. In one process and in
virtual time, so that time limits and orders are exact; `test_hand_offs` is about transports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

import contract.kv as protocol
import kv_transfer.receiver
import kv_transfer.send_link
import kv_transfer.sender
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
from tests.kv_transfer.conftest import LAYOUT, Ends, MakeEnds, until
from tests.kv_transfer.status import Status, status_of
from tests.virtual_time import IN_VIRTUAL_TIME

pytestmark = IN_VIRTUAL_TIME
BLOCK = LAYOUT.block_bytes


async def linked(make_ends: MakeEnds, **options: Any) -> Ends:
    """Ends with a link."""
    ends = await make_ends(**options)
    await ends.connect()
    return ends


def is_announced(ends: Ends, name: str) -> bool:
    """Whether the sender has heard of it."""
    return name in ends.sender._peers["d"]._announced


# --- messages --------------------------------------------------------------------------------------------------------


async def test_a_long_hand_off_does_not_keep_a_short_one_waiting(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends, message_bytes=1024)
    ended: list[str] = []

    async def receive(name: str) -> None:
        await ends.receiver.wait(name)
        ended.append(name)

    for name, ids in (("long", list(range(60))), ("short", [60, 61])):
        ends.start(name, ids, send=ids)
    await asyncio.gather(receive("long"), receive("short"))
    assert ended == ["short", "long"]


async def test_adjacent_blocks_are_coalesced(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends, message_bytes=4096)
    ends.start("r", list(range(10)))
    for slot in range(10):
        ends.sender.send_blocks("r", slot, [slot], last=slot == 9)
    assert (await ends.receiver.wait("r")).proof.messages == 3


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
        await ends.sender.wait("r")


async def test_end_ids_are_compared_as_a_set_of_limited_size(make_ends: MakeEnds) -> None:
    await linked(make_ends, eos_token_ids=(7, 2, 7), sender_eos_token_ids=(2, 7))
    with pytest.raises(ModelError, match="1025 eos_token_ids; at most 1024"):
        await make_ends(eos_token_ids=tuple(range(1025)))


async def test_connecting_is_idempotent_and_follows_the_epoch(make_ends: MakeEnds) -> None:
    ends = await make_ends()
    await asyncio.gather(*(ends.connect() for _ in range(3)))
    assert [link.worker_id for link in ends.sender.links()] == ["d"]
    with pytest.raises(TransferRefused, match="started anew"):
        await ends.sender.connect("d", "e0", ends.endpoints)
    assert [link.worker_id for link in ends.sender.links()] == ["d"]
    with pytest.raises(TransferRefused, match="another worker"):
        await ends.sender.connect("d2", "e1", ends.endpoints)
    with pytest.raises(ConfigError, match=r"^transfer\.transport: "):
        await ends.sender.connect("d", "e1", [KVEndpoint("torch_dist", "127.0.0.1:1")])


@pytest.mark.parametrize("closing", ["sender", "receiver"])
async def test_closing_either_end_fails_what_is_under_way(make_ends: MakeEnds, closing: str) -> None:
    ends = await make_ends(lease_s=30.0)
    ends.start("r", [1, 2, 3, 4], for_s=30.0)
    ends.sender.send_blocks("r", 0, [0, 1])
    await until(lambda: status_of(ends.receiver, "r") is Status.TRANSFERRING)
    for _ in range(2):
        await getattr(ends, closing).aclose()
    for end in (ends.sender, ends.receiver):
        async with asyncio.timeout(1):
            with pytest.raises(PeerLost):
                await end.wait("r")


async def test_of_two_links_the_newest_is_told_and_the_end_of_the_old_one_takes_nothing_along(
    make_ends: MakeEnds,
) -> None:
    """The worker has begun anew, and the receiver has not noticed that its old link is dead."""
    ends, old = await make_ends(lease_s=30.0), await make_ends()
    await old.sender.connect("d", "e1", ends.endpoints)
    ends.announce("both", [10, 11], for_s=30)
    await until(lambda: is_announced(old, "both"))
    await ends.connect()
    ends.announce("newest", [12, 13])
    await until(lambda: is_announced(ends, "newest"))
    assert not is_announced(old, "newest")
    await old.sender.aclose()
    await until(lambda: len(ends.receiver._tasks) == 2)  # accepting, and serving the new link
    ends.announce("after", [14, 15])
    for name, target_ids in (("both", [10, 11]), ("newest", [12, 13]), ("after", [14, 15])):
        ends.push(name, 2, for_s=30, send=[1, 2])
        await ends.both(name)
        ends.check_moved([1, 2], target_ids)
    ends.check_nothing_left()


# --- time limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("is_linked", [True, False])
async def test_deadlines(make_ends: MakeEnds, announced: bool, is_linked: bool) -> None:
    ends = await make_ends(lease_s=30.0)
    if is_linked:
        await ends.connect()
    started_s = ends.clock.now()
    ends.push("r", 2, for_s=0.25)
    ends.sender.send_blocks("r", 0, [1])
    if announced:
        ends.announce("r", [1, 2], for_s=0.5)
    with pytest.raises(TransferTimeout, match=r"^KV of r is .* and its deadline passed"):
        await ends.sender.wait("r")
    assert ends.clock.now() == pytest.approx(started_s + 0.25)
    if announced:
        with pytest.raises(TransferError, match="deadline"):
            await ends.receiver.wait("r")
    await ends.check_works()


async def test_a_silent_sender_loses_its_lease_and_a_slow_one_keeps_it(make_ends: MakeEnds) -> None:
    ends = await make_ends(lease_s=1.0)
    ends.announce("unheard", [5])
    ends.start("slow", [1, 2])
    with pytest.raises(TransferTimeout, match="silent"):
        await ends.receiver.wait("unheard")
    await asyncio.sleep(1.5)
    ends.sender.send_blocks("slow", 0, [1, 2], last=True)
    await ends.both("slow")


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


async def test_a_receiver_without_room_gets_a_lease_once_all_blocks_are_queued(make_ends: MakeEnds) -> None:
    """Else two workers with small pools could wait for each other's room."""
    ends = await make_ends(lease_s=0.3)
    ends.push("r", 2)
    ends.sender.send_blocks("r", 0, [1, 2], last=True)
    async with asyncio.timeout(1):
        with pytest.raises(TransferTimeout, match=r"silent for 0\.3 s"):
            await ends.sender.wait("r")


async def test_a_receiver_that_is_silent_after_its_announcement_is_given_up(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends, lease_s=0.3)
    ends.push("r", 2)
    ends.announce("r", [3, 4])
    await until(lambda: status_of(ends.receiver, "r") is Status.WAITING)
    (source,) = ends.receiver._links.values()

    async def say_nothing(header: object) -> None:
        await asyncio.sleep(30)

    source.say = say_nothing  # type: ignore[method-assign]
    async with asyncio.timeout(1):
        with pytest.raises(TransferTimeout, match=r"silent for 0\.3 s"):
            await ends.sender.wait("r")


async def test_a_sender_that_makes_no_link_in_time_is_lost(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer.receiver, "LINK_TIMEOUT_S", 1.0)
    ends = await make_ends(lease_s=30.0)
    for name, sender_id in (("early", "p"), ("late", "p2"), ("given up", "p3")):
        ends.receiver.announce(name, sender_id, [len(name), len(name) + 20], 0, ends.in_s(30))
    await ends.receiver.abort("given up")
    ends.push("early", 2, for_s=30)
    async with asyncio.timeout(1.5):
        with pytest.raises(PeerLost, match="there is no KV link from p2"):
            await ends.receiver.wait("late")
    assert status_of(ends.receiver, "early") is Status.WAITING
    ends.sender.send_blocks("early", 0, [1, 2], last=True)
    await ends.both("early")
    ends.check_nothing_left()


# --- announcements ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", [0, 1, 5])
async def test_blocks_that_are_queued_wait_for_the_announcement(make_ends: MakeEnds, skipped: int) -> None:
    """Those that are skipped are not sent. If these are all, the trailer still comes."""
    ends = await linked(make_ends)
    ends.push("r", 5)
    ends.sender.send_blocks("r", 0, [5, 6, 7])
    ends.sender.send_blocks("r", 3, [8, 9], last=True, trailer=b"t" * 4096)
    await asyncio.sleep(0.05)
    assert status_of(ends.sender, "r") is Status.WAITING
    target_ids = [40, 3, 17, 18, 50]
    ends.announce("r", target_ids, skipped)
    received = await ends.both("r")
    ends.check_moved([5, 6, 7, 8, 9][skipped:], target_ids[skipped:])
    assert received.proof.kv_bytes == LAYOUT.expected_bytes(5 * LAYOUT.block_size, blocks_skipped=skipped)
    assert (received.proof.blocks_skipped, received.trailer) == (skipped, b"t" * 4096)
    assert not any(ends.target.bytes_of(target_ids[:skipped]))
    assert ends.receiver.refused == {}
    ends.check_nothing_left()


@pytest.mark.parametrize("is_linked", [True, False])
async def test_an_announcement_that_comes_before_its_hand_off_is_kept(make_ends: MakeEnds, is_linked: bool) -> None:
    """Without a link it is made when the hand-off begins, and the announcement comes over it while it is measured."""
    ends = await make_ends()
    if is_linked:
        await ends.connect()
    ends.announce("r", [10, 11, 12])
    if is_linked:
        await until(lambda: is_announced(ends, "r"))
    ends.push("r", 3, send=[1, 2, 3])
    await ends.both("r")
    ends.check_moved([1, 2, 3], [10, 11, 12])
    ends.check_nothing_left()


async def test_an_announcement_amid_the_blocks(make_ends: MakeEnds) -> None:
    """Layer by layer, of slots some of which are skipped."""
    ends = await linked(make_ends)
    ends.push("r", 5)
    ends.sender.send_blocks("r", 0, [5, 6, 7], range(1))
    ends.announce("r", [10, 11, 12, 13, 14], 1)
    await until(lambda: status_of(ends.receiver, "r") is Status.TRANSFERRING)
    ends.sender.send_blocks("r", 0, [5, 6, 7], range(1, 2))
    ends.sender.send_blocks("r", 3, [8, 9], last=True)
    received = await ends.both("r")
    assert received.proof.kv_bytes == 4 * BLOCK
    ends.check_moved([6, 7, 8, 9], [11, 12, 13, 14])
    assert not any(ends.target.bytes_of([10]))


async def test_a_hand_off_is_announced_to_its_own_sender_alone(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends)
    ends.receiver.announce("r", "another", [10], 0, ends.in_s(20))
    ends.push("r", 1, for_s=0.3, send=[1])
    with pytest.raises(TransferTimeout):
        await ends.sender.wait("r")
    assert status_of(ends.receiver, "r") is Status.BOOTSTRAPPING


@pytest.mark.parametrize("how", ["aborted", "expired"])
@pytest.mark.parametrize("when_linked", ["before", "meanwhile", "later"])
async def test_an_announcement_of_what_is_over_at_the_sender_fails_the_receiver_at_once(
    make_ends: MakeEnds, how: str, when_linked: str
) -> None:
    """Linked before the hand-off began, or by it (it is over before there is a link), or anew by the next one."""
    ends = await make_ends(lease_s=30.0)
    if when_linked == "before":
        await ends.connect()
    ends.push("r", 2, for_s=0.05 if how == "expired" else 20.0)
    if how == "aborted":
        ends.sender.send_blocks("r", 0, [1, 2], last=True)
        await ends.sender.abort("r")
    else:
        with pytest.raises(TransferTimeout, match="deadline"):
            await ends.sender.wait("r")
    if when_linked == "later":
        await until(lambda: bool(ends.sender.links()))
        await ends.sender._peers["d"]._link.aclose()
        await until(lambda: not ends.sender.links() and not ends.receiver._links)
    ends.announce("r", [10, 11], for_s=30)
    if when_linked == "later":
        await ends.connect()
    async with asyncio.timeout(1):
        with pytest.raises(TransferError, match="the sender of r gave up: ") as told:
            await ends.receiver.wait("r")
    assert type(told.value) in (TransferError, TransferTimeout)
    await ends.check_works("next")
    assert not any(ends.target.bytes_of([10, 11]))


async def test_an_announcement_of_what_was_given_up_while_its_link_is_made(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard before the link is known to the sender's other half."""
    ends, measured = await make_ends(lease_s=30.0), asyncio.Event()

    async def measure_late(*args: Any) -> float:
        await measured.wait()
        return await measure(*args)

    monkeypatch.setattr(kv_transfer.sender, "measure", measure_late)
    ends.announce("r", [10, 11], for_s=30)
    ends.push("r", 2)
    await until(lambda: bool(ends.receiver._links))  # the receiver has greeted it, and tells it now
    assert ends.sender.links() == ()
    await ends.sender.abort("r")
    measured.set()
    async with asyncio.timeout(1):
        with pytest.raises(TransferError, match="the sender of r gave up: "):
            await ends.receiver.wait("r")
    await ends.check_works("next")


async def test_a_hand_off_given_up_at_the_receiver_before_the_sender_begins_it(make_ends: MakeEnds) -> None:
    ends = await linked(make_ends, lease_s=30.0)
    ends.announce("r", [10, 11], for_s=30)
    await until(lambda: is_announced(ends, "r"))
    await ends.receiver.abort("r")
    ends.announce("other", [10, 11], for_s=30)  # the same blocks, another owner's now
    ends.push("r", 2, for_s=30, send=[1, 2])
    async with asyncio.timeout(1):
        with pytest.raises(TransferRefused, match=r"r is not expected \(any more\)"):
            await ends.sender.wait("r")
    assert not any(ends.target.data)
    assert status_of(ends.receiver, "other") is Status.BOOTSTRAPPING
    await ends.receiver.abort("other")
    ends.push("other", 2)
    with pytest.raises(TransferRefused):
        await ends.sender.wait("other")
    await ends.check_works("next")


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
            await ends.sender.wait("r")
        with pytest.raises(TransferRefused, match=f"^the sender of r gave up: {why}"):
            await ends.receiver.wait("r")
    assert not any(ends.target.data)
    await ends.check_works("next")


async def test_announcements_of_what_never_begins_are_bounded(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer.send_link, "_MAX_ANNOUNCED", 3)
    monkeypatch.setattr(kv_transfer.sender, "_REMEMBERED", 3)
    ends = await linked(make_ends)
    for i in range(5):
        ends.announce(f"r{i}", [i])
    await until(lambda: is_announced(ends, "r4"))
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
    ends.check_nothing_left()


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


# --- the prefix of a prompt, of which the sender may have less than is wanted ----------------------------------------


@pytest.mark.parametrize(("sent", "skipped"), [(6, 0), (4, 2), (0, 0), (2, 3)])
async def test_a_partial_hand_off_brings_what_the_sender_has(make_ends: MakeEnds, sent: int, skipped: int) -> None:
    ends = await make_ends()
    target_ids, source_ids = [40, 3, 17, 18, 19, 60], [5, 6, 7, 20, 21, 9][:sent]
    ends.sender.push("r", ends.peer, sent, ends.in_s(10), partial=True)
    ends.receiver.announce("r", "p", target_ids, skipped, ends.in_s(10), partial=True)
    ends.sender.send_blocks("r", 0, source_ids, LAYOUT.all_layers, last=True)
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
    ends.sender.push("r", ends.peer, 2, ends.in_s(10), partial=sender_is_partial)
    ends.receiver.announce("r", "p", [1, 2, 3], 0, ends.in_s(10), partial=not sender_is_partial)
    ends.sender.send_blocks("r", 0, [5, 6], last=True)
    for end in (ends.sender, ends.receiver):
        with pytest.raises(TransferRefused):
            await asyncio.wait_for(end.wait("r"), 5)


async def test_a_changed_message_of_a_partial_hand_off_is_sent_again(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is not the last one, and the last one comes first."""
    ends = await make_ends(message_bytes=BLOCK)
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
    assert (received.num_blocks, received.proof.kv_bytes_retried) == (3, BLOCK)
    ends.check_moved([5, 6, 7], [1, 2, 3])
