"""A seeded churn of hand-offs between two processes while 5 % of them meet a fault. `make soak` draws many, a normal
run of the tests a few.

Never once may a hand-off that is reported complete hold anything but its source, or another number of bytes than
predicted; one that fails does so within its deadline plus `GRACE_S`; in the end all blocks are free.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.kv_transfer.end import End, EndGone, Values, until
from tests.kv_transfer.pair import BLOCK_BYTES, GRACE_S

SEED = 20
TRANSPORTS = ["shm", "tcp", "grpc_stream"]
FAULT_SHARE = 0.05
CONCURRENCY = 12
NUM_BLOCKS = 384
NUM_LAYERS = 4
DEADLINES_S = (0.3, 4.0, 4.0)
STOP_S = 0.5
FAULTS = (
    *[f"{what} {role}" for what in ("kill", "stop", "cut", "abort") for role in ("sender", "receiver")],
    *["corrupt", "duplicate", "expire"],
)
ORDERS = ("pushed, announced", "announced, pushed")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draw:
    """What one hand-off will be."""

    number: int
    transport: str
    count: int
    skipped: int
    by_layers: bool
    pieces: int
    fault: str
    deadline_s: float
    pause_s: float
    order: str


def draws(seed: int, count: int) -> Iterator[Draw]:
    """The hand-offs of a seed."""
    draw = random.Random(seed)
    for number in range(count):
        blocks = draw.choice((1, 2, 3, 5, 8, 13, 21, 30))
        fault = draw.choice(FAULTS) if draw.random() < FAULT_SHARE else ""
        yield Draw(
            number,
            draw.choice(TRANSPORTS),
            blocks,
            draw.choice((0, 0, 0, draw.randrange(blocks))),
            draw.random() < 0.4,
            draw.randint(1, 4),
            fault,
            0.02 if fault == "expire" else draw.choice(DEADLINES_S),
            draw.random() * 0.02,
            draw.choice(ORDERS),
        )


class Churn:
    """Both ends, and what became of the hand-offs between them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.outcomes: Counter[str] = Counter()
        self._draw = random.Random(seed + 1)
        self._lock = threading.Lock()
        self._starting, self._striking = threading.Lock(), threading.Lock()
        self._ends = {role: self._new(role) for role in ("sender", "receiver")}

    def close(self) -> None:
        """End both."""
        for end in self._ends.values():
            end.close()

    def run(self, hand_off: Draw) -> None:
        """One hand-off, checked."""
        for _ in range(20):  # an end may be killed before anything began
            sender, receiver = self._alive("sender"), self._alive("receiver")
            with contextlib.suppress(EndGone):
                sent, received, source = self._pass(hand_off, sender, receiver)
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"{hand_off} could not begin")
        self._check(hand_off, sent, received, source)
        outcome = sent.get("error", "complete") if sent else "sender killed"
        with self._lock:
            self.outcomes[outcome] += 1
            done = self.outcomes.total()
        if done % 200 == 0:
            _log.info("%d hand-offs: %s", done, dict(self.outcomes))

    def check_settled(self) -> None:
        """All blocks are free, and nobody wrote to them."""
        for role in ("sender", "receiver"):
            end = self._alive(role)
            assert until(lambda end=end: end.call("stats")["free"] == NUM_BLOCKS), f"{role}: {end.call('stats')}"
            assert end.call("intact")["intact"], f"somebody wrote into free blocks of the {role}"

    def _pass(self, hand_off: Draw, sender: End, receiver: End) -> tuple[Values, Values, int | None]:
        """What the two ends report of it (nothing, if an end was killed), and a hash of what was to travel."""
        request = f"r{hand_off.number}"
        start = sending = receiving = -1
        try:
            if hand_off.fault in ("corrupt", "duplicate"):
                sender.call("tamper", transport=hand_off.transport, plan=[hand_off.fault])
            if hand_off.order == "announced, pushed":
                receiving = self._announce(hand_off, request, receiver)
            start = self._push(hand_off, request, sender, receiver)
            if hand_off.order == "pushed, announced":
                receiving = self._announce(hand_off, request, receiver)
            sending = sender.begin("wait", request=request)
            for order in _orders(hand_off):
                sender.begin("send", request=request, **order)
            time.sleep(hand_off.pause_s)
            self._strike(hand_off, request, sender, receiver)
        except EndGone:
            if start > 0 and sending < 0:  # the receiver was killed; the sender still holds the blocks until it waits
                with contextlib.suppress(EndGone):
                    sending = sender.begin("wait", request=request)
        return _result(sender, sending), _result(receiver, receiving), _result(sender, start).get("content")

    def _push(self, hand_off: Draw, request: str, sender: End, receiver: End) -> int:
        endpoints = [
            {"transport": transport, "address": address}
            for transport, address in receiver.about["endpoints"]
            if transport == hand_off.transport
        ]
        return sender.begin(
            "push",
            request=request,
            transport=hand_off.transport,
            peer={"worker_id": "d", "epoch": receiver.epoch, "endpoints": endpoints},
            count=hand_off.count,
            deadline_s=hand_off.deadline_s,
            seed=hand_off.number,
            skipped=hand_off.skipped,
        )

    def _announce(self, hand_off: Draw, request: str, receiver: End) -> int:
        receiver.call(
            "announce",
            request=request,
            sender_id=f"p-{hand_off.transport}",
            count=hand_off.count,
            deadline_s=hand_off.deadline_s,
            skipped=hand_off.skipped,
        )
        return receiver.begin("wait", request=request)

    def _strike(self, hand_off: Draw, request: str, sender: End, receiver: End) -> None:
        ends = {"sender": sender, "receiver": receiver}
        what, _, role = hand_off.fault.partition(" ")
        if what == "abort":
            ends[role].begin("abort", request=request)
        elif what == "cut":
            ends[role].begin("cut")
        elif what in ("kill", "stop"):
            with self._striking:
                if what == "kill":
                    ends[role].kill()
                elif ends[role].alive:
                    ends[role].stop()
                    time.sleep(STOP_S)
                    ends[role].go_on()

    def _check(self, hand_off: Draw, sent: Values, received: Values, source: int | None) -> None:
        """``source`` is None if the sender was killed before it told."""
        predicted = (hand_off.count - hand_off.skipped) * BLOCK_BYTES
        for values in (sent, received):
            assert values.get("late_s", 0) < GRACE_S, f"{hand_off}: {values}"
            if "error" not in values and "bytes" in values:
                assert values["bytes"] == predicted, f"{hand_off}: {values}"
        if "arrived" in received and "bytes" in received and source is not None:
            assert received["arrived"] == source, f"{hand_off} was published with other content"
        if sent and "error" not in sent and received:
            assert "bytes" in received, f"{hand_off} is complete for its sender alone: {received}"

    def _alive(self, role: str) -> End:
        with self._starting:
            if not self._ends[role].alive:
                self._ends[role].close()
                self._ends[role] = self._new(role)
            return self._ends[role]

    def _new(self, role: str) -> End:
        return End(
            role,
            TRANSPORTS,
            epoch=f"e{time.monotonic_ns()}",
            lease_s=2.0,
            message_bytes=self._draw.choice((1, 2, 5, 16)) * BLOCK_BYTES,
            max_inflight_bytes=self._draw.choice((2**20, 2**23)),
            num_blocks=NUM_BLOCKS,
        )


def _result(end: End, number: int) -> Values:
    """What came of an order; nothing if the end was killed first."""
    try:
        return end.result(number) if number > 0 else {}
    except EndGone:
        return {}


def _orders(hand_off: Draw) -> Iterator[dict[str, Any]]:
    """How its blocks are queued: in pieces, whole or layer by layer."""
    step = -(-hand_off.count // hand_off.pieces)
    firsts = range(0, hand_off.count, step)
    cuts = [[0, 1], [1, 3], [3, NUM_LAYERS]] if hand_off.by_layers else [[0, NUM_LAYERS]]
    for first in firsts:
        for layers in cuts:
            last = first == firsts[-1] and layers == cuts[-1]
            count = min(step, hand_off.count - first)
            yield {"first": first, "count": count, "layers": layers, "last": last, "trailer": "t" * last}


def churn(seed: int, count: int) -> Counter[str]:
    """So many hand-offs; how they ended."""
    churn = Churn(seed)
    try:
        with ThreadPoolExecutor(CONCURRENCY) as workers:
            for done in [workers.submit(churn.run, each) for each in draws(seed, count)]:
                done.result()
        churn.check_settled()
    except BaseException:
        _log.error("the seed was %d", seed)
        raise
    finally:
        churn.close()
    return churn.outcomes


def test_no_hand_off_among_faults_brings_anything_wrong() -> None:
    outcomes = churn(SEED, 150)
    assert outcomes.total() == 150
    assert outcomes["complete"] > 150 / 10, outcomes  # on a slow machine more deadlines pass


@pytest.mark.soak
@pytest.mark.timeout(1_800)
def test_no_hand_off_of_thousands_brings_anything_wrong() -> None:
    count, seed = 5_000, int(time.time())
    _log.info("the seed is %d", seed)
    outcomes = churn(seed, count)
    _log.info("%s", dict(outcomes))
    assert outcomes.total() == count
    assert outcomes["complete"] > count / 2, outcomes
