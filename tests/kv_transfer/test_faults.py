"""What becomes of hand-offs when something breaks, at each state of them, between real processes.

After every fault: both ends that still live have a final state within the deadline plus `GRACE_S`, all blocks are free
and hold what their next owner wrote, no socket, mapping, memory file, thread or process is left, and the next hand-off
passes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kv_transfer.end import End, until
from tests.kv_transfer.pair import GRACE_S, HandOff, Pair

DEADLINE_S = 2.0
LARGE = 128  # blocks, in one message
GetPair = Callable[..., Pair]

BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])
STATES = pytest.mark.parametrize(
    ("transport", "state"),
    [
        *[("tcp", state) for state in ("bootstrapping", "linked", "mid-message")],
        ("shm", "mid-message"),
        ("torch_dist", "linked"),
        ("grpc_stream", "mid-message"),
        *[pytest.param("shm", state, marks=pytest.mark.soak) for state in ("bootstrapping", "linked")],
        pytest.param("grpc_stream", "linked", marks=pytest.mark.soak),
    ],
)
ENDS = pytest.mark.parametrize("which", ["sender", "receiver"])


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Pair]]:
    """Pairs that are up, since processes take their time to start."""
    pairs: dict[str, Pair] = {}
    yield pairs
    for pair in pairs.values():
        pair.close()


@pytest.fixture
def get_pair(pairs: dict[str, Pair]) -> GetPair:
    """A linked pair that nothing is wrong with."""

    def get(transport: str, **options: Any) -> Pair:
        key = f"{transport} {options}"
        known = pairs.pop(key, None)
        if known is not None and not known.clean:
            known.close()
            known = None
        pairs[key] = pair = known or Pair(transport, **options)
        pair.make_ready()
        return pair

    return get


def reach(pair: Pair, state: str) -> list[HandOff]:
    """Hand-offs at ``state``. Linked: one that waits, one between two messages, one that is sent but not
    acknowledged."""
    if state == "linked":
        pair.receiver.call("delay", seconds=DEADLINE_S + GRACE_S)
        waiting, transferring, unacknowledged = (pair.start(4, DEADLINE_S) for _ in range(3))
        pair.send(transferring, 0, 2)
        pair.send(unacknowledged, last=True)
        pair.wait_status(waiting, "waiting")
        pair.wait_status(transferring, "transferring")
        pair.wait_status(unacknowledged, "transferring")
        pair.receiver.call("delay", seconds=0)
        return [waiting, transferring, unacknowledged]
    assert state == "mid-message"
    handoff = pair.start(LARGE, DEADLINE_S)
    pair.wait_status(handoff, "waiting")
    if pair.relay is None:  # the receiver sleeps before it copies; there is nobody else to ask
        with tempfile.TemporaryDirectory() as folder:
            mark = Path(folder, "landing")
            pair.receiver.call("slow", seconds=0.8, mark=str(mark))
            pair.send(handoff, last=True)
            assert until(mark.exists)
        pair.receiver.begin("slow", seconds=0)
    else:
        pair.relay.stall(3 * 2**20)
        pair.send(handoff, last=True)
        assert pair.relay.wait_stalled()
    return [handoff]


def go_on_after(pair: Pair) -> None:
    """Undo what `reach` did."""
    if pair.relay is not None:
        pair.relay.flow()


def end_of(pair: Pair, which: str) -> tuple[End, End]:
    """The end that something happens to, and the other."""
    return (pair.sender, pair.receiver) if which == "sender" else (pair.receiver, pair.sender)


def order_of(handoff: HandOff, end: End) -> int:
    """The order to wait for it there."""
    return handoff.sending if end.role == "sender" else handoff.receiving


@STATES
@ENDS
def test_a_killed_end_fails_its_hand_offs_at_the_other(
    get_pair: GetPair, transport: str, state: str, which: str
) -> None:
    pair = get_pair(transport)
    victim, other = end_of(pair, which)
    if state == "bootstrapping":
        pair.unlink()
        handoff = HandOff(4)
        if which == "sender":
            pair.announce(handoff, DEADLINE_S)
        victim.kill()
        if which == "receiver":
            pair.order_push(handoff, DEADLINE_S)
        pair.failed(other, order_of(handoff, other), "PeerLost", *["TransferTimeout"] * (which == "sender"))
    else:
        handoffs = reach(pair, state)
        victim.kill()
        go_on_after(pair)
        for handoff in handoffs:
            pair.failed(other, order_of(handoff, other), "PeerLost")
    pair.check_settled()


@STATES
@ENDS
def test_an_end_that_stands_still_past_the_deadline_writes_nothing_when_it_goes_on(
    get_pair: GetPair, transport: str, state: str, which: str
) -> None:
    check_stop(get_pair(transport), state, which)


@BOTH
def test_without_checksums_an_end_that_goes_on_publishes_nothing_either(get_pair: GetPair, transport: str) -> None:
    check_stop(get_pair(transport, checksum=False), "mid-message", "receiver")


def check_stop(pair: Pair, state: str, which: str) -> None:
    """Stop one end for longer than the deadline; what the other end took back is overwritten meanwhile."""
    victim, other = end_of(pair, which)
    if state == "bootstrapping":
        pair.unlink()
        handoffs = [handoff := HandOff(4)]
        pair.announce(handoff, DEADLINE_S)
        victim.stop()
        started = pair.order_push(handoff, DEADLINE_S)
    else:
        handoffs = reach(pair, state)
        victim.stop()
    if (pair.transport, state, which) == ("shm", "mid-message", "sender"):  # its memory can be read all the same
        for handoff in handoffs:
            pair.check_received(handoff, other.result(order_of(handoff, other)))
        time.sleep(DEADLINE_S)
    else:
        ended = [pair.failed(other, order_of(handoff, other), "TransferTimeout", "PeerLost") for handoff in handoffs]
        # A receiver without a link may fail with PeerLost first: `LINK_TIMEOUT_S` is as long as the deadline.
        unlinked = (state, which) == ("bootstrapping", "sender")
        assert unlinked or any(each["error"] == "TransferTimeout" for each in ended)
    assert other.call("stats")["free"] == other.num_blocks
    go_on_after(pair)
    victim.go_on()
    late: set[str] = set()
    for handoff in handoffs:
        final = victim.result(order_of(handoff, victim), GRACE_S + DEADLINE_S)
        if which == "receiver":
            # What the kernel had all of may still count; what had to come out of the sender's memory may not.
            assert pair.transport != "shm" or "error" in final, f"published after the sender had given it up: {final}"
            pair.check_content(handoff, final)
        late.add(final.get("error", ""))
    if state == "bootstrapping":
        pair.sender.result(started)
        if which == "sender":
            assert late == {"TransferTimeout"}  # its receiver has given up, and announces nothing
    time.sleep(0.5)  # in which nobody may write
    pair.check_settled()


ALL = pytest.mark.parametrize(
    "transport",
    ["shm", "torch_dist", *(pytest.param(each, marks=pytest.mark.soak) for each in ("tcp", "grpc_stream"))],
)


@ALL
@ENDS
def test_what_waits_for_the_other_half_when_that_is_killed(get_pair: GetPair, transport: str, which: str) -> None:
    """For its announcement, or for its sender to begin."""
    pair = get_pair(transport)
    victim, other = end_of(pair, which)
    handoff = HandOff(4)
    if which == "sender":
        pair.announce(handoff, 60.0)
    else:
        pair.push(handoff, 60.0)
        pair.send(handoff, last=True)
    victim.kill()
    pair.failed(other, order_of(handoff, other), "PeerLost")
    pair.check_settled()


@ALL
@ENDS
def test_an_end_that_stands_still_past_the_deadline_before_the_announcement(
    get_pair: GetPair, transport: str, which: str
) -> None:
    """Whichever goes on late finds the hand-off over at the other end, and says so at once."""
    pair = get_pair(transport)
    victim, other = end_of(pair, which)
    handoff = HandOff(4)
    if which == "sender":
        pair.push(handoff, 60.0)
        pair.send(handoff, last=True)
        victim.stop()
        pair.announce(handoff, DEADLINE_S)
    else:
        victim.stop()
        pair.push(handoff, DEADLINE_S)
        pair.send(handoff, last=True)
    pair.failed(other, order_of(handoff, other), "TransferTimeout")
    assert other.call("stats")["free"] == other.num_blocks
    victim.go_on()
    if which == "receiver":
        pair.announce(handoff, 60.0)
        told = pair.failed(victim, order_of(handoff, victim), "TransferError", "TransferTimeout", "PeerLost")
        assert told["late_s"] < 0
    else:
        pair.failed(victim, order_of(handoff, victim), "TransferRefused", "TransferTimeout", "PeerLost")
    time.sleep(0.5)  # in which nobody may write
    pair.check_settled()


@pytest.mark.parametrize("transport", ["tcp", "grpc_stream"])
@pytest.mark.parametrize("state", ["linked", "mid-message"])
def test_a_connection_cut_on_its_way_fails_its_hand_offs_at_both_ends(
    get_pair: GetPair, transport: str, state: str
) -> None:
    pair = get_pair(transport)
    handoffs = reach(pair, state)
    assert pair.relay is not None
    pair.relay.cut()
    for handoff in handoffs:
        for end in (pair.sender, pair.receiver):
            assert pair.failed(end, order_of(handoff, end), "PeerLost")["late_s"] < 0
    pair.check_settled()


@ALL
def test_a_receiver_that_takes_nothing_until_the_deadline_keeps_nobody_s_blocks(
    get_pair: GetPair, transport: str
) -> None:
    pair = get_pair(transport)
    small, large = pair.start(4, DEADLINE_S), pair.start(LARGE, DEADLINE_S)
    pair.wait_status(large, "waiting")
    pair.receiver.call("sleep", seconds=DEADLINE_S + 0.7)
    pair.send(large, last=True)
    pair.send(small, last=True)
    for handoff in (small, large):
        pair.failed(pair.sender, handoff.sending, "TransferTimeout", "PeerLost")
    assert pair.sender.call("stats")["free"] == pair.sender.num_blocks
    for handoff in (small, large):
        received = pair.receiver.result(handoff.receiving)
        assert received["late_s"] < GRACE_S
        pair.check_content(handoff, received)
        if transport == "shm":
            assert "error" in received, f"published after the sender had given it up: {received}"
    pair.check_settled()


@BOTH
@pytest.mark.parametrize("checksum", [True, False], ids=["checksums", "no checksums"])
def test_what_a_sender_takes_back_is_never_published(get_pair: GetPair, transport: str, checksum: bool) -> None:
    pair = get_pair(transport, checksum=checksum)
    pair.receiver.call("slow", seconds=0.015)
    outcomes = []
    for i in range(16):
        handoff = pair.start(12, 5.0)
        for first in (0, 6, 3, 9)[: 3 if i % 4 == 0 else 4]:  # now and then the last message never comes
            pair.sender.begin("send", request=handoff.request, first=first, count=3, last=first == 9)
        if i == 15:  # one at least is complete before it is taken back
            received = pair.receiver.result(handoff.receiving)
        else:
            time.sleep(i * 0.006)
        pair.sender.result(pair.sender.begin("abort", request=handoff.request))  # its blocks are overwritten now
        if i < 15:
            received = pair.receiver.result(handoff.receiving)
        if "error" not in received:
            pair.check_received(handoff, received)
        outcomes.append(received.get("error"))
        assert "error" in pair.sender.result(handoff.sending) or outcomes[-1] is None
    assert None in outcomes
    assert set(outcomes) - {None}
    pair.receiver.call("slow", seconds=0)
    pair.check_settled()
